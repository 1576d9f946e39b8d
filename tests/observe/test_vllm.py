from __future__ import annotations

import gzip
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvwatch.observe.records import Engine, Failure, ServedModel, VllmRecord
from kvwatch.observe.vllm import VllmSource, used_blocks
from tests.export.webclient import make_certificate
from tests.observe.scripted_server import Answer, ScriptedServer, drip, hang, raw, reply, status
from tests.observe.vllm_pages import gauge, info, page, recorded
from tests.support import NewThreads

MODELS = {"object": "list", "data": [{"id": "tiny", "root": "models/tiny-llama", "max_model_len": 2048}]}
LOADED = recorded("0.32.0-dev_load")


def json_reply(value: object) -> Answer:
    return reply(json.dumps(value).encode(), "application/json")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    answers = {
        "/metrics": reply(LOADED),
        "/version": json_reply({"version": "0.32.0"}),
        "/v1/models": json_reply(MODELS),
    }
    with ScriptedServer(answers).running() as running:
        yield running


@pytest.fixture
def source(server: ScriptedServer) -> Iterator[VllmSource]:
    source = VllmSource(server.url, read_timeout=20, deadline=40)
    yield source
    source.close()


@pytest.fixture
def hasty(server: ScriptedServer) -> Iterator[VllmSource]:
    """A source that soon gives up."""
    source = VllmSource(server.url, read_timeout=0.7, deadline=1.0)
    yield source
    source.close()


def record(source: VllmSource) -> VllmRecord:
    result = source.read()
    assert isinstance(result, VllmRecord), result
    return result


def failure(source: VllmSource) -> Failure:
    result = source.read()
    assert isinstance(result, Failure), result
    assert result.source == "vllm"
    return result


def reasons(result: VllmRecord) -> list[str]:
    return [failure.reason for failure in result.failures]


# --- a server that answers --------------------------------------------------------------------------------


def test_reads_a_server(server: ScriptedServer, source: VllmSource) -> None:
    result = record(source)
    assert result.base_url == server.url
    assert result.version == "0.32.0"
    assert result.models == (ServedModel("tiny", "models/tiny-llama", 2048),)
    assert [(engine.num_blocks, engine.running) for engine in result.engines] == [(128, 14.0)]
    assert result.failures == ()
    assert used_blocks(result.engines[0], result.version) == 126


def test_asks_for_metadata_once_and_over_one_connection(server: ScriptedServer, source: VllmSource) -> None:
    first = record(source)
    assert record(source) == first
    assert server.paths() == ["/metrics", "/version", "/v1/models", "/metrics"]
    assert len({port for _, _, port in server.requests}) == 1


def test_asks_for_metadata_again_after_some_readings(server: ScriptedServer) -> None:
    source = VllmSource(server.url, metadata_every=2)
    for _ in range(3):
        record(source)
    source.close()
    assert server.paths().count("/version") == 2


def test_asks_for_metadata_again_when_the_server_was_restarted(
    server: ScriptedServer, source: VllmSource
) -> None:
    record(source)
    server.answers["/metrics"] = reply(page(info(), "process_start_time_seconds 1.9e9"))
    server.answers["/version"] = json_reply({"version": "0.33.0"})
    assert record(source).version == "0.33.0"


def test_asks_for_metadata_again_after_the_server_was_down(
    server: ScriptedServer, source: VllmSource
) -> None:
    record(source)
    server.answers["/metrics"] = status(503)
    failure(source)
    server.answers["/metrics"] = reply(LOADED)
    server.answers["/v1/models"] = json_reply({"data": []})
    assert record(source).models == ()


def test_asks_for_metadata_every_time_when_the_page_tells_no_start_time(
    server: ScriptedServer, source: VllmSource
) -> None:
    server.answers["/metrics"] = reply(recorded("0.32.0-dp2_idle"))
    for _ in range(2):
        record(source)
    assert server.paths().count("/version") == 2


def test_reads_a_compressed_page(server: ScriptedServer, source: VllmSource) -> None:
    server.answers["/metrics"] = reply(gzip.compress(LOADED), content_encoding="gzip")
    assert record(source).engines[0].running == 14.0
    assert server.requests[0][1]["Accept-Encoding"] == "gzip"


def test_reads_a_chunked_page(server: ScriptedServer, source: VllmSource) -> None:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (LOADED[:1000], LOADED[1000:]))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.answers["/metrics"] = raw(head + body + b"0\r\n\r\n")
    assert record(source).engines[0].running == 14.0


def test_reads_a_large_page(server: ScriptedServer) -> None:
    filler = b"".join(b'other_bucket{le="%d"} 1.0\n' % number for number in range(900_000))
    server.answers["/metrics"] = reply(LOADED + filler)
    source = VllmSource(server.url, deadline=60)
    assert record(source).engines[0].running == 14.0
    source.close()
    assert len(filler) > 22_000_000


def test_a_path_prefix_is_kept(server: ScriptedServer) -> None:
    server.answers["/llm/metrics"] = reply(LOADED)
    source = VllmSource(server.url + "/llm/")
    assert record(source).version is None
    source.close()
    assert server.paths() == ["/llm/metrics", "/llm/version", "/llm/v1/models"]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, source: VllmSource) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    record(source)


def test_a_connection_that_the_server_closed_is_opened_again(
    server: ScriptedServer, source: VllmSource
) -> None:
    def once(handler: object) -> None:
        handler.close_connection = True  # type: ignore[attr-defined]
        server.answers["/metrics"] = reply(LOADED)

    record(source)
    server.answers["/metrics"] = once
    assert record(source).engines[0].running == 14.0


# --- parts that are missing -------------------------------------------------------------------------------


def test_without_the_api_key_the_models_are_unknown(server: ScriptedServer, source: VllmSource) -> None:
    server.answers["/v1/models"] = status(401)
    result = record(source)
    assert result.models is None
    assert reasons(result) == ["http_401"]
    assert "/v1/models" in result.failures[0].detail


def test_the_api_key_is_sent(server: ScriptedServer) -> None:
    source = VllmSource(server.url, token="k-1")
    record(source)
    source.close()
    assert {headers["Authorization"] for _, headers, _ in server.requests} == {"Bearer k-1"}


def test_an_old_release_has_no_version(server: ScriptedServer, source: VllmSource) -> None:
    del server.answers["/version"]
    result = record(source)
    assert result.version is None
    assert result.failures == ()


def test_a_part_that_failed_is_asked_again(server: ScriptedServer, source: VllmSource) -> None:
    server.answers["/version"] = status(500)
    assert reasons(record(source)) == ["http_500"]
    server.answers["/version"] = json_reply({"version": "0.32.0"})
    assert record(source).version == "0.32.0"


def test_statistics_switched_off(server: ScriptedServer, source: VllmSource) -> None:
    server.answers["/metrics"] = reply(page("process_start_time_seconds 5.0"))
    result = record(source)
    assert result.engines == ()
    assert result.version == "0.32.0"
    assert reasons(result) == ["no_cache_config_info"]


def test_another_exporter_is_not_a_server(server: ScriptedServer, source: VllmSource) -> None:
    server.answers = {"/metrics": reply(page("node_load1 5.0"))}
    assert failure(source).reason == "not_vllm"


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/version", {"version": 3}),
        ("/version", {"version": "x" * 1000}),
        ("/version", ["0.32.0"]),
        ("/v1/models", {"data": "tiny"}),
        ("/v1/models", {"data": [{"id": 7}]}),
        ("/v1/models", {"data": ["tiny"]}),
        ("/v1/models", {"data": [{"id": "x" * 1000}]}),
        ("/v1/models", {"data": [{"id": "m"}] * 1001}),
    ],
)
def test_metadata_of_the_wrong_type(
    server: ScriptedServer, source: VllmSource, path: str, answer: object
) -> None:
    server.answers[path] = json_reply(answer)
    result = record(source)
    assert (result.version if path == "/version" else result.models) is None
    assert reasons(result) == ["bad_json"]


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[" * 100_000, b"\xff", b'{"version": ' + b"1" * 5000 + b"}"]
)
def test_metadata_that_is_not_json(server: ScriptedServer, source: VllmSource, body: bytes) -> None:
    server.answers["/version"] = reply(body, "application/json")
    assert record(source).version is None
    assert reasons(record(source)) == ["bad_json"]


@pytest.mark.parametrize("length", [-1, 0, True, "2048", 2048.5, None, float("inf"), 10**400])
def test_a_length_of_the_wrong_type_is_absent(
    server: ScriptedServer, source: VllmSource, length: object
) -> None:
    server.answers["/v1/models"] = json_reply({"data": [{"id": "m", "root": 5, "max_model_len": length}]})
    assert record(source).models == (ServedModel("m", None, None),)


# --- servers that do not answer properly ------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(401), "http_401"),
        (status(404), "http_404"),
        (status(503), "http_503"),
        (status(204), "http_204"),
        (status(302, Location="http://127.0.0.1:1/metrics"), "http_302"),
        (reply(b""), "empty_page"),
        (reply(LOADED, "text/html"), "not_metrics"),
        (reply(b"<html></html>\n"), "not_metrics"),
        (reply(LOADED[:5000]), "truncated"),
        (reply(LOADED, content_encoding="br"), "bad_encoding"),
        (reply(LOADED, content_encoding="gzip"), "bad_encoding"),
        (reply(gzip.compress(LOADED)[:-20], content_encoding="gzip"), "truncated"),
        (reply(gzip.compress(LOADED) + b"more", content_encoding="gzip"), "truncated"),
        (raw(HEAD + b"Content-Length: 99999\r\n\r\n" + LOADED[:100]), "truncated"),
        (raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n500\r\nshort"), "truncated"),
        (raw(b"SSH-2.0-OpenSSH_9.2\r\n"), "http_error"),
        (raw(b""), "connection_reset"),
        (raw(HEAD + b"X: " + b"x" * 100_000 + b"\r\n\r\n"), "http_error"),
        (raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc"), "truncated"),
    ],
)
def test_unusable_answer(server: ScriptedServer, source: VllmSource, answer: Answer, reason: str) -> None:
    server.answers["/metrics"] = answer
    assert failure(source).reason == reason
    assert set(server.paths()) == {"/metrics"}


def test_a_page_above_the_limit(server: ScriptedServer) -> None:
    source = VllmSource(server.url, max_bytes=10_000)
    assert failure(source).reason == "too_large"
    source.close()


def test_a_compressed_page_above_the_limit(server: ScriptedServer) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    server.answers["/metrics"] = reply(bomb, content_encoding="gzip")
    source = VllmSource(server.url, max_bytes=1_000_000)
    assert failure(source).reason == "too_large"
    source.close()


def test_a_server_that_hangs(server: ScriptedServer, hasty: VllmSource) -> None:
    server.answers["/metrics"] = hang(server.released)
    assert failure(hasty).reason == "timeout"


@pytest.mark.parametrize(
    ("start", "byte"),
    [
        (b"", b"H"),
        (HEAD, b"X"),
        (HEAD + b"\r\n", b"#"),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"#"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    ],
)
def test_a_server_that_drips(server: ScriptedServer, hasty: VllmSource, start: bytes, byte: bytes) -> None:
    server.answers["/metrics"] = drip(start, byte, server.released)
    begun = time.monotonic()
    assert failure(hasty).reason == "timeout"
    assert time.monotonic() - begun < 10
    server.answers["/metrics"] = reply(LOADED)
    assert record(hasty).engines[0].running == 14.0


def test_metadata_shares_the_deadline(server: ScriptedServer, hasty: VllmSource) -> None:
    server.answers["/version"] = drip(HEAD, b"X", server.released)
    result = record(hasty)
    assert result.engines[0].running == 14.0
    assert (result.version, result.models) == (None, None)
    assert reasons(result) == ["timeout", "timeout"]


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        source = VllmSource(f"http://127.0.0.1:{unused.getsockname()[1]}")
        found = failure(source)
    assert (found.reason, found.detail) == (
        "connection_refused",
        f"{source.base_url}/metrics: connection refused",
    )


def test_tls_to_a_plain_server(server: ScriptedServer) -> None:
    source = VllmSource(server.url.replace("http", "https"))
    assert failure(source).reason == "tls"
    source.close()


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[ScriptedServer]:
    make_certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with ScriptedServer({"/metrics": reply(LOADED)}, context).running() as running:
        yield running


def test_tls_is_verified(tls_server: ScriptedServer, tmp_path: Path) -> None:
    for verify in (str(tmp_path / "server.crt"), False):
        source = VllmSource(tls_server.url, verify=verify)
        assert record(source).engines[0].running == 14.0
        source.close()
    source = VllmSource(tls_server.url)
    assert failure(source).reason == "tls"
    source.close()


def test_a_tls_server_that_drips(tls_server: ScriptedServer) -> None:
    tls_server.answers["/metrics"] = drip(HEAD, b"X", tls_server.released)
    source = VllmSource(tls_server.url, verify=False, deadline=0.5)
    assert failure(source).reason == "timeout"
    source.close()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://u:p@host", "http://h/?a=1"]
)
def test_an_address_that_cannot_be_asked(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        VllmSource(url)


def test_threads_and_descriptors_are_given_back(server: ScriptedServer, hasty: VllmSource) -> None:
    record(hasty)
    new_threads = NewThreads()
    for answer in (drip(HEAD, b"X", server.released), raw(b""), status(503)):
        server.answers["/metrics"] = answer
        failure(hasty)
    server.answers["/metrics"] = reply(LOADED)
    record(hasty)
    workers = [thread.name for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert workers == []
    assert new_threads() <= 3  # the test server's own threads


# --- used blocks ------------------------------------------------------------------------------------------

POOL = Engine("0", num_blocks=1001)


@pytest.mark.parametrize(
    ("version", "usage", "held"),
    [
        ("0.3.3", 250 / 1001, 250),
        ("0.7.3", 0.0, 0),
        ("0.8.5", 1 / 1001, 0),
        ("0.10.1", 251 / 1001, 250),
        ("0.10.1", 0.0, 0),
        ("0.10.2", 250 / 1000, 250),
        ("0.10.2", 0.0, 0),
        ("0.32.0", 1.0, 1000),
        ("0.33.0+cpu", 1 - 750 / 1000, 250),
        (None, 0.25, 250),
        ("main", 0.25, 250),
        # The product is not whole: another pool or another release.
        ("0.32.0", 250 / 1001, None),
        ("0.9.2", 250 / 1000, None),
        (None, 250 / 1001, None),
        ("0.32.0", None, None),
    ],
)
def test_used_blocks(version: str | None, usage: float | None, held: int | None) -> None:
    assert used_blocks(replace(POOL, usage=usage), version) == held


def test_used_blocks_of_a_pool_of_unknown_size() -> None:
    assert used_blocks(Engine("0", usage=0.5), "0.32.0") is None


@pytest.mark.parametrize(
    ("version", "engine", "blocks"), [("0.9.1", "1", None), ("0.9.1", "0", 1001), ("0.10.0", "1", 1001)]
)
def test_before_0_10_a_page_may_show_the_last_of_several_engines(
    server: ScriptedServer, source: VllmSource, version: str, engine: str, blocks: int | None
) -> None:
    server.answers["/metrics"] = reply(page(info(engine), gauge("gpu_cache_usage_perc", 0.5, engine)))
    server.answers["/version"] = json_reply({"version": version})
    result = record(source)
    assert result.engines[0].num_blocks == blocks
    assert reasons(result) == ([] if blocks else ["ambiguous_engines"])

"""`kvwatch fleet` on a real Prometheus; its client on servers that want or do other things."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvwatch.cli.main import main
from kvwatch.fleet.api import Access, ApiError, PrometheusApi
from kvwatch.fleet.survey import Fleet, survey
from kvwatch.fleet.text import fleet_text
from tests.e2e.prometheus import Prometheus, tool
from tests.e2e.waiting import free_port
from tests.export.webclient import make_certificate

pytestmark = pytest.mark.xdist_group("fleet")

GIB = 1 << 30

NODES = """\
up{instance="roomy",cluster="eu"} 1
kvwatch_up{instance="roomy",cluster="eu"} 1
kvwatch_gpu_info{instance="roomy",cluster="eu",gpu="0"} 1
kvwatch_gpu_info{instance="roomy",cluster="eu",gpu="1"} 1
kvwatch_gpu_memory_total_bytes{instance="roomy",cluster="eu",gpu="0"} 80 GIB
kvwatch_gpu_memory_total_bytes{instance="roomy",cluster="eu",gpu="1"} 80 GIB
kvwatch_gpu_memory_free_bytes{instance="roomy",cluster="eu",gpu="0"} 10 GIB
kvwatch_gpu_memory_free_bytes{instance="roomy",cluster="eu",gpu="1"} 20 GIB
kvwatch_server_up{instance="roomy",cluster="eu",server="chat"} 1
kvwatch_max_model_len_tokens{instance="roomy",cluster="eu",server="chat"} 8192
kvwatch_restart_feasible{instance="roomy",cluster="eu",server="chat"} 1
kvwatch_restart_margin_bytes{instance="roomy",cluster="eu",server="chat",gpu="0",check="free_memory"} 5 GIB
kvwatch_restart_margin_bytes{instance="roomy",cluster="eu",server="chat",gpu="1",check="free_memory"} 7 GIB
kvwatch_restart_max_model_len_tokens{instance="roomy",cluster="eu",server="chat"} 16384
kvwatch_plan_feasible{instance="roomy",cluster="eu",server="chat",plan="long"} 1
kvwatch_plan_margin_bytes{instance="roomy",cluster="eu",server="chat",plan="long",check="one_request"} 1 GIB
kvwatch_plan_max_model_len_tokens{instance="roomy",cluster="eu",server="chat",plan="long"} 16384

up{instance="full",cluster="us"} 1
kvwatch_up{instance="full",cluster="us"} 1
kvwatch_gpu_info{instance="full",cluster="us",gpu="0"} 1
kvwatch_gpu_memory_held_bytes{instance="full",cluster="us",gpu="0",owner="foreign"} 2 GIB
kvwatch_gpu_memory_held_bytes{instance="full",cluster="us",gpu="0",owner="orphan"} 3 GIB
kvwatch_server_up{instance="full",cluster="us",server="chat"} 1
kvwatch_restart_feasible{instance="full",cluster="us",server="chat"} 0
kvwatch_restart_blocked{instance="full",cluster="us",server="chat",check="free_memory"} 1
kvwatch_restart_blocked{instance="full",cluster="us",server="chat",check="one_request"} 0
kvwatch_restart_margin_bytes{instance="full",cluster="us",server="chat",gpu="0",check="free_memory"} -1 GIB
kvwatch_restart_margin_bytes{instance="full",cluster="us",server="chat",gpu="0",check="one_request"} -4 GIB
kvwatch_restart_max_model_len_tokens{instance="full",cluster="us",server="chat"} 4096
kvwatch_pending_change{instance="full",cluster="us",server="chat",setting="max_model_len"} 1
kvwatch_pending_feasible{instance="full",cluster="us",server="chat"} 0
kvwatch_plan_feasible{instance="full",cluster="us",server="chat",plan="long"} 0
kvwatch_plan_blocked{instance="full",cluster="us",server="chat",plan="long",check="free_memory"} 1

up{instance="dim",cluster="us"} 1
kvwatch_up{instance="dim",cluster="us"} 1
kvwatch_server_up{instance="dim",cluster="us",server="chat"} 0
kvwatch_forecast_unknown{instance="dim",cluster="us",server="chat",forecast="restart",reason="server_down"} 1
kvwatch_forecast_unknown{instance="dim",cluster="us",server="chat",forecast="plan:long",reason="no_base"} 1

up{instance="gone",cluster="us"} 0
"""


def openmetrics(text: str, now: float) -> str:
    lines = []
    for line in filter(None, text.splitlines()):
        series, value = line.replace(" GIB", "e9").rsplit(" ", 1)
        number = float(value.removesuffix("e9")) * (GIB if value.endswith("e9") else 1)
        lines.append(f"{series.replace('{', '{job=%kvwatch%,'.replace('%', chr(34)), 1)} {number} {now:.3f}")
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("fleet")
    page = directory / "nodes.om"
    page.write_text(openmetrics(NODES, time.time()))
    create = [
        tool("promtool"),
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        str(page),
        str(directory / "data"),
    ]
    subprocess.run(create, check=True, capture_output=True)
    with Prometheus(directory) as prometheus:
        yield prometheus.url


@pytest.fixture(scope="module")
def fleet(url: str) -> Fleet:
    with PrometheusApi(Access(url)) as api:
        return survey(api.query)


def test_the_worst_node_comes_first(fleet: Fleet) -> None:
    assert [(node.node, node.up) for node in fleet.nodes] == [
        ("full", True),
        ("gone", False),
        ("dim", True),
        ("roomy", True),
    ]


def test_sums_are_over_the_cards_of_a_node(fleet: Fleet) -> None:
    full, gone, _, roomy = fleet.nodes
    assert (roomy.gpus, roomy.total, roomy.free) == (2, 160 * GIB, 30 * GIB)
    assert (roomy.largest_free, roomy.headroom) == (20 * GIB, 5 * GIB)
    assert (full.foreign, full.orphan, full.headroom) == (2 * GIB, 3 * GIB, -4 * GIB)
    assert (gone.gpus, gone.free, gone.servers) == (None, None, ())


def test_a_server_that_fails_names_check_bytes_and_length(fleet: Fleet) -> None:
    [server] = fleet.nodes[0].servers
    assert server.feasible is False
    assert (server.check, server.margin, server.longest) == ("free_memory", -GIB, 4096)
    assert (server.pending, server.pending_feasible) == (("max_model_len",), False)


def test_what_is_unknown_is_not_good(fleet: Fleet) -> None:
    [server] = fleet.nodes[2].servers
    assert (server.feasible, server.unknown, server.margin) == (None, "server_down", None)


def test_plans_are_compared_across_nodes(fleet: Fleet) -> None:
    assert [(plan.node, plan.feasible, plan.check, plan.margin) for plan in fleet.plans] == [
        ("full", False, "free_memory", None),
        ("roomy", True, None, GIB),
    ]


def test_the_table(fleet: Fleet) -> None:
    lines = fleet_text(fleet).splitlines()
    assert lines[1].split() == ["full", "1", "2.00", "GiB", "3.00", "GiB", "1", "-4.00", "GiB", "1", "FAILS"]
    assert lines[2].split()[-2:] == ["no", "answer"]
    assert (
        "chat on full: a restart would fail: free memory on the card, 1.00 GiB missing;"
        " --max-model-len 4096 would start"
    ) in lines
    assert "chat on full: next start changes max_model_len: would FAIL" in lines
    assert "chat on dim: unknown: server_down" in lines
    assert lines[-1].split() == ["long", "chat", "roomy", "starts", "1.00", "GiB", "16384"]
    assert fleet_text(fleet, plan="short").endswith("no node judges a plan called short")


@pytest.mark.parametrize(
    ("match", "code"), [("", 1), ('cluster="eu"', 0), ('instance="dim"', 2), ('cluster="mars"', 2)]
)
def test_the_exit_code_is_the_verdict(
    url: str, match: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "--prometheus", url, "--match", match, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert len(document["nodes"]) == {1: 4, 0: 1, 2: len(document["nodes"])}[code]


def test_another_label_may_name_the_nodes(url: str) -> None:
    with PrometheusApi(Access(url)) as api:
        found = survey(api.query, node_label="cluster")
    assert [(node.node, node.infeasible) for node in found.nodes] == [("us", 1), ("eu", 0)]


def test_a_wrong_matcher_is_the_operators_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--prometheus", url, "--match", "cluster=eu"]) == 2
    assert "parse error" in capsys.readouterr().err


# --- the client -----------------------------------------------------------------------------------------

EMPTY = {"status": "success", "data": {"resultType": "vector", "result": []}}


@contextmanager
def serving(
    document: Any, *, status: int = 200, certificate: Path | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """An API that always answers the same; yields its URL and the headers of the requests that came."""
    seen: list[Any] = []
    body = document if isinstance(document, bytes) else json.dumps(document).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Requests are not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.with_suffix(".crt"), certificate.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}/prometheus/", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(access: Access) -> PrometheusApi:
    with PrometheusApi(access) as api:
        api.query("kvwatch_up")
    return api


def test_sends_the_token_and_the_headers(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving(EMPTY) as (url, seen):
        ask(Access(url, token_file=token, headers={"X-Scope-OrgID": "team"}))
    [(path, headers)] = seen
    assert path == "/prometheus/api/v1/query"
    assert headers["Authorization"] == "Bearer secret"
    assert headers["X-Scope-OrgID"] == "team"


def test_trusts_the_given_authority_only(tmp_path: Path) -> None:
    make_certificate(tmp_path, "server")
    with serving(EMPTY, certificate=tmp_path / "server") as (url, seen):
        with pytest.raises(ApiError, match="TLS"):
            ask(Access(url))
        ask(Access(url, ca_file=tmp_path / "server.crt"))
    assert len(seen) == 1


def test_passes_on_that_an_answer_is_partial() -> None:
    with serving({**EMPTY, "warnings": ["no store for eu"]}) as (url, _):
        assert list(ask(Access(url)).warnings) == ["no store for eu"]


@pytest.mark.parametrize(
    ("status", "document", "message"),
    [
        (401, b"unauthorized", "HTTP 401, and no JSON"),
        (422, {"status": "error", "error": "too many samples"}, "HTTP 422: too many samples"),
        (200, ["surprise"], "not an answer"),
        (200, {"status": "success", "data": {"result": [{"metric": {}}]}}, "not answer like Prometheus"),
    ],
)
def test_says_what_is_wrong_with_an_answer(status: int, document: Any, message: str) -> None:
    with serving(document, status=status) as (url, _), pytest.raises(ApiError, match=message):
        ask(Access(url))


def test_says_that_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["fleet", "--prometheus", url]) == 2
    assert capsys.readouterr().err == f"kvwatch: {url}: no connection: Connection refused\n"


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://prometheus", "http://"])
def test_says_what_is_no_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fleet", "--prometheus", url])
    assert ended.value.code == 2
    assert f"--prometheus: {url!r} is not an http:// or https:// address" in capsys.readouterr().err


def test_says_that_the_token_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="No such file"):
        ask(Access("http://127.0.0.1:1", token_file=tmp_path / "none"))


def test_says_what_is_wrong_with_the_authorities(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="none: No such file"):
        ask(Access("https://127.0.0.1:1", ca_file=tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(ApiError, match="empty: no certificate in PEM format"):
        ask(Access("https://127.0.0.1:1", ca_file=tmp_path / "empty"))


@pytest.mark.parametrize("flag", [["--header", "nothing"], ["--timeout", "0"], ["--timeout", "inf"]])
def test_refuses_flags_that_cannot_be_meant(flag: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fleet", "--prometheus", "http://127.0.0.1:1", *flag])
    assert ended.value.code == 2

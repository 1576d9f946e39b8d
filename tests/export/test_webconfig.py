from __future__ import annotations

import base64
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest

from kvwatch.export import basicauth
from kvwatch.export.basicauth import BasicAuth
from kvwatch.export.server import ExporterServer, Limits
from kvwatch.export.webconfig import WebConfig, load_web_config
from kvwatch.yamlfile import ConfigError
from tests.export.webclient import (
    CONTENT,
    connect,
    eventually,
    fetch,
    lock_key,
    make_certificate,
    read_all,
    running,
)

HASHES = {password: bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)) for password in ("right", "other")}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name, issuer in (
        ("ca", None),
        ("server", "ca"),
        ("renewed", "ca"),
        ("client", "ca"),
        ("stranger", None),
    ):
        make_certificate(folder, name, issuer=issuer)
    lock_key(folder / "server.key", folder / "locked.key")
    return folder


@pytest.fixture
def folder(tmp_path: Path, certificates: Path) -> Path:
    for file in certificates.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "web.yml"
    path.write_text(text)
    return path


TLS = """\
tls_server_config:
  cert_file: server.crt
  key_file: server.key
"""


def client_context(folder: Path, certificate: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    if certificate is not None:
        context.load_cert_chain(folder / f"{certificate}.crt", folder / f"{certificate}.key")
    return context


def over_tls(server: ExporterServer, folder: Path) -> ssl.SSLSocket:
    return client_context(folder).wrap_socket(connect(server), server_hostname="127.0.0.1")


@pytest.fixture
def tls_server(folder: Path) -> Iterator[ExporterServer]:
    with running(web_config=WebConfig(write(folder, TLS))) as server:
        yield server


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# --- TLS --------------------------------------------------------------------------------------------------


def test_tls(tls_server: ExporterServer, folder: Path) -> None:
    answer = fetch(tls_server, tls=client_context(folder))
    assert (answer.status, answer.body) == (200, CONTENT.metrics)


def test_plain_http_to_a_tls_server_gets_nothing(tls_server: ExporterServer) -> None:
    with connect(tls_server) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"HTTP" not in read_all(client)
    assert eventually(lambda: tls_server.connections == 0)


def test_an_old_protocol_version_is_refused(folder: Path) -> None:
    with running(web_config=WebConfig(write(folder, TLS + "  min_version: TLS13\n"))) as server:
        assert fetch(server, tls=client_context(folder)).status == 200
        old = client_context(folder)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError, match=r"alert|EOF|reset"):
            fetch(server, tls=old)


def test_silent_tls_clients_do_not_keep_others_out(folder: Path) -> None:
    limits = Limits(connections=20)
    with running(web_config=WebConfig(write(folder, TLS)), limits=limits) as server:
        silent = [connect(server) for _ in range(50)]
        for client in silent[::2]:
            client.sendall(b"\x16\x03\x01")
        context = client_context(folder)
        assert [fetch(server, tls=context).status for _ in range(5)] == [200] * 5
        for client in silent:
            client.close()
        assert eventually(lambda: server.connections == 0)


def test_a_tls_client_that_drips_its_handshake_is_cut_in_time(folder: Path) -> None:
    limits = Limits(request=0.3, tick=0.02)
    with (
        running(web_config=WebConfig(write(folder, TLS)), limits=limits) as server,
        connect(server) as client,
    ):
        client.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert eventually(lambda: server.connections == 0)


def test_an_idle_tls_connection_is_cut_in_time(folder: Path) -> None:
    limits = Limits(idle=0.2, tick=0.02)
    config = WebConfig(write(folder, TLS))
    with running(web_config=config, limits=limits) as server, over_tls(server, folder) as client:
        client.sendall(b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).endswith(b"ready\n")
        assert eventually(lambda: server.connections == 0)


CLIENT_CERTIFICATES = TLS + "  client_auth_type: {kind}\n  client_ca_file: ca.crt\n"


@pytest.mark.parametrize(
    ("kind", "certificate", "admitted"),
    [
        ("RequireAndVerifyClientCert", "client", True),
        ("RequireAndVerifyClientCert", "stranger", False),
        ("RequireAndVerifyClientCert", None, False),
        ("VerifyClientCertIfGiven", "client", True),
        ("VerifyClientCertIfGiven", "stranger", False),
        ("VerifyClientCertIfGiven", None, True),
    ],
)
def test_client_certificates(folder: Path, kind: str, certificate: str | None, admitted: bool) -> None:
    config = WebConfig(write(folder, CLIENT_CERTIFICATES.format(kind=kind)))
    with running(web_config=config) as server:
        context = client_context(folder, certificate)
        if admitted:
            assert fetch(server, tls=context).status == 200
        else:
            with pytest.raises(OSError, match=r"alert|EOF|reset"):
                fetch(server, tls=context)


# --- reading again ----------------------------------------------------------------------------------------


@pytest.fixture
def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> WebConfig:
    """Settings that look at the files at every connection."""
    monkeypatch.setattr("kvwatch.export.webconfig._RECHECK_SECONDS", 0.0)
    return WebConfig(write(folder, TLS))


def served_certificate(server: ExporterServer, folder: Path) -> bytes | None:
    with over_tls(server, folder) as client:
        return client.getpeercert(binary_form=True)


def test_a_renewed_certificate_is_served(folder: Path, watched: WebConfig) -> None:
    with running(web_config=watched) as server:
        before = served_certificate(server, folder)
        for kind in ("crt", "key"):
            (folder / f"renewed.{kind}").replace(folder / f"server.{kind}")
        after = served_certificate(server, folder)
    assert before != after == ssl.PEM_cert_to_DER_cert((folder / "server.crt").read_text())


def test_a_broken_certificate_leaves_the_old_one_in_force(
    folder: Path, watched: WebConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with running(web_config=watched) as server:
        before = served_certificate(server, folder)
        (folder / "server.crt").write_text("broken")
        assert served_certificate(server, folder) == before
        assert served_certificate(server, folder) == before
        refused = [record for record in caplog.records if "refused" in record.message]
        assert len(refused) == 1
        assert "cert_file or key_file" in str(refused[0].__dict__["fields"]["detail"])
        shutil.copy(folder / "renewed.crt", folder / "server.crt")
        shutil.copy(folder / "renewed.key", folder / "server.key")
        assert served_certificate(server, folder) != before


def test_a_changed_file_takes_effect(folder: Path, watched: WebConfig) -> None:
    with running(web_config=watched) as server:
        write(folder, "http_server_config:\n  headers:\n    X-Frame-Options: deny\n")
        assert fetch(server).headers["X-Frame-Options"] == "deny"


# --- basic authentication ---------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ExporterServer]:
    users = "".join(
        f"  {name}: {HASHES[word].decode()}\n" for name, word in (("prom", "right"), ("ops", "other"))
    )
    with running(web_config=WebConfig(write(tmp_path, "basic_auth_users:\n" + users))) as server:
        yield server


def test_the_right_password_gets_in(guarded: ExporterServer) -> None:
    assert fetch(guarded, Authorization=basic("prom", "right")).body == CONTENT.metrics
    assert fetch(guarded, Authorization=basic("ops", "other")).status == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Basic",
        "Basic !!!",
        "Bearer right",
        "Basic " + base64.b64encode(b"prom").decode(),
        basic("prom", "wrong"),
        basic("prom", "other"),
        basic("nobody", "right"),
        basic("nobody", "other"),
        basic("prom", ""),
        basic("prom", "right" * 50),
        basic("prom", "right\0"),
        "Basic " + base64.b64encode(b"\xff:right").decode(),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/nowhere"])
def test_everything_else_stays_out(guarded: ExporterServer, authorization: str | None, path: str) -> None:
    answer = (
        fetch(guarded, path) if authorization is None else fetch(guarded, path, Authorization=authorization)
    )
    assert (answer.status, answer.body) == (401, b"Unauthorized\n")
    assert answer.headers["WWW-Authenticate"] == 'Basic realm="kvwatch"'


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The hashes that bcrypt was run against."""
    seen: list[bytes] = []
    real = basicauth._matches

    def counting(password: bytes, stored: bytes) -> bool:
        seen.append(stored)
        return real(password, stored)

    monkeypatch.setattr(basicauth, "_matches", counting)
    return seen


def test_outcomes_are_cached(checks: list[bytes]) -> None:
    auth = BasicAuth({"prom": HASHES["right"]})
    for _ in range(3):
        assert auth.admits(basic("prom", "right"))
        assert not auth.admits(basic("prom", "wrong"))
    assert len(checks) == 2


def test_guesses_do_not_crowd_out_a_scraper(checks: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    auth = BasicAuth({"prom": HASHES["right"]})
    assert auth.admits(basic("prom", "right"))
    for number in range(150):
        assert not auth.admits(basic("prom", str(number)))
    checks.clear()
    assert auth.admits(basic("prom", "right"))
    assert checks == []
    assert not auth.admits(basic("prom", "0"))
    assert len(checks) == 1


def test_an_unknown_user_costs_a_check_against_the_dearest_hash(checks: list[bytes]) -> None:
    dear = bcrypt.hashpw(b"x", bcrypt.gensalt(5))
    auth = BasicAuth({"prom": HASHES["right"], "ops": dear})
    assert not auth.admits(basic("nobody", "x"))
    assert checks == [dear]


# --- the file ---------------------------------------------------------------------------------------------


def test_an_empty_file_serves_everybody(tmp_path: Path) -> None:
    settings = load_web_config(write(tmp_path, "# nothing\n"))
    assert (settings.tls, settings.auth, dict(settings.headers)) == (None, None, {})


def test_headers_are_added_to_every_answer(tmp_path: Path) -> None:
    text = "http_server_config:\n  http2: false\n  headers:\n    Strict-Transport-Security: max-age=5\n"
    with running(web_config=WebConfig(write(tmp_path, text))) as server:
        for path in ("/metrics", "/nowhere"):
            assert fetch(server, path).headers["Strict-Transport-Security"] == "max-age=5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls_config: {}\n", "web.yml:1: tls_config: unknown field"),
        (TLS + "  cert: x\n", "web.yml:4: tls_server_config.cert: this server cannot honour it"),
        (TLS + "  cipher_suites: [a]\n", "web.yml:4: tls_server_config.cipher_suites: this server cannot"),
        (TLS + "  certfile: x\n", "web.yml:4: tls_server_config.certfile: unknown field"),
        ("tls_server_config:\n  cert_file: server.crt\n", "web.yml:2: tls_server_config.key_file: missing"),
        (
            TLS.replace("server.key", "gone.key"),
            "web.yml:3: tls_server_config.key_file: .*gone.key: No such file",
        ),
        (
            TLS.replace("server.key", "client.key"),
            "web.yml:2: tls_server_config: cert_file or key_file: the key is not the certificate's",
        ),
        (
            TLS.replace("server.key", "web.yml"),
            "web.yml:2: tls_server_config: cert_file or key_file: no certificate, or no key, in PEM format",
        ),
        (
            TLS.replace("server.key", "locked.key"),
            "tls_server_config: cert_file or key_file: the key is encrypted",
        ),
        (TLS + "  min_version: TLS10\n", "web.yml:4: .*min_version: 'TLS10' is none of TLS12, TLS13"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12\n", "tls_server_config: min_version is above"),
        (TLS + "  client_ca_file: ca.crt\n", "client_ca_file and a client_auth_type"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", "client_ca_file and a client_auth_type"),
        (TLS + "  client_auth_type: RequestClientCert\n", "client_auth_type: 'RequestClientCert' is none of"),
        (TLS + "  client_auth_type: [x]\n", "client_auth_type: .* is none of"),
        (
            "http_server_config:\n  http2: true\n",
            "web.yml:2: http_server_config.http2: this server speaks HTTP/1.1",
        ),
        ("http_server_config:\n  headers:\n    Server: x\n", "web.yml:3: .*headers.Server: unknown field"),
        (
            'http_server_config:\n  headers:\n    X-Frame-Options: "a\\nb"\n',
            "web.yml:3: .*X-Frame-Options: not fit for a header",
        ),
        ("basic_auth_users:\n  prom: plain\n", "web.yml:2: basic_auth_users.prom: not a bcrypt hash"),
        ("basic_auth_users:\n  prom: 5\n", "web.yml:2: basic_auth_users.prom: not a bcrypt hash"),
        ("rate_limit: {burst: 1}\n", "web.yml:1: rate_limit: this server cannot honour it"),
        ("a: [\n", "web.yml:2: "),
        ("[]\n", "web.yml:1: the file: expected a mapping"),
    ],
)
def test_errors_name_line_and_field(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_web_config(write(folder, text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("none.yml: No such file or directory")):
        WebConfig(tmp_path / "none.yml")

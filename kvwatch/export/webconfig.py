"""TLS, basic authentication and extra headers out of a file in the format of Prometheus' exporter-toolkit.

The file, the certificates and the keys are read again when they change; when the new ones cannot be used the
old ones stay in force and the reason is logged. What this server cannot honour is an error, not ignored.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from kvwatch.export.basicauth import BasicAuth, bcrypt_hash
from kvwatch.filestamp import Stamp, stamp
from kvwatch.logs import log_event
from kvwatch.yamlfile import ConfigError, Section, boolean, parse_yaml, plain_text, read_text

T = TypeVar("T")

_RECHECK_SECONDS = 1.0

_VERSIONS = MappingProxyType(
    {
        "TLS12": ssl.TLSVersion.TLSv1_2,
        "TLS13": ssl.TLSVersion.TLSv1_3,
    }
)
_CLIENT_AUTH = MappingProxyType(
    {
        "NoClientCert": ssl.CERT_NONE,
        "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
        "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
    }
)
_TLS_NOT_HONOURED = (
    "cert",
    "key",
    "client_ca",
    "client_allowed_sans",
    "cipher_suites",
    "curve_preferences",
)
_NOT_HONOURED = ("rate_limit",)
_HEADERS = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)


@dataclass(frozen=True, slots=True)
class WebSettings:
    """What one reading of the file says.

    Attributes:
        tls: context to wrap connections with; None serves plain HTTP.
        auth: None lets everybody in.
        headers: added to every answer.
        files: the certificates and keys that the context was made of.
    """

    tls: ssl.SSLContext | None = None
    auth: BasicAuth | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


class WebConfig:
    """The settings of a web configuration file as it stands now.

    Raises:
        ConfigError: the file, a certificate or a key cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._settings = load_web_config(path)
        self._stamp = self._stamps()
        self._checked = time.monotonic()

    def current(self) -> WebSettings:
        """The newest usable settings. Looks at the files once a second at most; safe from any thread."""
        with self._lock:
            if time.monotonic() - self._checked >= _RECHECK_SECONDS:
                self._refresh()
                self._checked = time.monotonic()
            return self._settings

    def _refresh(self) -> None:
        stamp = self._stamps()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._settings = load_web_config(self._path)
        except ConfigError as error:
            log_event(logging.ERROR, "web_config_refused", file=self._path, detail=error)
            return
        self._stamp = self._stamps()
        log_event(logging.INFO, "web_config_reloaded", file=self._path)

    def _stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(stamp(path) for path in (self._path, *self._settings.files))


def load_web_config(path: Path) -> WebSettings:
    """Reads a web configuration file; an empty one means plain HTTP for everybody.

    Raises:
        ConfigError: with file, line and field.
    """
    top = parse_yaml(read_text(path), path)
    if top is None:
        return WebSettings()
    _refuse(top, _NOT_HONOURED)
    with top.closing():
        tls = top.section("tls_server_config")
        http = top.section("http_server_config")
        users = top.section("basic_auth_users")
        context, files = (None, ()) if tls is None else _tls(tls)
        headers = {} if http is None else _http(http)
        hashes = {} if users is None else users.items(bcrypt_hash)
    return WebSettings(context, BasicAuth(hashes) if hashes else None, headers, files)


def _refuse(section: Section, keys: tuple[str, ...]) -> None:
    for key in keys:
        section.value(key, _not_honoured, None)


def _not_honoured(_value: object) -> None:
    raise ValueError("this server cannot honour it")


def _tls(section: Section) -> tuple[ssl.SSLContext, tuple[Path, ...]]:
    def file(value: object) -> Path:
        path = section.path.parent / plain_text(value)
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        return path

    _refuse(section, _TLS_NOT_HONOURED)
    with section.closing():
        cert = section.required("cert_file", file)
        key = section.required("key_file", file)
        client_ca = section.value("client_ca_file", file, None)
        client_auth = section.value("client_auth_type", _one_of(_CLIENT_AUTH), ssl.CERT_NONE)
        minimum = section.value("min_version", _one_of(_VERSIONS), ssl.TLSVersion.TLSv1_2)
        maximum = section.value("max_version", _one_of(_VERSIONS), ssl.TLSVersion.TLSv1_3)
        server_order = section.value("prefer_server_cipher_suites", boolean, default=True)
    if (client_auth == ssl.CERT_NONE) != (client_ca is None):
        raise section.error("client_ca_file and a client_auth_type that verifies go together")
    if minimum > maximum:
        raise section.error("min_version is above max_version")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = minimum
    context.maximum_version = maximum
    if not server_order:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load(section, "cert_file or key_file", lambda: context.load_cert_chain(cert, key, password=_no_password))
    if client_ca is not None:
        _load(section, "client_ca_file", lambda: context.load_verify_locations(client_ca))
        context.verify_mode = client_auth
    return context, tuple(path for path in (cert, key, client_ca) if path is not None)


_SSL_WORDS: Mapping[str | None, str] = MappingProxyType(
    {
        None: "no certificate, or no key, in PEM format",
        "KEY_VALUES_MISMATCH": "the key is not the certificate's",
        "NO_CERTIFICATE_OR_CRL_FOUND": "no certificate in PEM format",
    }
)
"""OpenSSL's reasons as an operator would put them."""


def _load(section: Section, fields: str, load: Callable[[], None]) -> None:
    try:
        load()
    except ssl.SSLError as error:
        raise section.error(f"{fields}: {_SSL_WORDS.get(error.reason, error)}") from None
    except (OSError, ValueError) as error:
        raise section.error(f"{fields}: {error}") from None


def _no_password() -> str:
    """Keeps OpenSSL from asking on the terminal."""
    raise ValueError("the key is encrypted")


def _http(section: Section) -> Mapping[str, str]:
    with section.closing():
        section.value("http2", _off, None)
        headers = section.section("headers")
        if headers is None:
            return {}
        with headers.closing():
            given = {name: headers.value(name, _header_value, None) for name in _HEADERS}
    return {name: value for name, value in given.items() if value is not None}


def _off(value: object) -> None:
    if value is not False:
        raise ValueError("this server speaks HTTP/1.1 only")


def _header_value(value: object) -> str:
    text = plain_text(value)
    if not text.isascii() or not text.isprintable():
        raise ValueError("not fit for a header")
    return text


def _one_of(names: Mapping[str, T]) -> Callable[[object], T]:
    def convert(value: object) -> T:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{value!r} is none of {', '.join(names)}")
        return names[value]

    return convert

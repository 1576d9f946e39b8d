"""Instant queries over Prometheus's HTTP API, which Thanos, Mimir and VictoriaMetrics speak as well."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import requests

from kvwatch import __version__

CONNECT_SECONDS = 5.0


class ApiError(Exception):
    """No answer, or one that is an error; the text says which, for the operator."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the API.

    Attributes:
        url: without ``/api/v1``; may have a path (``https://mimir/prometheus``).
        token_file: a bearer token, read anew at each query.
        ca_file: certificate authorities instead of the system's.
        headers: sent with every query (``X-Scope-OrgID`` names a Mimir tenant).
        timeout: seconds for one answer.
    """

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None
    insecure_skip_verify: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 30.0


class PrometheusApi:
    """One connection to the API, closed by leaving the `with` block.

    Attributes:
        warnings: what the answers so far warned of, each once: Thanos says here that some stores are missing.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session = requests.Session()
        self._session.headers["User-Agent"] = f"kvwatch/{__version__}"
        self._session.headers.update(access.headers)
        self.warnings: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._session.close()

    def query(self, expression: str) -> list[Sample]:
        """The series that an instant query finds now.

        Raises:
            ApiError: there is no usable answer.
        """
        document = self._ask(expression)
        self.warnings.update(dict.fromkeys(map(str, document.get("warnings", ()))))
        try:
            return [
                Sample(series["metric"], float(series["value"][1])) for series in document["data"]["result"]
            ]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ApiError(f"{self._access.url} does not answer like Prometheus") from None

    def _ask(self, expression: str) -> dict[str, Any]:
        access = self._access
        url = f"{access.url.rstrip('/')}/api/v1/query"
        try:
            response = self._session.post(
                url,
                data={"query": expression},
                # As arguments: the session's own would give way to REQUESTS_CA_BUNDLE and ~/.netrc.
                verify=_verify(access),
                auth=_authorization(access),
                timeout=(CONNECT_SECONDS, access.timeout),
                allow_redirects=False,
            )
        except requests.exceptions.RequestException as error:
            raise ApiError(f"{access.url}: {_plain(error)}") from None
        try:
            document = response.json()
        except requests.exceptions.JSONDecodeError:
            raise ApiError(f"{access.url}: HTTP {response.status_code}, and no JSON") from None
        if not isinstance(document, dict) or document.get("status") != "success":
            told = document.get("error") if isinstance(document, dict) else None
            raise ApiError(f"{access.url}: HTTP {response.status_code}: {told or 'not an answer to a query'}")
        return document


def _verify(access: Access) -> bool | str:
    if access.insecure_skip_verify:
        return False
    if access.ca_file is None:
        return True
    try:
        ssl.create_default_context(cafile=access.ca_file)
    except ssl.SSLError:
        raise ApiError(f"{access.ca_file}: no certificate in PEM format") from None
    except OSError as error:
        raise ApiError(f"{access.ca_file}: {error.strerror}") from None
    return str(access.ca_file)


def _authorization(access: Access) -> Callable[[requests.PreparedRequest], requests.PreparedRequest] | None:
    if access.token_file is None:
        return None
    try:
        token = access.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ApiError(
            f"{access.token_file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        ) from None

    def add_token(request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    return add_token


def _plain(error: Exception) -> str:
    """The cause without the chain of wrappers around it."""
    if isinstance(error, requests.exceptions.Timeout):
        return "no answer in time"
    cause = _first_cause(error)
    reason = getattr(cause, "verify_message", None) or getattr(cause, "strerror", None) or str(cause)
    if isinstance(error, requests.exceptions.SSLError):
        return f"TLS: {reason}"
    if isinstance(error, requests.exceptions.ConnectionError):
        return f"no connection: {reason}"
    return reason


def _first_cause(error: BaseException) -> BaseException:
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error

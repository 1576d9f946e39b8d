"""One vLLM server, seen over HTTP: ``/metrics``, ``/version`` and ``/v1/models``.

Only ``/metrics`` is required. ``/version`` is missing on the oldest releases, ``/v1/models`` asks for the API
key where one is set, and the development endpoints (``/server_info``, ``/is_sleeping``) are never asked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from kvwatch.blockmath.releases import Release
from kvwatch.observe.exposition import MalformedPage
from kvwatch.observe.httpclient import HttpClient, HttpError
from kvwatch.observe.records import Engine, Failure, ServedModel, VllmRecord
from kvwatch.observe.vllm_page import MAX_COUNT, VllmPage, read_page

_PAGE_FORMAT = "text/plain;version=0.0.4"
_MAX_MODELS = 1_000
_MAX_NAME = 256

# Before this release a page of several engines showed the last of them only, with the blocks of all (fixed by
# vLLM pull request 21257).
_ALL_ENGINES_SINCE = Release.parse("0.10.0")


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What a server says about itself; holds until the server is started anew."""

    version: str | None
    models: tuple[ServedModel, ...] | None
    failures: tuple[Failure, ...]


class VllmSource:
    """One vLLM server. Serves one :meth:`read` at a time; several sources may be read in parallel.

    Args:
        base_url: ``http://host:port``, a path prefix is allowed.
        token: API key, sent as a bearer token to this server only.
        verify: True for the usual certificate authorities, the path of a CA bundle, or False for no check.
        connect_timeout, read_timeout: seconds, for each connect and each wait for more bytes.
        deadline: seconds for all requests of one reading together.
        max_bytes: limit of one answer after decompression; a page of 22 MB has been seen.
        metadata_every: ``/version`` and ``/v1/models`` are asked again after so many readings, and at once
            when the server was restarted, did not answer, or does not tell when it was started.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        verify: bool | str = True,
        connect_timeout: float = 2.0,
        read_timeout: float = 5.0,
        deadline: float = 8.0,
        max_bytes: int = 64 * 1024 * 1024,
        metadata_every: int = 20,
    ) -> None:
        self._client = HttpClient(
            base_url,
            token=token,
            verify=verify,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_bytes=max_bytes,
        )
        self._deadline = deadline
        self._metadata_every = metadata_every
        self._metadata: _Metadata | None = None
        self._metadata_age = 0
        self._identity: float | None = None

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._client.base_url

    def read(self) -> VllmRecord | Failure:
        """What the server says now; a :class:`Failure` when ``/metrics`` gave no usable page in time."""
        with self._client.within(self._deadline):
            try:
                page = self._page()
            except (HttpError, MalformedPage) as error:
                self._metadata = None
                where = f"{self.base_url}/metrics: "
                return Failure("vllm", error.reason, where + str(error).removeprefix("/metrics: "))
            metadata = self._current_metadata(page)
        if not page.has_vllm_families and metadata.version is None:
            return Failure("vllm", "not_vllm", f"{self.base_url}/metrics shows no vLLM family")
        engines, doubts = _trusted(page.engines, metadata.version)
        failures = (*page.failures, *doubts, *metadata.failures)
        return VllmRecord(self.base_url, metadata.version, metadata.models, engines, failures)

    def close(self) -> None:
        """Closes the connection, if one is open."""
        self._client.close()

    def _page(self) -> VllmPage:
        reply = self._client.get("/metrics", accept=_PAGE_FORMAT)
        if reply.status != 200:
            raise HttpError(f"http_{reply.status}", f"/metrics: HTTP status {reply.status}")
        if reply.content_type in ("text/html", "application/json"):
            raise MalformedPage("not_metrics", f"the answer is {reply.content_type}")
        return read_page(reply.body)

    def _current_metadata(self, page: VllmPage) -> _Metadata:
        self._metadata_age += 1
        restarted = page.identity is None or page.identity != self._identity
        if self._metadata is None or restarted or self._metadata_age >= self._metadata_every:
            self._metadata = self._read_metadata()
            self._metadata_age = 0
            self._identity = page.identity
        metadata = self._metadata
        if metadata.failures:
            # An unanswered question is asked again in the next reading.
            self._metadata = None
        return metadata

    def _read_metadata(self) -> _Metadata:
        failures: list[Failure] = []
        version = self._json("/version", failures)
        models = self._json("/v1/models", failures)
        return _Metadata(
            version=None if version is None else _version(version, failures),
            models=None if models is None else _models(models, failures),
            failures=tuple(failures),
        )

    def _json(self, path: str, failures: list[Failure]) -> Any:
        """The decoded answer; None, with a failure noted unless the path does not exist."""
        try:
            reply = self._client.get(path, accept="application/json")
            if reply.status == 200:
                return json.loads(reply.body)
        except HttpError as error:
            failures.append(Failure("vllm", error.reason, str(error)))
            return None
        except (ValueError, RecursionError):
            failures.append(Failure("vllm", "bad_json", f"{path}: the answer is not JSON"))
            return None
        if reply.status != 404:
            failures.append(Failure("vllm", f"http_{reply.status}", f"{path}: HTTP status {reply.status}"))
        return None


def used_blocks(engine: Engine, version: str | None) -> int | None:
    """Blocks of the pool that requests hold; None where it cannot be told.

    From 0.10.2 the exported usage is held / (num_blocks - 1). Before, it was a share of all blocks, and the
    V1 engine (taken to be the one in use from 0.8.0) counted the null block as used. The product must come
    out whole: if it does not, the number of blocks or the release is not what it seems, and the answer is
    None. Without a version only the rule of 0.10.2 is tried.
    """
    if engine.usage is None or engine.num_blocks is None:
        return None
    release = _release(version)
    if release is None or release.usage_excludes_null_block:
        return _whole(engine.usage * (engine.num_blocks - 1))
    held = _whole(engine.usage * engine.num_blocks)
    if held is None or release.engine == "V0":
        return held
    return max(held - 1, 0)


def _whole(value: float) -> int | None:
    return round(value) if abs(value - round(value)) < 1e-3 else None


def _release(version: str | None) -> Release | None:
    try:
        return None if version is None else Release.parse(version)
    except ValueError:
        return None


def _trusted(
    engines: tuple[Engine, ...], version: str | None
) -> tuple[tuple[Engine, ...], tuple[Failure, ...]]:
    """The engines without a block count that may be the sum over engines which the page does not show."""
    release = _release(version)
    alone_but_not_first = len(engines) == 1 and engines[0].engine != "0"
    if release is None or release >= _ALL_ENGINES_SINCE or not alone_but_not_first:
        return engines, ()
    detail = f"{version} shows one of several engines: its own number of blocks is not known"
    return (replace(engines[0], num_blocks=None),), (Failure("vllm", "ambiguous_engines", detail),)


def _version(answer: Any, failures: list[Failure]) -> str | None:
    version = answer.get("version") if isinstance(answer, dict) else None
    if isinstance(version, str) and 0 < len(version) <= _MAX_NAME:
        return version
    failures.append(Failure("vllm", "bad_json", "/version: no field version"))
    return None


def _models(answer: Any, failures: list[Failure]) -> tuple[ServedModel, ...] | None:
    entries = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(entries, list) and len(entries) <= _MAX_MODELS:
        models = [_model(entry) for entry in entries]
        if None not in models:
            return tuple(model for model in models if model is not None)
    failures.append(Failure("vllm", "bad_json", "/v1/models: not a list of models"))
    return None


def _model(entry: Any) -> ServedModel | None:
    if not isinstance(entry, dict):
        return None
    name, root, length = entry.get("id"), entry.get("root"), entry.get("max_model_len")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        return None
    is_length = isinstance(length, int) and not isinstance(length, bool) and 0 < length <= MAX_COUNT
    return ServedModel(name, root if isinstance(root, str) else None, length if is_length else None)

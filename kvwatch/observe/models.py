"""A model's ``config.json``, where its server finds it: a directory or a hub's cache, never the network."""

from __future__ import annotations

import errno
import json
import os
import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvwatch.config import ServerConfig
from kvwatch.observe.procfs import PROC, error_reason, process_root, read_regular_file, resolve_in_root
from kvwatch.observe.records import Failure, Launch, ModelConfig, Process

CONFIG_LIMIT = 8 << 20
"""Bytes. The largest public config.json files have some 100 KB."""

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_CONFIG = "config.json"
_QUANTIZATION = "hf_quant_config.json"
_MODELOPT = {"FP8": "modelopt", "NVFP4": "modelopt_fp4", "MIXED_PRECISION": "modelopt_mixed"}
"""vLLM's quantization method by the beginning of ModelOpt's algorithm name."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
"""In vLLM's order: where a directory holds several kinds, the first is loaded."""
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
_SECOND_COPY = "consolidated"
"""Mistral's own format, beside files of the usual names."""


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What tells that a model's files are as they were."""

    path: str
    mtime_ns: int
    inode: int
    size: int
    weights: str
    weights_mtime_ns: int


class ModelSource:
    """Finds and reads models. Files that have not changed are not read again. For use by one thread."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._proc = proc_root
        self._read: dict[_Stamp, ModelConfig] = {}

    def read(
        self, launch: Launch, served_root: str | None = None, process: Process | None = None
    ) -> ModelConfig | Failure:
        """The configuration of the model that a server has or would load, ``--hf-overrides`` merged in.

        Args:
            served_root: ``root`` of ``/v1/models``, for a server whose command line names no model.
            process: the server's; it tells its user and whether it runs in a container.
        """
        view = _View.of(launch, process, self._proc)
        names = list(dict.fromkeys(name for name in (launch.model, served_root) if name))
        if not names:
            return _failure("no_model", "neither the command line nor the server names a model")
        failures: list[Failure] = []
        for name in names:
            result = self._read_model(view, name, launch)
            if isinstance(result, ModelConfig):
                return _with_overrides(result, launch.flags.hf_overrides)
            failures.append(result)
        return failures[0]

    def _read_model(self, view: _View, name: str, launch: Launch) -> ModelConfig | Failure:
        config_name = launch.hf_config_path or name
        try:
            directory = view.directory(config_name, launch.revision)
            if isinstance(directory, Failure):
                return directory
            if config_name == name and launch.download_dir is None:
                return self._read_directory(view, directory, directory)
            weights = view.directory(name, launch.revision, launch.download_dir)
            return self._read_directory(view, directory, weights if isinstance(weights, str) else directory)
        except OSError as error:
            return _failure(error_reason(error), f"model {name}: {error.filename}: {error.strerror}")

    def _read_directory(self, view: _View, directory: str, weights: str) -> ModelConfig | Failure:
        path = view.file(f"{directory}/{_CONFIG}")
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return _without_config(view.file(directory))
        changed = os.stat(view.file(weights)).st_mtime_ns
        stamp = _Stamp(path, status.st_mtime_ns, status.st_ino, status.st_size, weights, changed)
        if stamp not in self._read:
            config = _load(path)
            if isinstance(config, Failure):
                return config
            config = _with_quantization(config, view.file(f"{directory}/{_QUANTIZATION}"))
            if isinstance(config, Failure):
                return config
            self._read = {old: model for old, model in self._read.items() if old.path != stamp.path}
            self._read[stamp] = ModelConfig(path, config, status.st_mtime_ns, _weight_bytes(view, weights))
        return self._read[stamp]


def placed(launch: Launch, settings: ServerConfig | None) -> Launch:
    """What a server was told, with its model where the configuration says that the files are."""
    configured = settings.model_config if settings is not None else None
    if configured is None:
        return launch
    folder = configured.parent if configured.is_file() else configured
    return replace(launch, model=str(folder.absolute()), pid=None)


@dataclass(frozen=True, slots=True)
class _View:
    """The file system as one server sees it. Paths in and out are the server's own, until ``file``."""

    root: str
    cwd: str | None
    uid: int | None
    environment: Mapping[str, str]

    @classmethod
    def of(cls, launch: Launch, process: Process | None, proc_root: Path) -> _View:
        contained = process is not None and process.container is not None
        root = process_root(proc_root, launch.pid, contained=contained)
        return cls(root, launch.cwd, process.uid if process is not None else None, launch.environment)

    def _is_directory(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def _mode(self, path: str) -> int:
        """Kind and rights, 0 for what does not exist.

        Raises:
            OSError: it may not be looked at.
        """
        try:
            return os.stat(self.file(path)).st_mode
        except ValueError:
            return 0
        except OSError as error:
            if error.errno in _ABSENT:
                return 0
            raise

    def file(self, path: str) -> str:
        return resolve_in_root(self.root, path)

    def directory(self, name: str, revision: str | None, download_dir: str | None = None) -> str | Failure:
        """The model's directory. As for vLLM, what exists as a directory is not looked up as a hub id."""
        if "://" in name:
            return _failure("remote", f"model {name} is not on this node's disks")
        local = self._absolute(name)
        mode = self._mode(local) if local is not None else 0
        if local is not None and stat.S_ISDIR(mode):
            return local
        if stat.S_ISREG(mode):
            return _single_file(name)
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:
            return _failure("not_found", f"model directory {name} does not exist")
        if self.environment.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
            directories = [f"{base}/{name}" for base in self._modelscope_caches()]
            found = next((each for each in directories if self._is_directory(each)), None)
        else:
            caches = self.hub_caches(download_dir)
            found = next((each for base in caches if (each := self._snapshot(base, name, revision))), None)
        where = f" at revision {revision}" if revision else ""
        return found or _failure("not_cached", f"model {name}{where} is in no local cache")

    def hub_caches(self, download_dir: str | None = None) -> list[str]:
        """Directories that may hold models of the Hugging Face hub, in its order.

        ``--download-dir`` takes the weights; the configuration stays in the cache.
        """
        given = self.environment
        hub = given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE")
        if not hub and (home := given.get("HF_HOME")):
            hub = f"{home}/hub"
        if not hub and (cache := given.get("XDG_CACHE_HOME") or self._in_home(".cache")):
            hub = f"{cache}/huggingface/hub"
        return self._all_absolute(download_dir, hub, given.get("TRANSFORMERS_CACHE"))

    def _modelscope_caches(self) -> list[str]:
        base = self.environment.get("MODELSCOPE_CACHE") or self._in_home(".cache/modelscope/hub")
        return self._all_absolute(f"{base}/models", base) if base else []

    def _snapshot(self, cache: str, name: str, revision: str | None) -> str | None:
        """One commit of a cached repository: the one that the reference names, else the newest."""
        repository = f"{cache}/models--{name.replace('/', '--')}"
        snapshots = f"{repository}/snapshots"
        for commit in (self._reference(repository, revision or "main"), revision):
            if commit and self._is_directory(f"{snapshots}/{commit}"):
                return f"{snapshots}/{commit}"
        if revision or not self._is_directory(snapshots):
            return None
        with os.scandir(self.file(snapshots)) as entries:
            dated = [(entry.stat().st_mtime_ns, entry.name) for entry in entries]
        return f"{snapshots}/{max(dated)[1]}" if dated else None

    def _reference(self, repository: str, revision: str) -> str | None:
        try:
            return Path(self.file(f"{repository}/refs/{revision}")).read_text(encoding="ascii").strip()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
            return None

    def _in_home(self, path: str) -> str | None:
        home = self.environment.get("HOME") or _home(self.uid)
        return f"{home}/{path}" if home else None

    def _all_absolute(self, *paths: str | None) -> list[str]:
        return [absolute for path in paths if path and (absolute := self._absolute(path))]

    def _absolute(self, path: str) -> str | None:
        if path.startswith("/"):
            return path
        if path.startswith("~/"):
            return self._in_home(path[2:])
        return f"{self.cwd}/{path}" if self.cwd else None


def _home(uid: int | None) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_dir if uid is not None else None
    except KeyError:
        return None


# --- files ----------------------------------------------------------------------------------------------


def _load(path: str) -> Mapping[str, Any] | Failure:
    try:
        config = json.loads(read_regular_file(path, limit=CONFIG_LIMIT))
    except (ValueError, RecursionError) as error:
        return _failure("broken_json", f"{path} is not JSON: {error}")
    if not isinstance(config, dict):
        return _failure("not_an_object", f"{path} holds no JSON object")
    return config


def _with_quantization(config: Mapping[str, Any], path: str) -> Mapping[str, Any] | Failure:
    """The configuration with what ModelOpt before 0.31 kept in a file of its own, as vLLM adds it."""
    if config.get("quantization_config") is not None or not Path(path).exists():
        return config
    found = _load(path)
    if isinstance(found, Failure):
        return found
    own = found.get("quantization")
    algorithm = str(own.get("quant_algo") if isinstance(own, Mapping) else None)
    method = next((name for prefix, name in _MODELOPT.items() if algorithm.startswith(prefix)), None)
    return {**config, "quantization_config": {**({"quant_method": method} if method else {}), **found}}


def _without_config(directory: str) -> Failure:
    names = {entry.name for entry in Path(directory).iterdir()}
    if "params.json" in names:
        return _failure(
            "mistral_format", f"{directory} has params.json (Mistral's format) and no config.json"
        )
    if any(name.endswith(".gguf") for name in names):
        return _failure("gguf", f"{directory} has GGUF files and no config.json")
    return _failure("no_config", f"{directory} has no config.json")


def _single_file(name: str) -> Failure:
    if name.endswith(".gguf"):
        return _failure("gguf", f"{name} is a GGUF file; its configuration is not read")
    return _failure("not_a_directory", f"{name} is a file, not a model directory")


def _weight_bytes(view: _View, directory: str) -> int | None:
    """Total size of the weight files of the kind that vLLM would load, following the cache's links."""
    with os.scandir(view.file(directory)) as entries:
        names = [entry.name for entry in entries if entry.name not in _NO_WEIGHTS]
    for suffix in _WEIGHT_SUFFIXES:
        kind = [name for name in names if name.endswith(suffix)]
        files = [name for name in kind if not name.startswith(_SECOND_COPY)] or kind
        if files:
            try:
                return sum(os.stat(view.file(f"{directory}/{name}")).st_size for name in files)
            except OSError:
                return None
    return None


def _with_overrides(model: ModelConfig, overrides: Mapping[str, Any] | None) -> ModelConfig:
    return replace(model, config=_merged(model.config, overrides)) if overrides else model


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM does: a configuration within is merged, another object (``rope_scaling``) is replaced."""
    merged = dict(config)
    for key, value in overrides.items():
        present = merged.get(key)
        nested = key.endswith("_config") and key != "quantization_config"
        if nested and isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(present, value)
        else:
            merged[key] = value
    return merged


def _failure(reason: str, detail: str) -> Failure:
    return Failure("models", reason, detail)

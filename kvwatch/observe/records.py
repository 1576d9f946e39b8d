"""What the sources return: immutable, free of handles, one set per cycle.

A field of ``None`` means that the value could not be read; it never stands for zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvwatch.blockmath.flags import Flags


@dataclass(frozen=True, slots=True)
class Failure:
    """A source, or a part of one, that gave no answer.

    Attributes:
        source: ``nvml``, ``processes``, ``vllm``, ``launch`` or ``models``.
        reason: short name fit for a label, for example ``timeout`` or ``http_503``.
        detail: one sentence for people.
    """

    source: str
    reason: str
    detail: str


# --- NVML -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes. ``used`` excludes ``reserved`` where the driver tells them apart (v2).

    ``free + used + reserved == total`` under v2. Under v1 ``reserved`` is None and ``used`` contains it.
    """

    total: int
    free: int
    used: int
    reserved: int | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process that NVML names on one GPU.

    Attributes:
        pid: as NVML reports it, that is in the driver's PID namespace.
        used_bytes: None where the driver does not tell (WSL, permissions).
        kinds: the lists that named it, of ``compute``, ``graphics`` and ``mps``.
    """

    pid: int
    used_bytes: int | None
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance, as NVML shows it.

    Attributes:
        index: ``"0"``; a MIG instance is ``"0:1"`` (GPU index, MIG device index).
        processes: keyed by pid, each once however many lists name it; None where no list could be read.
        failures: the calls on this GPU that failed.
    """

    index: str
    uuid: str
    name: str
    pci_bus_id: str
    mig_profile: str | None
    capability: tuple[int, int] | None
    memory: GpuMemory | None
    processes: Mapping[int, GpuProcess] | None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlRecord:
    """All GPUs of the node, in index order. A MIG parent is left out when its instances stand in for it."""

    gpus: tuple[Gpu, ...]
    driver_version: str | None = None
    failures: tuple[Failure, ...] = ()


# --- processes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the node. Identity is ``(pid, start_time)``.

    ``argv`` never leaves kvwatch: it is read for vLLM's flags and dropped from everything published.

    Attributes:
        start_time: Unix time in seconds.
        name: the full program name or process title, at most 64 characters.
        argv: the arguments, trailing empty ones dropped.
        container: container id out of the cgroup path, None on the host.
        unit: systemd unit, pod or job that the cgroup names, for people.
    """

    pid: int
    ppid: int
    start_time: float
    name: str
    user: str | None
    uid: int | None
    session: int | None
    state: str | None
    argv: tuple[str, ...] = field(default=(), repr=False)
    cgroup: str | None = None
    container: str | None = None
    unit: str | None = None
    pid_namespace: int | None = None

    @property
    def workload(self) -> str:
        """Container, pod or unit that the process runs in; empty where none is known."""
        return self.unit or (self.container or "")[:12]


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """All processes that could be listed, by pid.

    Attributes:
        pid_namespace: inode of the namespace kvwatch itself runs in.
        boot_time: Unix time in seconds.
    """

    processes: Mapping[int, Process]
    pid_namespace: int | None = None
    boot_time: float | None = None
    failures: tuple[Failure, ...] = ()


# --- launch: what a server was told ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """One vLLM server as its command line describes it.

    Attributes:
        pid: of the ``vllm serve`` parent; None for a server that only the configuration names.
        flags: the start-up flags, ``--config`` YAML merged in (the command line wins).
        model: model path or hub id.
        served_names: of ``--served-model-name``, else the model.
        host: address that kvwatch connects to.
        base_url: ``http://host:port``.
        cwd: working directory of the process, for relative model paths.
        environment: the few variables that bear on start-up (VLLM_*, CUDA_VISIBLE_DEVICES, HF_*).
        visible_devices: as in CUDA_VISIBLE_DEVICES or ``--device-ids``; None where all GPUs are visible.
        revision, download_dir, hf_config_path: where the model's files come from, as the flags say.
        ray: its workers, or its data-parallel engines, are Ray actors and no descendants of ``pid``.
        beside: by name, as written, the flags that move memory beside the KV cache and are none of ``flags``.
        unknown_flags: names that kvwatch did not recognise, without their values.
    """

    pid: int | None
    start_time: float | None
    flags: Flags
    model: str | None
    served_names: tuple[str, ...]
    base_url: str | None
    cwd: str | None = None
    config_file: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    visible_devices: tuple[str, ...] | None = None
    revision: str | None = None
    download_dir: str | None = None
    hf_config_path: str | None = None
    ray: bool = False
    beside: Mapping[str, str] = field(default_factory=dict)
    unknown_flags: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()


# --- vLLM over HTTP -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative buckets ``(upper bound, count)`` in ascending order, the last bound is infinity."""

    buckets: tuple[tuple[float, float], ...]
    sum: float | None
    count: float


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of a server (one per data-parallel rank), from ``/metrics``.

    Attributes:
        num_blocks: blocks of this engine (vLLM's label is the sum over engines; it is divided here).
        usage: share of the pool in use as exported, 0 to 1; what it is a share of depends on the release
            (`kvwatch.observe.vllm.used_blocks`).
        max_concurrency, size_tokens: as the server itself computed them (0.24 and later).
    """

    engine: str
    num_blocks: int | None = None
    block_size: int | None = None
    cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    swap_space: float | None = None
    mamba_cache_mode: str | None = None
    mamba_block_size: int | None = None
    sliding_window: int | None = None
    max_concurrency: float | None = None
    size_tokens: int | None = None
    usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    waiting_by_reason: Mapping[str, float] = field(default_factory=dict)
    preemptions: float | None = None
    sleep_state: str | None = None
    prompt_tokens: Histogram | None = None
    generation_tokens: Histogram | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of ``/v1/models``."""

    id: str
    root: str | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class VllmRecord:
    """One server's answers. ``engines`` is empty when the page carries no cache information.

    Attributes:
        version: release from ``/version``, for example ``0.32.0``; None where it did not answer.
        models: None where ``/v1/models`` could not be read (401 with --api-key, for example).
    """

    base_url: str
    version: str | None
    models: tuple[ServedModel, ...] | None
    engines: tuple[Engine, ...]
    failures: tuple[Failure, ...] = ()


# --- models ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's ``config.json`` as found on disk.

    Attributes:
        path: where it was read, for people; through ``/proc/PID/root`` for a container.
        mtime_ns: for change detection.
        weight_bytes: total size of the weight files beside it, None where there are none.
    """

    path: str
    config: Mapping[str, Any] = field(repr=False)
    mtime_ns: int
    weight_bytes: int | None = None


# --- the next start -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NextStart:
    """What a server would be told if it were started again now, as the files on disk stand.

    Attributes:
        source: ``command_line`` where nothing else is known to start it, else ``systemd``, ``compose``,
            ``kubernetes`` or ``script``.
        files: the files it was read from, for people.
        flags: as `Launch.flags`.
        environment: of the variables that bear on start-up those that the source sets.
        whole_environment: the server gets no such variable from anywhere else.
        visible_devices: as `Launch.visible_devices`.
        version: release that would run, as installed on disk or named by the image; None where not found.
        model: the model that would be loaded.
        first_model: the running server's, as it was when kvwatch first saw that server.
        beside, unknown_flags: as of `Launch`.
        failures: what could not be read; the rest holds.
    """

    source: str
    files: tuple[str, ...]
    flags: Flags
    environment: Mapping[str, str] = field(default_factory=dict)
    whole_environment: bool = False
    visible_devices: tuple[str, ...] | None = None
    version: str | None = None
    model: ModelConfig | Failure | None = None
    first_model: ModelConfig | None = None
    beside: Mapping[str, str] = field(default_factory=dict)
    unknown_flags: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()

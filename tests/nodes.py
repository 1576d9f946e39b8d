"""Records of a small node, for tests that start where the sources end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB
from kvwatch.observe.cycle import Observation, ObservedServer, SourceStatus
from kvwatch.observe.records import (
    Engine,
    Failure,
    Gpu,
    GpuMemory,
    GpuProcess,
    Launch,
    ModelConfig,
    NvmlRecord,
    Process,
    ProcessRecord,
    ServedModel,
    VllmRecord,
)

NOW = 1_800_000_000.0
TOTAL = 85520809984
RESERVED = 351666176
PARENT = 100

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
LLAMA_8B_BLOCK = 32 * 2 * 8 * 128 * 2 * 16
"""Bytes of one block of 16 tokens over all layers at TP 1."""


def process(pid: int, name: str, *, ppid: int = 1, user: str | None = "vllm", **more: Any) -> Process:
    """A process that has run for an hour."""
    defaults: dict[str, Any] = {"uid": 1000, "session": pid, "state": "S"}
    return Process(pid, ppid, NOW - 3600, name, user, **{**defaults, **more})


def gpu(
    held: Mapping[int, int | None],
    *,
    index: str = "0",
    other: int = 0,
    memory: bool = True,
    **more: Any,
) -> Gpu:
    """A card on which each pid holds so many bytes, and `other` bytes belong to nobody who is named."""
    used = sum(size or 0 for size in held.values()) + other
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        pci_bus_id="00000000:18:00.0",
        mig_profile=None,
        capability=(9, 0),
        memory=GpuMemory(TOTAL, TOTAL - RESERVED - used, used, RESERVED) if memory else None,
        processes={pid: GpuProcess(pid, size, frozenset({"compute"})) for pid, size in held.items()},
        **more,
    )


def server(
    *,
    members: frozenset[int] = frozenset({PARENT, PARENT + 1}),
    flags: Flags | None = None,
    page: VllmRecord | Failure | None = None,
    model: Mapping[str, Any] | Failure = LLAMA_8B,
    port: int = 8000,
    name: str = "llama",
    pid: int | None = PARENT,
    **engine: Any,
) -> ObservedServer:
    """A Llama 3.1 8B at utilization 0.92 whose page says what `engine` says."""
    return ObservedServer(
        launch=Launch(
            pid=pid,
            start_time=NOW - 3600,
            flags=flags or Flags(max_model_len=32768),
            model="meta-llama/Llama-3.1-8B-Instruct",
            served_names=(name,),
            base_url=f"http://127.0.0.1:{port}",
        ),
        settings=None,
        members=members,
        vllm=page or vllm_page(name=name, **engine),
        model=model if isinstance(model, Failure) else ModelConfig("/m/config.json", model, 1),
    )


def vllm_page(
    *,
    name: str = "llama",
    version: str | None = "0.32.0",
    max_model_len: int = 32768,
    engines: int = 1,
    **engine: Any,
) -> VllmRecord:
    """The page of a server whose engines each have 26,000 blocks of 16 tokens, a tenth of them in use."""
    blocks = engine.setdefault("num_blocks", 26_000)
    facts: dict[str, Any] = {
        "block_size": 16,
        "cache_dtype": "auto",
        "gpu_memory_utilization": 0.92,
        "usage": 0.1,
        "size_tokens": blocks * 16,
        "max_concurrency": blocks * 16 / max_model_len,
        **engine,
    }
    return VllmRecord(
        base_url="http://127.0.0.1:8000",
        version=version,
        models=(ServedModel(name, "meta-llama/Llama-3.1-8B-Instruct", max_model_len),),
        engines=tuple(Engine(engine=str(number), **facts) for number in range(engines)),
    )


def observation(
    gpus: tuple[Gpu, ...] | Failure,
    processes: tuple[Process, ...] | Failure = (),
    servers: tuple[ObservedServer, ...] = (),
    *,
    time: float = NOW,
) -> Observation:
    """One cycle's records."""
    return Observation(
        time=time,
        nvml=gpus if isinstance(gpus, Failure) else NvmlRecord(gpus),
        processes=processes
        if isinstance(processes, Failure)
        else ProcessRecord({one.pid: one for one in processes}),
        servers=servers,
        sources=(
            SourceStatus("nvml", not isinstance(gpus, Failure), time, 0.01),
            SourceStatus("processes", not isinstance(processes, Failure), time, 0.01),
        ),
    )


def serving_node(*extra: tuple[Process, int], own: int = 73 * GIB, **engine: Any) -> Observation:
    """One card with a Llama 8B server, and further processes with what they hold."""
    held: dict[int, int | None] = {PARENT + 1: own}
    held.update({one.pid: size for one, size in extra})
    processes = (
        process(PARENT, "vllm"),
        process(PARENT + 1, "VLLM::EngineCore", ppid=PARENT),
        *(one for one, _ in extra),
    )
    return observation((gpu(held),), processes, (server(**engine),))

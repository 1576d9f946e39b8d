"""vLLM pages for tests: recorded ones, and synthetic ones in the manner of each era of releases."""

from __future__ import annotations

import gzip
from pathlib import Path

_RECORDED = Path(__file__).parent.parent / "vectors" / "pages"


def recorded(name: str) -> bytes:
    """A page of a real server, for example ``0.32.0-dp2_load``."""
    return gzip.decompress((_RECORDED / f"vllm-{name}.prom.gz").read_bytes())


def recorded_names() -> list[str]:
    return sorted(
        path.name.removeprefix("vllm-").removesuffix(".prom.gz") for path in _RECORDED.glob("*.prom.gz")
    )


def series(name: str, labels: dict[str, str], value: float | str) -> str:
    pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value}"


def page(*lines: str) -> bytes:
    return ("# TYPE vllm:x gauge\n" + "".join(f"{line}\n" for line in lines)).encode()


def info(engine: str | None = "0", **labels: str) -> str:
    """One ``cache_config_info`` line; keyword arguments replace or add labels."""
    shown = {
        "block_size": "16",
        "cache_dtype": "auto",
        "gpu_memory_utilization": "0.9",
        "num_gpu_blocks": "1001",
    }
    if engine is not None:
        shown["engine"] = engine
    return series("vllm:cache_config_info", shown | labels, "1.0")


def gauge(name: str, value: float | str, engine: str | None = "0", model: str = "m", **labels: str) -> str:
    own = {} if engine is None else {"engine": engine}
    return series(f"vllm:{name}", own | {"model_name": model} | labels, value)


def histogram(name: str, counts: dict[str, float | str], engine: str = "0", model: str = "m") -> list[str]:
    """Bucket lines with these cumulative counts, and a count and sum that go with them."""
    last = list(counts.values())[-1]
    buckets = [gauge(f"{name}_bucket", count, engine, model, le=bound) for bound, count in counts.items()]
    return [
        *buckets,
        gauge(f"{name}_count", last, engine, model),
        gauge(f"{name}_sum", "500.0", engine, model),
    ]

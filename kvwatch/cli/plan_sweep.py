"""What ``--sweep`` names: flags, with their values or usual ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvwatch.blockmath.flags import Flags
from kvwatch.cli.plan_flags import NAMES

MAX_ROWS: Final = 4096


def parse_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Flags with the values to try; None stands for a flag that is not given.

    Args:
        texts: ``flag=v,v`` or ``flag,flag``, with any number of them.

    Raises:
        ValueError: a flag or value is not known, or the table would be too long.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        names, equals, values = text.partition("=")
        if equals:
            axes[_name(names)] = [_value(_name(names), value) for value in values.split(",")]
        else:
            axes.update({name: _usual(name) for each in names.split(",") if (name := _name(each))})
    rows = 1
    for each in axes.values():
        rows *= len(each)
    if rows > MAX_ROWS:
        raise ValueError(f"--sweep: {rows} rows, more than {MAX_ROWS}")
    return axes


def _name(text: str) -> str:
    name = text.strip().lstrip("-").replace("-", "_")
    if name not in NAMES:
        raise ValueError(f"--sweep {text}: not a vLLM flag that bears on start-up")
    return name


def _value(name: str, text: str) -> Any:
    if text.strip().lower() in ("none", ""):
        return None
    try:
        return getattr(Flags.from_mapping({name.replace("_", "-"): text.strip()}), name)
    except ValueError as error:
        raise ValueError(f"--sweep {error}") from None


_USUAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_model_len": (4096, 8192, 16384, 32768, 65536, 131072),
    "tensor_parallel_size": (1, 2, 4, 8),
    "pipeline_parallel_size": (1, 2, 4),
    "kv_cache_dtype": ("auto", "fp8"),
    "quantization": (None, "fp8", "awq"),
    "gpu_memory_utilization": (0.85, 0.9, 0.92, 0.95),
    "max_num_seqs": (64, 256, 1024),
    "max_num_batched_tokens": (2048, 8192, 16384),
    "enforce_eager": (False, True),
    "enable_prefix_caching": (False, True),
}


def _usual(name: str) -> list[Any]:
    if name not in _USUAL:
        raise ValueError(f"--sweep {name.replace('_', '-')}: give its values, such as {name}=A,B")
    return list(_USUAL[name])

"""What a vLLM server was told on its command line, as typed values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from typing import Any

VARIABLES = frozenset({"allow_long_max_model_len"})
"""Fields that a server is told in its environment, not on its command line."""

AUTO_LENGTH = -1
"""`--max-model-len auto`: the server searches for the largest length that fits."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of `vllm serve` that bear on start-up. ``None`` means not given: vLLM's default applies.

    Names are vLLM's own with underscores. Sizes are in the unit of the flag: tokens for lengths, bytes for
    ``kv_cache_memory_bytes``, GiB for ``swap_space``, ``cpu_offload_gb`` and ``kv_offloading_size``.
    ``allow_long_max_model_len`` is no flag of vLLM's but its variable VLLM_ALLOW_LONG_MAX_MODEL_LEN.
    """

    model: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    kv_cache_dtype_skip_layers: tuple[str, ...] | None = None
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    prefill_context_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    disable_sliding_window: bool | None = None
    enforce_eager: bool | None = None
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    mamba_block_size: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    hf_overrides: Mapping[str, Any] | None = None
    attention_backend: str | None = None
    performance_mode: str | None = None
    swap_space: float | None = None
    cpu_offload_gb: float | None = None
    kv_offloading_size: float | None = None
    enable_sleep_mode: bool | None = None
    load_format: str | None = None
    trust_remote_code: bool | None = None
    allow_long_max_model_len: bool | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Flags:
        """Build flags from text or typed values, as read from a command line, a YAML file or JSON.

        Hyphens and underscores are the same. A value of ``None`` counts as not given.

        Raises:
            ValueError: a name is not one of these fields, or a value is not of its type; the text names both.
        """
        known = {field.name: field.type for field in fields(cls)}
        built: dict[str, Any] = {}
        for raw_name, value in values.items():
            name = raw_name.replace("-", "_")
            if name not in known:
                raise ValueError(f"{raw_name}: not a vLLM flag that bears on start-up")
            if value is None:
                continue
            try:
                built[name] = _CONVERTERS.get(name, _BY_TYPE[str(known[name])])(value)
            except (TypeError, ValueError, InvalidOperation) as error:
                raise ValueError(f"{raw_name}: {error}") from None
        return cls(**built)

    def given(self) -> dict[str, Any]:
        """The flags that were given, by name, in declaration order."""
        return {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None
        }

    def with_changes(self, **changes: Any) -> Flags:
        """A copy with some flags replaced."""
        return replace(self, **changes) if changes else self

    @property
    def tp(self) -> int:
        """Tensor-parallel size, 1 where not given."""
        return self.tensor_parallel_size or 1

    @property
    def pp(self) -> int:
        """Pipeline-parallel size, 1 where not given."""
        return self.pipeline_parallel_size or 1

    @property
    def dp(self) -> int:
        """Data-parallel size (engines), 1 where not given."""
        return self.data_parallel_size or 1

    @property
    def dcp(self) -> int:
        """Decode-context-parallel size, 1 where not given."""
        return self.decode_context_parallel_size or 1


_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def human_readable_int(value: object) -> int:
    """Parse an integer as vLLM's command line does: ``4k`` = 4000, ``4K`` = 4096, ``1.5k`` = 1500.

    Fractions go with the decimal (lower-case) suffixes only, and must give a whole number.

    Raises:
        ValueError: not such a number.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"{value!r} is not a whole number")
        return int(value)
    text = str(value).strip()
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (4096, 4k = 4000, 4K = 4096)")
    number, suffix = match.groups()
    if "." in number and not suffix.islower():
        raise ValueError(f"{text!r}: a fraction goes with k, m, g or t only")
    scaled = Decimal(number) * _SUFFIXES.get(suffix, 1)
    return int(scaled)


def length_or_auto(value: object) -> int:
    """Parse ``--max-model-len``: a length in tokens, or ``auto`` / ``-1`` as AUTO_LENGTH.

    Raises:
        ValueError: zero, another negative number, or no number.
    """
    if isinstance(value, str) and value.strip().lower() == "auto":
        return AUTO_LENGTH
    number = human_readable_int(value)
    if number != AUTO_LENGTH and number <= 0:
        raise ValueError(f"{value!r} is not a positive length, 'auto' or -1")
    return number


def _positive_int(value: object) -> int:
    number = human_readable_int(value)
    if number <= 0:
        raise ValueError(f"{value!r} is not a positive whole number")
    return number


def _int(value: object) -> int:
    return human_readable_int(value)


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _utilization(value: object) -> float:
    number = _float(value)
    if not 0 < number <= 1:
        raise ValueError(f"{value!r} is not in (0, 1]")
    return number


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ValueError(f"{value!r} is not true or false")


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a JSON object")
    return dict(value)


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part for part in re.split(r"[,\s]+", value) if part)
    if isinstance(value, list | tuple):
        return tuple(str(part) for part in value)
    raise ValueError(f"{value!r} is not a list of names")


_BY_TYPE: dict[str, Callable[[object], Any]] = {
    "str | None": _str,
    "int | None": _positive_int,
    "float | None": _float,
    "bool | None": _bool,
    "tuple[str, ...] | None": _names,
    "Mapping[str, Any] | None": _mapping,
}
_CONVERTERS: dict[str, Callable[[object], Any]] = {
    "max_model_len": length_or_auto,
    "gpu_memory_utilization": _utilization,
    "kv_cache_memory_bytes": _int,
}

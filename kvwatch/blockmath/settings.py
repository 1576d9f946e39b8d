"""What vLLM makes of a model's config.json, the flags and the card before it looks at any layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.flags import AUTO_LENGTH, Flags
from kvwatch.blockmath.modelconfig import ModelConfig, Section
from kvwatch.blockmath.releases import Release

GIB: Final = 1 << 30

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
    "fp8_per_token_head": 1,
    "int8_per_token_head": 1,
    "int4_per_token_head": 1,
    "nvfp4": 1,
    "nvfp4_fp8": 1,
    "nvfp4_ds_mla": 1,
}
"""Bytes of one stored element."""

DTYPE_NAMES: Final[Mapping[str, str]] = {
    "half": "float16",
    "float16": "float16",
    "fp16": "float16",
    "float": "float32",
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}

NO_FLOAT16: Final = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Model types that vLLM refuses to run in float16."""

LENGTH_FIELDS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
SCALED_ROPES: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Rope types whose stated maximum length is already the scaled one."""

DEFAULT_LENGTH: Final = 2048

ASYNC_DRAFTERS: Final = frozenset(
    {"eagle", "eagle3", "mtp", "ngram_gpu", "draft_model", "dspark", "dflash", "extract_hidden_states"}
)
"""Speculative methods that go together with asynchronous scheduling."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What an architecture is, as far as vLLM's defaults look at it.

    Attributes:
        hybrid: attention and state layers together.
        attention_free: state layers only.
        encoder_decoder: has cross attention.
        encoder_only: no KV cache at all; an embedding model.
        pooling: gives vectors or scores instead of text.
        mla: multi-head latent attention.
        chunked_attention: attends in chunks, for which the hybrid manager can be off by default.
        pipeline: can be split over pipeline stages.
        image_prefix: tokens of one image see each other, whatever their order.
        image_tokens: tokens of the largest image, for models whose images must fit in one batch.
        known_since: the first release whose planning of such models is known.
    """

    hybrid: bool = False
    attention_free: bool = False
    encoder_decoder: bool = False
    encoder_only: bool = False
    pooling: bool = False
    mla: bool = False
    chunked_attention: bool = False
    pipeline: bool = True
    image_tokens: int | None = None
    image_prefix: bool = False
    known_since: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Settings:
    """What vLLM runs with.

    Attributes:
        dtype: the model's element type.
        cache_dtype: the KV cache's, ``auto`` for the model's own.
        block_size: tokens in a block of the first kind of attention.
        block_size_given: it was asked for.
        mamba_block_size: tokens that one state block stands for.
        max_model_len: the longest request; with ``auto_length`` the longest one tried.
        derived_max_model_len: the length that config.json allows.
        auto_length: the server searches for the largest length that fits.
        max_num_batched_tokens: tokens in one batch.
        max_num_seqs: requests in one batch.
        max_in_flight_tokens: tokens scheduled and not yet settled.
        max_num_encoder_input_tokens: encoder tokens in one batch.
        async_scheduling: the next batch is prepared while one runs.
        enable_prefix_caching: blocks are kept for requests with the same beginning.
        enable_chunked_prefill: prompts are split over batches.
        mamba_cache_mode: ``none``, ``align`` or ``all``.
        hybrid_manager: kinds of layers have block tables of their own.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        dcp: decode-context-parallel size.
        speculative_tokens: draft tokens per step.
        skip_layers: layers whose cache keeps the model's own type: indices, or ``sliding_window``.
        conv_state_dtype: element type of convolution states.
        ssm_state_dtype: element type of recurrent states; None for the convolution states' own.
    """

    dtype: str
    cache_dtype: str
    block_size: int
    block_size_given: bool
    mamba_block_size: int
    max_model_len: int
    derived_max_model_len: int
    auto_length: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    max_in_flight_tokens: int
    max_num_encoder_input_tokens: int
    async_scheduling: bool
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    mamba_cache_mode: str
    hybrid_manager: bool
    tp: int
    pp: int
    dcp: int
    speculative_tokens: int
    skip_layers: tuple[str, ...]
    conv_state_dtype: str
    ssm_state_dtype: str | None

    @property
    def cache_element(self) -> str:
        """The element type in the KV cache."""
        return self.dtype if self.cache_dtype == "auto" else self.cache_dtype


def resolve(
    config: ModelConfig,
    traits: Traits,
    flags: Flags,
    *,
    device: Device,
    release: Release,
    stated_length: float | None = None,
) -> Settings:
    """Work out what vLLM runs with.

    Args:
        config: the model.
        traits: what it is.
        flags: what the server was told.
        device: the card.
        release: the vLLM release.
        stated_length: what ``derived_length`` gives, where it is at hand.

    Raises:
        Refused: vLLM refuses these flags for this model.
    """
    check_parallel(config, traits, flags)
    dtype = model_dtype(config, flags, device=device, pooling=traits.pooling)
    cache = cache_dtype(config, flags)
    if stated_length is None:
        stated_length = derived_length(config, flags)
    derived = flags.max_model_len or DEFAULT_LENGTH if stated_length == math.inf else int(stated_length)
    auto = flags.max_model_len == AUTO_LENGTH and release.has_auto_length
    max_model_len = _max_model_len(config, flags, stated_length)
    chunked, caching = _prefill_modes(traits, flags, device)
    batched, seqs = batch_limits(
        traits, flags, max_model_len, chunked=chunked, device=device, release=release
    )
    if device.kind == "cpu" and traits.mla:
        # Whatever was asked for: the host takes whole prompts only.
        batched = max(max_model_len, DEFAULT_LENGTH)
    asynchronous = _async_scheduling(traits, flags, device=device, release=release)
    mode = _mamba_cache_mode(traits, flags, caching=caching)
    block_size = flags.block_size or (16 if device.kind == "cuda" else 128)
    speculative = flags.speculative_config or {}
    return Settings(
        dtype=dtype,
        cache_dtype=cache,
        block_size=block_size,
        block_size_given=flags.block_size is not None,
        mamba_block_size=flags.mamba_block_size or (block_size if caching else max_model_len),
        max_model_len=max_model_len,
        derived_max_model_len=max(derived, 1),
        auto_length=auto,
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        max_in_flight_tokens=batched * _concurrent_batches(flags, release, asynchronous=asynchronous),
        max_num_encoder_input_tokens=batched,
        async_scheduling=asynchronous,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        mamba_cache_mode=mode,
        hybrid_manager=_hybrid_manager(traits, flags, release),
        tp=flags.tp,
        pp=flags.pp,
        dcp=flags.dcp,
        speculative_tokens=int(speculative.get("num_speculative_tokens") or 0),
        skip_layers=_skip_layers(config, traits, flags, cache),
        conv_state_dtype=_state_dtype(flags.mamba_cache_dtype) or dtype,
        ssm_state_dtype=_state_dtype(flags.mamba_ssm_cache_dtype),
    )


def _prefill_modes(traits: Traits, flags: Flags, device: Device) -> tuple[bool, bool]:
    """Whether prompts are split over batches, and whether prefixes are cached."""
    if device.kind == "cpu" and traits.mla:
        return False, False
    whole = traits.encoder_decoder or traits.encoder_only
    chunked, caching = flags.enable_chunked_prefill, flags.enable_prefix_caching
    return (
        not whole if chunked is None else chunked,
        not (whole or traits.attention_free) if caching is None else caching,
    )


def total_heads(text: Section) -> int:
    """Query heads of the whole model; 0 where it has none."""
    return int(text.get("num_attention_heads") or 0)


def check_parallel(config: ModelConfig, traits: Traits, flags: Flags) -> None:
    """Refuse what vLLM refuses about parallel sizes.

    Raises:
        Refused: heads do not divide, or the model cannot be split over stages.
    """
    heads = total_heads(config.text)
    if heads % flags.tp:
        raise Refused(
            "indivisible_heads",
            f"Total number of attention heads ({heads}) must be divisible by "
            f"tensor parallel size ({flags.tp}).",
        )
    if flags.dcp > 1:
        _check_decode_context(config, traits, flags)
    if flags.pp > 1 and not traits.pipeline:
        raise Refused("pipeline_unsupported", "Pipeline parallelism is not supported for this model.")


def _check_decode_context(config: ModelConfig, traits: Traits, flags: Flags) -> None:
    """Ranks that share a KV head split its tokens; MLA's one latent counts for any number."""
    tp, dcp = flags.tp, flags.dcp
    if tp % dcp and not flags.prefill_context_parallel_size:
        raise Refused("indivisible_ranks", f"tp_size={tp} must be divisible by dcp_size={dcp}.")
    heads = config.text.get("num_key_value_heads")
    if not traits.mla and isinstance(heads, int) and heads > 0 and dcp * heads > tp:
        raise Refused(
            "decode_context_too_large",
            f"--decode-context-parallel-size ({dcp}) needs a --tensor-parallel-size ({tp}) of at least "
            f"{dcp * heads} with {heads} model KV heads.",
        )


def check_flags_exist(flags: Flags, release: Release) -> None:
    """Refuse what the release's parser does not have.

    Raises:
        Refused: in the parser's words.
    """
    missing = [
        f"--{name.replace('_', '-')} {f'{value:g}' if isinstance(value, float) else value}"
        for name, exists in (
            ("swap_space", release.has_swap_space),
            ("kv_cache_memory_bytes", release.has_kv_cache_memory_bytes),
        )
        if (value := getattr(flags, name)) is not None and not exists
    ]
    if missing:
        raise Refused("unrecognized_arguments", f"vllm: error: unrecognized arguments: {' '.join(missing)}")
    if flags.max_model_len == AUTO_LENGTH and not release.has_auto_length:
        raise Refused("bad_argument", "vllm: error: argument --max-model-len: invalid int value: 'auto'")


def model_dtype(config: ModelConfig, flags: Flags, *, device: Device, pooling: bool = False) -> str:
    """The element type the model runs in.

    Raises:
        Refused: the type is unknown or the model does not run in it.
    """
    model_type = config.root.model_type
    asked = (flags.dtype or "auto").lower()
    if asked != "auto":
        name = DTYPE_NAMES.get(asked)
        if name is None:
            raise Refused("dtype", f"Unknown dtype: {asked!r}")
        if name == "float16" and model_type in NO_FLOAT16:
            raise Refused("dtype", f"The model type {model_type!r} does not support float16.")
        return name
    half_only = device.capability is not None and device.capability < (8, 0)
    supported = ["float16", "float32"] if half_only else ["bfloat16", "float16", "float32"]
    if model_type in NO_FLOAT16:
        supported.remove("float16")
    preferred = "float16" if pooling and "float16" in supported else supported[0]
    stated = _stated_dtype(config)
    return stated if stated in supported and stated != "float32" else preferred


def _stated_dtype(config: ModelConfig) -> str:
    for part in _dtype_parts(config):
        value = part.first("dtype", "torch_dtype")
        if isinstance(value, str):
            return DTYPE_NAMES.get(value.removeprefix("torch."), value)
    return "float32"


def _dtype_parts(config: ModelConfig) -> Iterator[Section]:
    yield config.root
    yield config.text
    for name in ("vision_config", "encoder_config"):
        part = config.root.own.get(name)
        if part:
            yield Section(part, "")


def cache_dtype(config: ModelConfig, flags: Flags) -> str:
    """The KV cache's element type as a flag value, where ``auto`` means the model's own.

    Quantized checkpoints can say how their cache is stored; a flag goes before that.
    """
    asked = flags.kv_cache_dtype or "auto"
    if asked != "auto":
        return asked
    quantization = config.root.get("quantization_config")
    if not isinstance(quantization, Mapping):
        quantization = config.text.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return "auto"
    method = str(quantization.get("quant_method") or "")
    if method.startswith("modelopt"):
        return _modelopt_cache_dtype(quantization)
    if method.replace("_", "-") == "compressed-tensors" and quantization.get("kv_cache_scheme"):
        return "fp8"
    return "auto"


def _modelopt_cache_dtype(quantization: Mapping[str, Any]) -> str:
    inner = quantization.get("quantization")
    parts = [inner if isinstance(inner, Mapping) else quantization, quantization]
    scheme = next(
        (
            value
            for name in ("kv_cache_scheme", "kv_cache_quant_algo")
            for part in parts
            if (value := part.get(name))
        ),
        None,
    )
    if isinstance(scheme, Mapping):
        static_fp8 = (
            scheme.get("dynamic") is False and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        )
        fp4 = scheme.get("num_bits") == 4 and scheme.get("type") == "float"
        scheme = "fp8" if static_fp8 else "nvfp4" if fp4 else ""
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme or "").lower(), "auto")


def stated_window(text: Section) -> int | None:
    """The model-wide sliding window; None where there is none or the model does not use it."""
    window = text.get("sliding_window")
    return int(window) if isinstance(window, int | float) and window else None


def ropes(text: Section) -> Iterator[Mapping[str, Any]]:
    """The rope parameters, one mapping per kind of layer where they differ."""
    stated = text.first("rope_parameters", "rope_scaling")
    if not isinstance(stated, Mapping) or not stated:
        return
    nested = [value for value in stated.values() if isinstance(value, Mapping)]
    yield from nested or [stated]


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def derived_length(config: ModelConfig, flags: Flags) -> float:
    """The longest length that config.json allows, in tokens; infinite where it says nothing."""
    text = config.text
    lengths = [value for name in LENGTH_FIELDS if isinstance(value := text.get(name), int | float)]
    derived: float = min(lengths, default=math.inf)
    if isinstance(stated := text.get("model_max_length"), int | float) and stated:
        derived = stated
    window = stated_window(text)
    if flags.disable_sliding_window and window is not None:
        derived = min(derived, window)
    if derived == math.inf:
        return derived
    return derived * _rope_factor(text)


def _rope_factor(text: Section) -> float:
    if "gemma3" in text.model_type:
        return 1.0
    factor: Any = 1.0
    for rope in ropes(text):
        if _rope_type(rope) not in SCALED_ROPES:
            factor = rope.get("factor", factor)
    return 1.0 if factor is None else float(factor)


def _max_model_len(config: ModelConfig, flags: Flags, derived: float) -> int:
    asked = flags.max_model_len
    if asked is None or asked == AUTO_LENGTH:
        if derived == math.inf:
            return DEFAULT_LENGTH
        original = config.text.get("original_max_position_embeddings")
        if isinstance(original, int) and any(_rope_type(rope) == "longrope" for rope in ropes(config.text)):
            return original
        return int(derived)
    stated = config.text.get("model_max_length")
    if asked > derived and (stated is None or asked > stated) and not flags.allow_long_max_model_len:
        raise Refused(
            "max_model_len_gt_derived",
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len ({derived}).",
        )
    return asked


def batch_limits(
    traits: Traits,
    flags: Flags,
    max_model_len: int,
    *,
    chunked: bool,
    device: Device,
    release: Release,
) -> tuple[int, int]:
    """``max_num_batched_tokens`` and ``max_num_seqs``.

    Raises:
        Refused: a batch cannot hold what it must.
    """
    tokens, seqs = _batch_defaults(flags, device, release)
    if flags.performance_mode == "throughput":
        tokens, seqs = tokens * 2, seqs * 2
    seqs = flags.max_num_seqs or seqs
    if flags.max_num_batched_tokens is not None:
        tokens = flags.max_num_batched_tokens
    else:
        if not chunked:
            tokens = max(max_model_len, tokens)
        if traits.image_tokens is not None:
            tokens = max(tokens, traits.image_tokens)
        tokens = min(seqs * max_model_len, tokens)
    if flags.max_num_seqs is None:
        seqs = min(seqs, tokens)
    if tokens < seqs:
        raise Refused(
            "batched_tokens",
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs}).",
        )
    if tokens < max_model_len and not chunked:
        raise Refused(
            "batched_tokens",
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({max_model_len}).",
        )
    return tokens, seqs


def _batch_defaults(flags: Flags, device: Device, release: Release) -> tuple[int, int]:
    if device.kind == "cpu":
        world = flags.tp * flags.pp
        return 2048 * world, 128 * world
    if not release.batched_tokens_by_card:
        return (2048 if release.engine == "V1" else 512), 256
    if device.total_bytes >= 160 * GIB:
        return 16384, 1024
    if device.total_bytes >= 70 * GIB and "a100" not in device.name.lower():
        return 8192, 1024
    return 2048, 256


def _async_scheduling(traits: Traits, flags: Flags, *, device: Device, release: Release) -> bool:
    if device.kind == "cpu":
        return False
    if flags.async_scheduling is not None:
        return flags.async_scheduling
    if not release.async_scheduling_default or traits.pooling:
        return False
    method = (flags.speculative_config or {}).get("method")
    return method is None or method in ASYNC_DRAFTERS or str(method).endswith("_mtp")


def _concurrent_batches(flags: Flags, release: Release, *, asynchronous: bool) -> int:
    if not release.in_flight_batches:
        return 1
    return flags.pp + 1 if asynchronous else flags.pp


def _mamba_cache_mode(traits: Traits, flags: Flags, *, caching: bool) -> str:
    if not (traits.hybrid or traits.attention_free):
        return flags.mamba_cache_mode or "none"
    asked = flags.mamba_cache_mode or "none"
    if not caching:
        return "none"
    return "align" if asked == "none" else asked


def _skip_layers(config: ModelConfig, traits: Traits, flags: Flags, cache: str) -> tuple[str, ...]:
    given = flags.kv_cache_dtype_skip_layers or ()
    if not cache.startswith(("turboquant_", "ultraquant_")) or traits.hybrid:
        return given
    # These types keep the first and last two layers of a dense model unquantized.
    layers = config.text.whole("num_hidden_layers")
    edge = min(2, layers // 2)
    indices = sorted({*range(edge), *range(layers - edge, layers)})
    return tuple(sorted({*given, *map(str, indices)}))


def _state_dtype(asked: str | None) -> str | None:
    return None if asked in (None, "auto") else DTYPE_NAMES.get(str(asked), asked)


def _hybrid_manager(traits: Traits, flags: Flags, release: Release) -> bool:
    if flags.disable_hybrid_kv_cache_manager or not release.hybrid_groups:
        return False
    if flags.disable_hybrid_kv_cache_manager is False:
        return True
    if not traits.chunked_attention:
        return True
    drafting = str((flags.speculative_config or {}).get("method") or "").startswith(("eagle", "mtp"))
    return release.chunked_hybrid_manager and not drafting

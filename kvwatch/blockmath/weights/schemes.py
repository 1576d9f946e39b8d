"""Which layers a quantization scheme touches, and how it stores them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.weights.formats import (
    BNB_INT8,
    FP8_CHANNEL,
    FP8_STATIC,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    NVFP4_WEIGHTS,
    Format,
    fp8_block,
    packed_int,
)
from kvwatch.blockmath.weights.parts import Linear

UNFUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "w13": ("0.gate_proj", "0.up_proj", "0.w1", "0.w3"),
    "w2": ("0.down_proj", "0.w2"),
}
"""Names that checkpoints and ignore lists give to the pieces of vLLM's merged layers."""

PREFIXES = re.compile(r"^(?:model\.|language_model\.|backbone\.)+")


def checkpoint_names(name: str) -> tuple[str, ...]:
    """All names under which an ignore list may mean this module, without leading wrappers."""
    bare = PREFIXES.sub("", name)
    head, _, last = bare.rpartition(".")
    return (bare, *(f"{head}.{piece}" for piece in UNFUSED.get(last, ())))


def _place(name: str) -> str:
    """The first two parts of a name, usually ``layers.N``: where to look for wildcards."""
    end = name.find(".", name.find(".") + 1)
    return name[:end] if end > 0 else name


@dataclass(frozen=True, slots=True)
class Names:
    """A list of module names, wildcards and ``re:`` expressions.

    A name stands for the module and for all that it holds.

    Attributes:
        exact: full names.
        starts: what wildcards at the end of a name leave, by place; those of no single place under "".
        patterns: other wildcards and expressions.
    """

    exact: frozenset[str] = frozenset()
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, listed: Iterable[str]) -> Names:
        """Compile a list as config.json gives it."""
        exact, patterns = set(), []
        starts: dict[str, tuple[str, ...]] = {}
        for name in listed:
            bare = PREFIXES.sub("", name)
            if name.startswith("re:"):
                patterns.append(re.compile(name[3:]))
            elif "*" not in name:
                exact.add(bare)
            elif "*" not in bare[:-1]:
                place = _place(bare) if bare.count(".") > 1 else ""
                starts[place] = (*starts.get(place, ()), bare[:-1])
            else:
                patterns.append(re.compile(translate(bare)))
        return cls(frozenset(exact), starts, tuple(patterns))

    def __bool__(self) -> bool:
        return bool(self.exact or self.starts or self.patterns)

    def match(self, names: tuple[str, ...]) -> bool:
        """Whether the list means the module that has these names."""
        return any(self._holds(name) for name in names)

    def _holds(self, name: str) -> bool:
        if self.exact:
            end = len(name)
            while end > 0:
                if name[:end] in self.exact:
                    return True
                end = name.rfind(".", 0, end)
        if self.starts and name.startswith(self.starts.get(_place(name), ()) + self.starts.get("", ())):
            return True
        return any(pattern.match(name) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme applied to one model.

    Attributes:
        name: as the user or config.json names it.
        default: how linear layers are stored; None = as the model's dtype.
        experts: how expert layers are; same as ``default`` unless said otherwise.
        ignored: modules that stay in the model's dtype.
        listed: modules that have a format of their own.
        head: whether the output projection is quantized where a list names it.
        assumptions: what was assumed about it.
    """

    name: str
    default: Format | None
    experts: Format | None
    ignored: Names = Names()
    listed: tuple[tuple[Names, Format], ...] = ()
    assumptions: tuple[str, ...] = field(default=())

    @property
    def per_module(self) -> bool:
        """Whether equal layers may be stored differently."""
        return bool(self.ignored or self.listed)

    def format_of(self, part: Linear, prefix: str) -> Format | None:
        """How a layer is stored; None = unquantized."""
        if part.kind == "plain" or part.dtype is not None:
            return None
        if self.per_module:
            names = checkpoint_names(f"{prefix}.{part.name}" if prefix else part.name)
            for listed, form in self.listed:
                if listed.match(names):
                    return form
            if self.ignored.match(names):
                return None
        if part.kind == "head":
            return None
        return self.experts if part.kind == "experts" else self.default


def uniform(
    name: str, form: Format, ignored: Iterable[str] = (), assumptions: tuple[str, ...] = ()
) -> Scheme:
    """A scheme that stores all layers alike, but for some."""
    return Scheme(name, form, form, Names.of(ignored), (), assumptions)


def _ignored(q: Mapping[str, Any]) -> list[str]:
    names: list[str] = []
    for key in (
        "modules_to_not_convert",
        "ignored_layers",
        "ignore",
        "exclude_modules",
        "llm_int8_skip_modules",
    ):
        names += q.get(key) or ()
    skipped = [f"re:{rule[2:]}" for rule in q.get("dynamic") or () if rule.startswith("-:")]
    return names + skipped


def _fp8(name: str, q: Mapping[str, Any]) -> Scheme:
    if block := q.get("weight_block_size"):
        return uniform(name, fp8_block(*block), _ignored(q))
    static = q.get("activation_scheme") == "static"
    return uniform(name, FP8_STATIC if static else FP8_TENSOR, _ignored(q))


def _packed(name: str, q: Mapping[str, Any]) -> Scheme:
    bits = int(q.get("bits") or q.get("w_bit") or 4)
    group = int(q.get("group_size") or q.get("q_group_size") or 128)
    return uniform(name, packed_int(bits, group), _ignored(q))


def _bitsandbytes(name: str, q: Mapping[str, Any]) -> Scheme:
    return uniform(name, BNB_INT8 if q.get("load_in_8bit") else NF4, _ignored(q))


def _mxfp4(name: str, q: Mapping[str, Any]) -> Scheme:
    return Scheme(name, None, MXFP4, Names.of(_ignored(q)))


MODELOPT_ALGORITHMS = {
    "FP8": FP8_STATIC,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": fp8_block(128, 128),
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": NVFP4_WEIGHTS,
    "MXFP8": MXFP8,
}


def _modelopt(name: str, q: Mapping[str, Any]) -> Scheme:
    q = q.get("quantization") or q
    listed = q.get("quantized_layers")
    if listed:
        by_algorithm: dict[str, list[str]] = {}
        for module, own in listed.items():
            by_algorithm.setdefault(str(own.get("quant_algo")), []).append(module)
        forms = tuple((Names.of(modules), _algorithm(algo)) for algo, modules in by_algorithm.items())
        return Scheme(name, None, None, Names.of(_ignored(q)), forms)
    groups = q.get("config_groups")
    if groups and not q.get("quant_algo"):
        return _compressed(name, q)
    algorithm = q.get("quant_algo") or ("NVFP4" if "fp4" in name else "FP8")
    return uniform(name, _algorithm(str(algorithm)), _ignored(q))


def _algorithm(name: str) -> Format:
    if name not in MODELOPT_ALGORITHMS:
        raise Unsupported("unknown_quantization", f"quant_algo {name} is not known")
    return MODELOPT_ALGORITHMS[name]


def _compressed(name: str, q: Mapping[str, Any]) -> Scheme:
    forms: list[tuple[Names, Format]] = []
    default: Format | None = None
    for group in (q.get("config_groups") or {}).values():
        form = _group_format(group)
        targets = group.get("targets") or ["Linear"]
        if "Linear" in targets:
            default = form
        else:
            forms.append((Names.of(targets), form))
    return Scheme(name, default, default, Names.of(_ignored(q)), tuple(forms))


def _group_format(group: Mapping[str, Any]) -> Format:
    weights = group.get("weights") or {}
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    inputs = group.get("input_activations") or {}
    size = weights.get("group_size")
    if kind == "float" and bits == 4 and size == MXFP4.group:
        return MXFP4
    if kind == "float" and bits == 4:
        return NVFP4 if inputs.get("num_bits") == 4 else NVFP4_WEIGHTS
    if kind == "float" and bits == 8:
        if strategy == "block":
            return fp8_block(*weights["block_structure"])
        if strategy == "channel":
            return FP8_CHANNEL
        return FP8_STATIC if inputs.get("dynamic") is False else FP8_TENSOR
    if kind == "int" and bits == 8 and inputs:
        return INT8_CHANNEL
    if kind == "int" and isinstance(bits, int):
        return packed_int(bits, size or 0, zeros=not weights.get("symmetric", True))
    raise Unsupported("unknown_quantization", f"compressed-tensors weights {dict(weights)} are not known")


def _deepseek_v4(config: ModelConfig, q: Mapping[str, Any]) -> Scheme:
    """FP8 blocks for linear layers, experts as ``expert_dtype`` or ``moe_quant_algo`` say."""
    four_bits = config.text.get("expert_dtype", "fp4") == "fp4"
    rows, inputs = q.get("weight_block_size", (128, 128))
    linear = fp8_block(rows, inputs, scale=1 if four_bits else 4)
    experts = NVFP4 if str(q.get("moe_quant_algo")).upper() == "NVFP4" else MXFP4 if four_bits else linear
    return Scheme("deepseek_v4_fp8", linear, experts, Names.of(q.get("modules_to_not_convert") or ()))


METHODS: Mapping[str, Callable[[str, Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda name, q: uniform(name, FP8_CHANNEL, _ignored(q)),
    "awq": _packed,
    "auto_awq": _packed,
    "awq_marlin": _packed,
    "gptq": _packed,
    "auto_gptq": _packed,
    "gptq_marlin": _packed,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "compressed_tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
}
"""Schemes by the name that config.json or ``--quantization`` gives them."""

HYPOTHETICAL: Mapping[str, Format] = {
    "fp8": FP8_TENSOR,
    "w8a8": INT8_CHANNEL,
    "int8": INT8_CHANNEL,
    "w4a16": packed_int(4, 128, zeros=False),
    "awq": packed_int(4, 128),
    "gptq": packed_int(4, 128),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "bitsandbytes": NF4,
}
"""What weights of a model would take if they were quantized so: for models that are not."""


def scheme_of(config: ModelConfig, asked: str | None) -> Scheme | None:
    """The scheme of a model, from its own file or from ``--quantization``; None where it has none.

    Raises:
        Unsupported: the scheme is not known.
    """
    own = config.root.get("quantization_config") or config.text.get("quantization_config")
    if isinstance(own, Mapping) and config.text.model_type == "deepseek_v4":
        return _deepseek_v4(config, own)
    if isinstance(own, Mapping) and own.get("quant_method"):
        method = str(own["quant_method"])
        if method not in METHODS:
            raise Unsupported("unknown_quantization", f"quantization method {method} is not known")
        return METHODS[method](method, own)
    if asked is None:
        return None
    assumption = (f"--quantization {asked} on a model whose config.json describes none: all linear layers",)
    if asked in HYPOTHETICAL:
        return uniform(asked, HYPOTHETICAL[asked], (), assumption)
    if asked in METHODS:
        scheme = METHODS[asked](asked, {})
        return Scheme(scheme.name, scheme.default, scheme.experts, scheme.ignored, scheme.listed, assumption)
    raise Unsupported("unknown_quantization", f"--quantization {asked} is not known")

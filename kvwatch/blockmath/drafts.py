"""KV layers that a draft model adds on the last pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.layouts.base import Context, Layout, attention, head_size, kv_heads
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.specs import Kind, LayerSpec

WITHOUT_CACHE: Final = frozenset(
    {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "extract_hidden_states"}
)
"""Speculative methods whose drafter keeps no KV cache."""

MTP_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_mtp_layers")


def with_draft(layout: Layout, context: Context) -> Layout:
    """The layout with the draft model's layers.

    MTP modules repeat the target's own attention layer. Of a separate draft model, the configuration can be
    given under ``draft_model_config``; an EAGLE head without one counts as one layer shaped like the
    target's.

    Raises:
        Unsupported: the draft model's configuration is needed and not given.
    """
    speculative = context.flags.speculative_config
    if not speculative:
        return layout
    method = str(speculative.get("method") or "")
    if method in WITHOUT_CACHE:
        return layout
    if method == "mtp" or method.endswith("_mtp"):
        return replace(layout, draft=_repeated(layout) * _mtp_layers(context))
    given = speculative.get("draft_model_config")
    if isinstance(given, Mapping):
        return replace(layout, draft=_separate(given, context))
    if method in ("eagle", "eagle3"):
        return replace(layout, draft=_repeated(layout), basis="inferred")
    raise Unsupported("draft_model", f"speculative method {method!r} needs the draft model's config.json")


def _mtp_layers(context: Context) -> int:
    for section in (context.config.text, context.config.root):
        for name in MTP_COUNTS:
            value = section.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return 1


def _repeated(layout: Layout) -> tuple[LayerSpec, ...]:
    """The full-attention layer's specs of the target, as an MTP module registers them."""
    attending = [
        specs
        for specs in layout.templates
        if any(spec.kind in (Kind.FULL, Kind.MLA, Kind.SLIDING) for spec in specs)
    ]
    full = [specs for specs in attending if any(spec.kind in (Kind.FULL, Kind.MLA) for spec in specs)]
    if not attending:
        raise Unsupported("draft_model", "a model without attention has no draft layer of this kind")
    return max(full or attending, key=len)


def _separate(config: Mapping[str, Any], context: Context) -> tuple[LayerSpec, ...]:
    text = ModelConfig.read(config).text
    spec = attention(context, kv_heads(text), head_size(text))
    return (spec,) * text.whole("num_hidden_layers")

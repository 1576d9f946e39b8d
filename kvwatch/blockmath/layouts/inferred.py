"""Architectures that are not known: read by their structure where that leaves no doubt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.layouts import decoder, layertypes, mla
from kvwatch.blockmath.layouts.base import Context, Layout, values
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.settings import Traits

OTHER_CACHES: Final = re.compile(
    r"mamba|ssm|rwkv|linear_(?:attn|key|value|num|conv)|conv_(?:kernel|L_cache)|state_size|time_step|kda|lru"
    r"|hybrid|index_|compress_|attn_type_list|layers?_block_type|block_configs|kv_shared|cross_attention"
    r"|chunk_size|global_head_dim|swa_|attn_config|sliding_window_pattern|interleaved"
)
"""Fields of models whose layers keep something else than K and V of every token, or differ among
themselves.
"""

SCALARS_OFF: Final[tuple[object, ...]] = (None, False, 0, [], {})


def layers(context: Context) -> Layout:
    """Standard or latent attention, where the configuration shows nothing else.

    Raises:
        Unsupported: the structure leaves room for doubt.
    """
    _stop_at_other_caches(context.config)
    text = context.text
    if text.get("kv_lora_rank") is not None:
        return replace(mla.layers(context), basis="inferred")
    types = values(text, "layer_types")
    if types is not None and not {layertypes.SLIDING, layertypes.FULL}.issuperset(types):
        raise Unsupported(
            "unknown_layer_types", f"layers of types {sorted(set(map(str, types)))} are not known"
        )
    if types is None and layertypes.window(text) is not None:
        raise Unsupported(
            "ambiguous_layers",
            "config.json has a sliding window, but not which layers of this architecture use it",
        )
    return replace(decoder.layers(context), basis="inferred")


def traits(config: ModelConfig) -> Traits:
    """What the structure tells."""
    return Traits(mla=config.text.get("kv_lora_rank") is not None)


def _stop_at_other_caches(config: ModelConfig) -> None:
    for part in (config.text.own, config.root.own):
        names = [name for name in _set_fields(part) if OTHER_CACHES.search(name)]
        if names:
            raise Unsupported(
                "unknown_architecture",
                f"architecture {config.architecture or '(none)'!r} is not known, and its "
                f"{', '.join(sorted(names))} may stand for another kind of cache",
            )


def _set_fields(part: Mapping[str, Any]) -> list[str]:
    return [
        name for name, value in part.items() if value not in SCALARS_OFF and not isinstance(value, Mapping)
    ]

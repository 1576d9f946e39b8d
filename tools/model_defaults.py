"""Write kvwatch/blockmath/model_defaults.py: defaults of fields that a config.json may leave out.

Run with the Python of a real vLLM: it reads the configuration classes of transformers and of vLLM itself.

    $KVWATCH_VLLM_VENV/bin/python tools/model_defaults.py > kvwatch/blockmath/model_defaults.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import warnings
from importlib import import_module
from typing import Any

FIELDS = re.compile(
    r"""
    vocab_size | hidden_size | num_hidden_layers | num_layers | n_layers? | num_attention_heads
    | n_heads? | num_key_value_heads | num_kv_heads | n_head_kv | multi_query | multi_query_attention
    | multi_query_group_num | num_heads | n_mamba_heads
    | new_decoder_architecture | num_attention_groups | head_dim | kv_channels
    | global_head_dim | num_global_key_value_heads | attention_k_eq_v | num_kv_shared_layers
    | v_head_dim | swa_\w+ | attention_head_dim | attention_hidden_size | hidden_size_per_head
    | max_position_embeddings | n_positions | max_seq_len | seq_length | model_max_length
    | max_target_positions | max_sequence_length | max_seq_length | seq_len | n_ctx
    | max_source_positions | original_max_position_embeddings | sliding_window\w* | use_sliding_window
    | max_window_layers | layer_types | layers_block_type | layer_group_size | attention_chunk_size
    | no_rope_layers\w* | attn_\w*(?:period|offset|step)\w* | full_attn\w* | full_attention_interval
    | hybrid_\w+ | local_attention | global_attn_every_n_layers | num_nextn_predict_layers
    | mtp_num_hidden_layers | n_mtp_layers | kv_lora_rank | q_lora_rank | qk_rope_head_dim
    | qk_nope_head_dim | qk_head_dim | index_\w+ | compress_\w+ | mamba_\w+ | use_mamba\w* | ssm_\w+
    | state_size | conv_kernel | conv_L_cache | conv_dim\w* | expand | n_groups | chunk_size
    | time_step_rank | linear_\w+ | use_conv_bias | intermediate_size
    | [HL]_cycles | num_layers_per_stack | num_memory_blocks
    | use_shared_attention_adapter | block_configs | decoder_layers | encoder_layers
    | decoder_attention_heads | d_model | n_embd | activation | is_causal | add_cross_attention
    | ffn_hidden_size | transf_decoder | depth | block_auto_adjust_ff_dim | full_attn_idxs
    | block_\w*idxs? | tie_word_embeddings | num_local_experts | num_experts | n_routed_experts
    | moe_intermediate_size
    """,
    re.VERBOSE,
)
HEADER = '''"""Defaults of the configuration classes, by model type. Written by tools/model_defaults.py.

One line per model type: ``@path=type`` is where the language model sits, ``alias>field`` another name of
a field, ``field=value`` a default in JSON, as the class states it before its own rules fill it in.
"""

# ruff: noqa: E501
'''
NOISE = ("rope_parameters", "rope_scaling")


def plain(value: Any) -> bool:
    """Whether a default is worth a place in the table."""
    if isinstance(value, bool | int | float | str):
        return True
    return value is None


def raw_defaults(cls: type) -> dict[str, Any]:
    """Defaults as written in the class, before its own rules fill them in."""
    if dataclasses.is_dataclass(cls):
        found = {
            field.name: field.default
            for field in dataclasses.fields(cls)
            if field.default is not dataclasses.MISSING
        }
        if found.keys() - {"dtype"}:
            own = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
            signature = inspect.signature(cls).parameters
            found |= {
                name: parameter.default
                for name, parameter in signature.items()
                if parameter.default is not inspect.Parameter.empty and name not in own
            }
            return found
    return {
        name: parameter.default
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def config_classes() -> dict[str, type]:
    """Every model type that this vLLM knows, with its configuration class; vLLM's own classes win."""
    known = import_module("transformers.models.auto.configuration_auto")
    registry = import_module("vllm.transformers_utils.config")._CONFIG_REGISTRY
    classes: dict[str, type] = {}
    for name in known.CONFIG_MAPPING_NAMES:
        try:
            classes[name] = known.CONFIG_MAPPING[name]
        except Exception as error:  # noqa: BLE001 - a broken class is left out, and said so
            print(f"{name}: {error}", file=sys.stderr)
    for name in registry:
        try:
            classes[name] = registry[name]
        except Exception as error:  # noqa: BLE001
            print(f"{name}: {error}", file=sys.stderr)
    for cls in list(classes.values()):
        for sub in (getattr(cls, "sub_configs", None) or {}).values():
            sub_type = getattr(sub, "model_type", "")
            if sub_type and sub_type not in classes:
                classes[sub_type] = sub
    return classes


def text_path(cls: type) -> tuple[str, str] | None:
    """Where a multimodal configuration keeps its language model, and that part's model type."""
    try:
        config = cls()
        text = import_module("vllm.transformers_utils.config").get_hf_text_config(config)
    except Exception:  # noqa: BLE001 - cannot be built without arguments
        return None
    if text is config:
        return None
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        prefix, node = stack.pop()
        for name, value in vars(node).items():
            if value is text:
                return (prefix + name, str(getattr(text, "model_type", "")))
            if hasattr(value, "model_type"):
                stack.append((f"{prefix}{name}.", value))
    return None


def row(name: str, cls: type) -> str | None:
    """One line of the table."""
    values = {
        key: value
        for key, value in raw_defaults(cls).items()
        if FIELDS.fullmatch(key) and key not in NOISE and plain(value)
    }
    aliases = {
        key: value
        for key, value in (getattr(cls, "attribute_map", None) or {}).items()
        if isinstance(value, str) and (FIELDS.fullmatch(key) or FIELDS.fullmatch(value))
    }
    path = text_path(cls)
    if not values and not aliases and path is None:
        return None
    parts = [name]
    if path is not None:
        parts.append(f"@{path[0]}={path[1]}")
    parts += [f"{key}>{value}" for key, value in sorted(aliases.items())]
    parts += [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in sorted(values.items())]
    return " ".join(parts)


def main() -> None:
    """Print the module."""
    warnings.simplefilter("ignore")
    rows = [text for name, cls in sorted(config_classes().items()) if (text := row(name, cls))]
    print(HEADER)
    print('TABLE = r"""')
    print("\n".join(rows))
    print('"""')


if __name__ == "__main__":
    main()

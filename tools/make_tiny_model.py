#!/usr/bin/env python3
"""Make a small model folder that a real vLLM server loads: config.json, random weights, a byte tokenizer.

Needs numpy only and no model hub. The weights are noise: what counts is the shape of the KV cache.

    make_tiny_model.py OUT [--preset NAME] [--max-positions N]
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 320
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a model. Each token takes ``2 * layers * kv_heads * head_dim`` values of KV cache.

    Attributes:
        family: ``llama``, ``qwen2`` or ``gemma3_text``.
        sliding_window: window of the sliding layers, in tokens; every sixth layer is a full one (Gemma 3).
    """

    family: str
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 4096
    sliding_window: int | None = None

    @property
    def intermediate(self) -> int:
        return 2 * self.hidden


PRESETS = {
    "llama": Preset("llama"),
    "qwen2": Preset("qwen2"),
    # 32 KiB per token in bf16: a pool of a few MiB holds few tokens, so lengths that cannot fit are short.
    "big-kv": Preset("llama", layers=4, heads=16, kv_heads=16, head_dim=128, max_positions=131072),
    "gemma3": Preset("gemma3_text", layers=12, max_positions=32768, sliding_window=512),
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
        "sliding_window_pattern": 6,
    },
}


def model_config(preset: Preset) -> dict[str, Any]:
    """The preset's config.json."""
    config: dict[str, Any] = {
        "model_type": preset.family,
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.intermediate,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "max_position_embeddings": preset.max_positions,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    if preset.sliding_window is not None:
        config["sliding_window"] = preset.sliding_window
    return config | FAMILIES[preset.family]


def parameter_shapes(preset: Preset) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter, as the checkpoints of the family name them."""
    hidden, inner = preset.hidden, preset.intermediate
    q_size, kv_size = preset.heads * preset.head_dim, preset.kv_heads * preset.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if preset.family == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
    if preset.family == "gemma3_text":
        layer |= {f"self_attn.{name}_norm.weight": (preset.head_dim,) for name in "qk"}
        layer |= {f"{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")}
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for index in range(preset.layers):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not FAMILIES[preset.family]["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCABULARY, hidden)


def write_weights(path: Path, preset: Preset) -> None:
    """Write random bfloat16 weights in the safetensors format: header length, JSON header, raw data."""
    random = np.random.default_rng(0)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    offset = 0
    for name, shape in parameter_shapes(preset):
        values = random.normal(0.0, 0.02, shape) + (1.0 if name.endswith("norm.weight") else 0.0)
        # bfloat16 is the upper half of float32.
        data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, offset + len(data))}
        chunks.append(data)
        offset += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(chunks))


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE uses, in byte order.

    Printable Latin-1 bytes stand for themselves, the other bytes for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """A tokenizer.json with one token per byte and no merges."""
    tokens = [*SPECIAL_TOKENS, *byte_alphabet()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token} | special for i, token in enumerate(SPECIAL_TOKENS)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }


def tokenizer_config(preset: Preset) -> dict[str, Any]:
    """The tokenizer_config.json beside it, with a chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": preset.max_positions,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    }


def make_model(out: Path, preset: Preset) -> None:
    """Write the model folder, replacing the files of an earlier one."""
    out.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": model_config(preset),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(preset),
    }
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2, ensure_ascii=False), encoding="utf-8")
    write_weights(out / "model.safetensors", preset)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--preset", choices=PRESETS, default="llama")
    parser.add_argument("--max-positions", type=int, help="longest length that config.json admits")
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset]
    if options.max_positions is not None:
        preset = replace(preset, max_positions=options.max_positions)
    make_model(options.out, preset)
    print(options.out)


if __name__ == "__main__":
    main()

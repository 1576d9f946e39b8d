"""Random models against a real vLLM's own model classes and planner, on its CPU platform."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from tests.support import ROOT
from tools.vllm_plan import MARK

pytestmark = pytest.mark.vllm

HOST = Device("cpu", 0, None, kind="cpu")
GIB = 1 << 30
Question = dict[str, Any]


def dense(rng: random.Random) -> dict[str, Any]:
    heads, kv_heads = rng.choice([(8, 8), (16, 4), (32, 8), (24, 2), (8, 1)])
    kind, architecture = rng.choice([("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
    return {
        "architectures": [architecture],
        "model_type": kind,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([64, 128]),
        "hidden_size": heads * 64,
        "num_hidden_layers": rng.randint(2, 40),
    }


def sliding(rng: random.Random) -> dict[str, Any]:
    layers, period = rng.randint(4, 40), rng.choice([2, 3, 6])
    return dense(rng) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": layers,
        "sliding_window": rng.choice([512, 1024, 1000]),
        "layer_types": [
            "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
        ],
    }


def latent(rng: random.Random) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_size": 1024,
        "num_hidden_layers": rng.randint(2, 6),
        "first_k_dense_replace": 100,
        "kv_lora_rank": rng.choice([256, 512]),
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
    }


def states(rng: random.Random) -> dict[str, Any]:
    layers = rng.randint(4, 24)
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_attention_heads": 16,
        "num_key_value_heads": rng.choice([2, 4]),
        "head_dim": 64,
        "hidden_size": 1024,
        "num_hidden_layers": layers,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": rng.choice([64, 128, 256]),
        "mamba_d_conv": 4,
    }


def recurrent(rng: random.Random) -> dict[str, Any]:
    return {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "state_size": rng.choice([16, 32]),
        "conv_kernel": 4,
        "time_step_rank": 32,
        "num_hidden_layers": rng.randint(2, 30),
    }


def step(rng: random.Random) -> dict[str, Any]:
    layers = rng.randint(4, 16)
    return {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_attention_heads": 16,
        "num_attention_groups": rng.choice([2, 4, 8]),
        "head_dim": 128,
        "hidden_size": 1024,
        "num_hidden_layers": layers,
        "sliding_window": 512,
        "rope_theta": 10000.0,
        "layer_types": [("sliding" if layer % 4 else "full") + "_attention" for layer in range(layers)],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 24,
            "num_attention_groups": 8,
            "head_dim": 128,
            "true_head_dim": 128,
        },
    }


def loops(rng: random.Random) -> dict[str, Any]:
    return dense(rng) | {
        "architectures": ["IQuestLoopCoderForCausalLM"],
        "model_type": "llama",
        "loop_num": rng.choice([2, 3]),
        "loop_window_size": rng.choice([64, 100]),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def questions() -> Iterator[Question]:
    rng = random.Random(2)
    for model in (dense, sliding, latent, states, recurrent, step, loops):
        for _ in range(5):
            config = model(rng) | {
                "vocab_size": 1024,
                "intermediate_size": 1024,
                "max_position_embeddings": rng.choice([2048, 8192]),
                "dtype": "bfloat16",
            }
            flags: dict[str, Any] = {"tensor_parallel_size": rng.choice([1, 1, 2, 4])}
            if flags["tensor_parallel_size"] > 1:
                # Defaults grow with the ranks, which the real one hears of too late here.
                flags |= {"max_num_batched_tokens": 8192, "max_num_seqs": 64}
            if rng.random() < 0.5:
                flags["max_model_len"] = rng.choice([1000, 2048, 2050])
            if model in (dense, sliding) and rng.random() < 0.3:
                flags["block_size"] = rng.choice([32, 64, 96])
            yield {"config": config, "flags": flags, "available": rng.randint(GIB // 64, GIB)}


def planned(question: Question) -> dict[str, Any]:
    flags = Flags.from_mapping(question["flags"])
    try:
        pool: Pool = plan_pool(question["config"], flags, device=HOST, release=Release.parse("0.32.0"))
    except Refused as refused:
        return {"error": refused.kind}
    length = pool.settings.max_model_len
    return {
        "max_model_len": length,
        "max_num_batched_tokens": pool.settings.max_num_batched_tokens,
        "max_num_seqs": pool.settings.max_num_seqs,
        "dtype": pool.settings.dtype,
        "bytes_per_block": pool.bytes_per_block[0],
        "needed_bytes": pool.need_bytes(length)[0],
        "blocks_per_request": list(pool.blocks_per_request(length)),
        # The search of vLLM leaves the kept-back block out.
        "longest_length": pool.longest_length(question["available"] + pool.kept_back_bytes[0]),
        "num_blocks": pool.num_blocks(question["available"]),
    }


def test_random_models_are_planned_as_vllm_plans_them(vllm_venv: Path) -> None:
    asked = list(questions())
    run = subprocess.run(
        [vllm_venv / "bin" / "python", "-m", "tools.vllm_plan"],
        input="".join(json.dumps(question) + "\n" for question in asked),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    answers = [json.loads(line[1:]) for line in run.stdout.splitlines() if line.startswith(MARK)]
    assert len(answers) == len(asked)
    wrong = []
    for question, answer in zip(asked, answers, strict=True):
        ours = planned(question)
        if ("error" in ours) != ("error" in answer) or ("error" not in ours and ours != answer):
            wrong.append((question, answer, ours))
    assert not wrong, "\n".join(map(str, wrong))
    refused = sum("error" in answer for answer in answers)
    assert len(answers) - refused >= 20

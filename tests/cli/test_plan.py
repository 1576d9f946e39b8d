"""`kvwatch plan` from the command line: what it says, its exit codes, batches."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.gpus import GPUS
from kvwatch.cli.main import main
from kvwatch.cli.plan import EPILOG
from kvwatch.cli.plan_flags import NAMES
from tests.forecast.startups import MODELS
from tests.support import shared_dir

WIDTH = 80
GIB = 1 << 30


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a config.json of Llama-3.1-8B, and a hub cache with Qwen/Qwen3-32B."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Llama-3.1-8B"]))
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-32B" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MODELS["Qwen3-32B"]))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Output:
    """One run: exit code, lines of standard output, text of standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        self.code = main(["plan", *arguments])
        captured = capsys.readouterr()
        self.text, self.error = captured.out, captured.err
        self.lines = self.text.splitlines()

    def value(self, label: str) -> str:
        """What stands behind a label: the first number or word."""
        line = next(line for line in self.lines if line.strip().startswith(label))
        return line.strip().removeprefix(label).split()[0]


def test_says_what_a_server_would_hold(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(capsys, "config.json", "--gpu", "H100")
    assert output.code == 0
    assert output.value("weights") == "14.96"
    assert output.value("CUDA total") == "79.19"
    assert output.value("per token on each GPU") == "128"
    assert output.value("one request of 131,072 tokens") == "16.0"
    blocks = int(output.value("blocks").replace(",", ""))
    assert int(output.value("capacity").replace(",", "")) == 16 * blocks
    assert float(output.value("full-length requests at once")) == pytest.approx(blocks / 8192, abs=0.01)
    assert "STARTS." in output.text
    assert "--kv-cache-dtype fp8" in output.text
    assert "upper bound" in output.text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpu", "H100"),
        ("--gpu", "RTX-4090", "--max-model-len", "auto"),
        ("--gpu", "T4"),
        ("--gpu", "B300", "-tp", "2", "-pp", "2", "--kv-cache-dtype", "fp8"),
        ("--gpu-memory", "24GiB", "--non-kv-memory", "18GiB"),
        ("--gpu", "H100", "--gpu-memory-utilization", "0.999"),
        ("--fit",),
        ("--gpus",),
        ("--weights", "-pp", "2"),
        ("--gpu", "L4", "--sweep", "max-model-len", "quantization"),
    ],
    ids=" ".join,
)
def test_fits_the_terminal(
    arguments: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output(capsys, "config.json", *arguments)
    assert output.lines
    assert not output.error
    assert [line for line in output.lines if len(line) > WIDTH] == []
    assert [line for line in output.lines if line != line.rstrip()] == []


def test_too_long_a_request_names_the_length_to_type(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(capsys, "config.json", "--gpu", "RTX-4090")
    assert output.code == 1
    assert "DOES NOT START." in output.text
    typed = re.search(r"--max-model-len (\d+)", output.text)
    assert typed is not None
    again = Output(capsys, "config.json", "--gpu", "RTX-4090", "--max-model-len", typed[1])
    assert again.code == 0


def test_a_margin_within_the_doubt_is_not_a_verdict(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Output(capsys, "config.json", "--gpu", "RTX-4090", "--json")
    longest = json.loads(found.text)["longest_length"]
    output = Output(capsys, "config.json", "--gpu", "RTX-4090", "--max-model-len", str(longest))
    assert output.code == 2
    assert "TOO CLOSE TO CALL." in output.text


def test_weights_that_do_not_fit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(capsys, "Qwen/Qwen3-32B", "--gpu", "L4")
    assert output.code == 1
    assert "--fit" in output.text
    assert "vLLM would say: No available memory for the cache blocks" in output.text


def test_json_has_the_same_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(Output(capsys, "config.json", "--gpu", "H100", "--json").text)
    text = Output(capsys, "config.json", "--gpu", "H100")
    assert document["feasible"] is True
    assert f"{document['num_blocks']:,}" == text.value("blocks")
    assert document["memory_per_gpu"][0]["weight_bytes"] == 16_060_522_496
    assert document["kv_bytes_per_token"] == 131072
    assert document["gpu"]["total_source"] == "seen in public logs"
    assert {change["change"] for change in document["changes"]} > {"--enforce-eager"}
    assert [each["fits"] for each in document["decode_estimate"]] == [True] * len(document["decode_estimate"])


def test_every_flag_of_the_arithmetic_is_an_option(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(NAMES) == {field.name for field in fields(Flags)} - {"model"}
    output = Output(
        capsys,
        "config.json",
        "--gpu",
        "H100",
        "--no-enable-prefix-caching",
        "--max-model-len",
        "8k",
        "--hf-overrides",
        '{"num_hidden_layers": 16}',
        "--json",
    )
    document = json.loads(output.text)
    assert document["flags"] == {
        "max_model_len": 8000,
        "enable_prefix_caching": False,
        "hf_overrides": {"num_hidden_layers": 16},
    }
    assert document["kv_bytes_per_token"] == 65536


def test_count_is_tensor_parallelism_unless_said_otherwise(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = json.loads(Output(capsys, "config.json", "--gpu", "L4", "--count", "2", "--json").text)
    assert two["flags"] == {"tensor_parallel_size": 2}
    spare = Output(capsys, "config.json", "--gpu", "L4", "--count", "4", "-tp", "2")
    assert "the other 2 of 4 cards stay free" in spare.text
    short = Output(capsys, "config.json", "--gpu", "L4", "--count", "2", "-tp", "4")
    assert short.code == 2
    assert "ask for 4 GPUs" in short.error


def test_sweep_has_a_row_for_each_combination(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(
        capsys,
        "config.json",
        "--gpu",
        "L4",
        "--sweep",
        "max-model-len=8k,131072",
        "tensor-parallel-size=1,2,3",
        "quantization=none,fp8",
        "--json",
    )
    rows = json.loads(output.text)
    assert output.code == 0
    assert len(rows) == 12
    assert rows[0]["flags"] == {"max_model_len": 8000, "tensor_parallel_size": 1, "quantization": None}
    assert [row["feasible"] for row in rows if row["flags"]["tensor_parallel_size"] == 1] == [
        True,
        True,
        False,
        False,
    ]
    refused = [row for row in rows if row["flags"]["tensor_parallel_size"] == 3]
    assert all("divisible" in row["reason"] for row in refused)


def test_sweep_of_names_has_usual_values(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(
        capsys, "config.json", "--gpu", "H100", "--sweep", "tensor-parallel-size,kv-cache-dtype", "--json"
    )
    assert len(json.loads(output.text)) == 8


def test_sweep_without_a_start_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(capsys, "config.json", "--gpu", "T4", "--sweep", "max-model-len=131072,65536")
    assert output.code == 1
    assert all(line.endswith(" x") for line in output.lines[1:3])


def test_fit_names_the_fewest_cards(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(Output(capsys, "Qwen/Qwen3-32B", "--fit", "--json").text)
    counts = {each["label"]: each["count"] for each in found}
    assert set(counts) == {gpu.label for gpu in GPUS}
    assert (counts["H200"], counts["H100"], counts["L4"]) == (1, 2, 8)
    one = Output(capsys, "Qwen/Qwen3-32B", "--fit", "--gpu", "L4")
    assert one.code == 0
    assert len([line for line in one.lines if line.startswith("L4")]) == 1


def test_weights_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(capsys, "config.json", "--weights", "-pp", "2", "--json")
    assert output.code == 0
    document = json.loads(output.text)
    assert sum(document["weight_bytes"]) == 16_060_522_496
    assert document["basis"] == "exact"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "which model"),
        (("config.json",), "which card"),
        (("config.json", "--gpu", "A100"), "A100-40GB or A100-80GB"),
        (("config.json", "--gpu", "H10O"), "H100"),
        (("config.json", "--gpu-memory", "80"), "say the unit"),
        (("config.json", "--gpu-memory", "much"), "not a size"),
        (("config.json", "--gpu-memory", "0GiB"), "not a size above 0"),
        (("config.json", "--gpu", "H100", "--max-model-len", "long"), "max-model-len"),
        (("config.json", "--gpu", "H100", "--sweep", "speed=1"), "speed"),
        (("config.json", "--gpu", "H100", "--sweep", "block-size"), "give its values"),
        (("config.json", "--gpu", "H100", "--sweep", "max-num-seqs=1,few"), "max-num-seqs"),
        (("meta-llama/Llama-3.1-8B", "--gpu", "H100"), "nothing is downloaded"),
        (("/no/such/directory", "--gpu", "H100"), "does not exist"),
        (("broken.json", "--gpu", "H100"), "not JSON"),
        (("list.json", "--gpu", "H100"), "no JSON object"),
        (("other.json", "--gpu", "H100"), "nobody_knows"),
        (("empty.json", "--gpu", "H100"), "kvwatch: empty.json: model_type is missing"),
        (("--batch", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_wrong_input_says_what_is_wrong(
    arguments: tuple[str, ...], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "broken.json").write_text("{")
    (here / "list.json").write_text("[]")
    (here / "empty.json").write_text("{}")
    unreadable = {"architectures": ["NobodysModel"], "model_type": "nobodys", "num_hidden_layers": 4}
    (here / "other.json").write_text(json.dumps({**unreadable, "layer_types": ["nobody_knows"] * 4}))
    output = Output(capsys, *arguments)
    assert output.code == 2
    assert said in output.error
    assert output.error.count("\n") == 1
    assert not output.text


def test_what_vllm_refuses_does_not_start(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(capsys, "config.json", "--gpu", "H100", "--max-model-len", "200000")
    assert output.code == 1
    assert "greater than the derived max_model_len" in output.error


# --- batches --------------------------------------------------------------------------------------------


def row(name: str = "config", **flags: Any) -> dict[str, Any]:
    return {
        "name": name,
        "config": f"{name}.json",
        "gpu": "H100-80GB",
        "vllm_version": "0.32.0",
        "flags": {"dtype": "auto", "kv_cache_dtype": "auto", **flags},
        "cases": [{"available_bytes": size * GIB} for size in (1, 4, 40)],
        "source": "ignored",
    }


def test_batch_answers_each_row(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(), row(tensor_parallel_size=3), row(max_model_len=8192)]
    (here / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    output = Output(capsys, "--batch", "rows.jsonl", "--configs", ".")
    first, refused, short = map(json.loads, output.lines)
    assert output.code == 0
    assert first["bytes_per_block"] == 2 * 1024 * 1024
    assert first["blocks_per_max_len_request_by_group"] == [8192]
    assert [case.get("raises") for case in first["cases"]] == ["kv_needed_gt_available"] * 2 + [None]
    assert first["cases"][2]["num_blocks"] == 20480
    assert first["cases"][2]["max_concurrency"] == 2.5
    assert first["cases"][0]["estimated_max_model_len"] == 511 * 16
    assert refused["refused"] == "indivisible_heads"
    assert short["needed_bytes_for_max_model_len"] == GIB


def test_bad_row_costs_only_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        json.dumps(row()),
        "{not json",
        json.dumps(row("absent")),
        json.dumps(row() | {"flags": {"tensor_parallel_size": "many"}}),
        json.dumps(row() | {"cases": [{}]}),
        json.dumps([1]),
        json.dumps(row() | {"config": "../config.json"}),
        "",
        json.dumps(row()),
    ]
    (here / "rows.jsonl").write_text("\n".join(lines))
    output = Output(capsys, "--batch", "rows.jsonl", "--configs", ".")
    answers = [json.loads(line) for line in output.lines]
    assert output.code == 2
    assert [answer.get("line") for answer in answers] == [None, 2, 3, 4, 5, 6, 7, None]
    assert all(f"line {answer['line']}: " in answer["error"] for answer in answers[1:-1])
    assert "tensor_parallel_size" in answers[3]["error"]
    assert answers[0] == answers[-1]


@pytest.mark.parametrize("packed", [True, False])
def test_batch_from_standard_input(
    packed: bool, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (json.dumps(row()) + "\n").encode()
    given = io.BytesIO(gzip.compress(content) if packed else content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given))
    output = Output(capsys, "--batch", "-", "--configs", ".")
    assert json.loads(output.text)["name"] == "config"


def test_batch_of_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"name": "config", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pp_stage": 1},
        {"name": "config", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "dtype": "float32"},
        {"name": "config", "tensor_parallel_size": 1, "pp_stage": 3},
    ]
    (here / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    output = Output(capsys, "--weights", "--batch", "rows.jsonl", "--configs", ".")
    stage, whole, bad = map(json.loads, output.lines)
    assert whole["weight_bytes"][1] == 2 * stage["weight_bytes"]
    assert sum(whole["weight_bytes"]) == pytest.approx(16_060_522_496, rel=0.001)
    assert bad["line"] == 3
    assert output.code == 2


def test_two_thousand_rows_take_less_than_thirty_seconds(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = shared_dir()
    if shared is None:
        pytest.skip("no shared vectors next to the repository")
    vectors = shared / "vectors"
    began = time.monotonic()
    output = Output(
        capsys,
        "--batch",
        str(vectors / "startup_planning.jsonl.gz"),
        "--configs",
        str(vectors / "configs"),
    )
    assert time.monotonic() - began < 30
    assert output.code == 0
    assert len(output.lines) == 1988


EXAMPLES = [
    line.strip().removeprefix("kvwatch ") for line in EPILOG.splitlines() if line.startswith("  kvwatch ")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_runs(example: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "DIR").mkdir()
    (here / "DIR" / "config.json").write_text((here / "config.json").read_text())
    (here / "plans.jsonl").write_text(json.dumps(row()) + "\n")
    command, *arguments = shlex.split(example)
    assert command == "plan"
    output = Output(capsys, *arguments)
    assert output.code == 0, output.error
    assert output.lines


def test_examples_are_found() -> None:
    assert len(EXAMPLES) >= 6


def test_a_model_without_kv_cache_is_only_weighed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields_ = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522}
    bert = {"architectures": ["BertModel"], "model_type": "bert", "intermediate_size": 3072, **fields_}
    (here / "config.json").write_text(json.dumps({**bert, "max_position_embeddings": 512}))
    output = Output(capsys, "config.json", "--gpu", "L4")
    assert output.code == 0
    assert "KV cache: this model has none" in output.text
    assert "one change" not in output.text
    assert "Decoding" not in output.text

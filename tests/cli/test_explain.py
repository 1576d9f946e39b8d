"""`kvwatch explain` on the command line: exit codes, text, JSON."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwatch.cli import explain
from tests.support import ROOT

SAMPLES = [
    json.loads(line) for line in (ROOT / "tests/vectors/public/error_samples.jsonl").read_text().splitlines()
]
NEEDED = (
    "(EngineCore pid=379) ERROR 01-28 00:18:18 [core.py:935] ValueError: To serve at least one request with "
    "the models's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV "
    "cache memory (5.0 GiB). Based on the available memory, the estimated maximum model length is 40960. Try"
)
LOG = f"""\
INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
{NEEDED}
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'Core': 1}}
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def command(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    explain.add_parser(parser.add_subparsers())
    args = parser.parse_args(["explain", *argv])
    code = args.run(args)
    assert isinstance(code, int)
    return code


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    return path


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one line that was printed."""
    (line,) = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["id"])
def test_sample_as_json(sample: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "line.log"
    path.write_text(sample["text"] + "\n")
    failure = not sample["kind"].startswith(("info_", "warn_"))
    assert command("--json", str(path)) == (1 if failure else 0)
    answer = as_json(capsys)
    assert answer["kind"] == (sample["kind"] if failure else None)
    assert sample.get("numbers", {}).items() <= answer["numbers"].items()


def test_text(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(log)) == 1
    text = capsys.readouterr().out
    assert text.startswith("One request of 131072 tokens does not fit into the KV cache.\n")
    assert "  1. --max-model-len 40960\n" in text
    assert "What does not help:" in text
    assert "From line 2 (EngineCore), vLLM 0.32.0: ValueError: To serve" in text


def test_json_tells_root_cause_and_consequences(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--json", str(log)) == 1
    answer = as_json(capsys)
    assert answer["kind"] == "kv_needed_gt_available"
    assert answer["version"] == "0.32.0"
    assert [(failure["kind"], failure["root_cause"]) for failure in answer["failures"]] == [
        ("kv_needed_gt_available", True),
        ("engine_core_init_failed", False),
    ]
    assert answer["failures"][0]["line"] == 2
    assert answer["failures"][1]["numbers"] == {"failed_procs": {"Core": 1}}
    assert answer["remedies"][0]["arguments"] == ["--max-model-len", "40960"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(LOG.encode())))
    assert command("--json") == 1
    assert as_json(capsys)["kind"] == "kv_needed_gt_available"


def test_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fine.log"
    path.write_bytes(b"INFO:     Application startup complete.\n\xff\xfe not text\n")
    assert command(str(path)) == 0
    assert capsys.readouterr().out == "The log shows a server that started.\n"
    assert command("--json", str(path)) == 0
    assert as_json(capsys)["kind"] is None


def test_empty_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.log"
    path.touch()
    assert command("--json", str(path)) == 0
    answer = as_json(capsys)
    assert (answer["kind"], answer["numbers"], answer["failures"]) == (None, {}, [])


def test_each_line(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.open("a") as stream:
        stream.write(
            "(Worker pid=1) INFO 01-01 00:00:00 [w.py:1] Available KV cache memory: 2.30 GiB\nhello\n"
        )
    assert command("--json", "--each-line", str(log)) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["kind"] for row in rows] == [
        None,
        "kv_needed_gt_available",
        "engine_core_init_failed",
        None,
        None,
    ]
    assert rows[3] == {"line": 4, "kind": None, "information": "info_kv_avail", "numbers": {"gib": 2.3}}
    assert rows[4] == {"line": 5, "kind": None, "numbers": {}}


def test_each_line_of_a_fine_log(tmp_path: Path) -> None:
    path = tmp_path / "fine.log"
    path.write_text("hello\n")
    assert command("--json", "--each-line", str(path)) == 0


def test_each_line_is_for_programs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--each-line", str(log)) == 2
    assert "--json" in capsys.readouterr().err


def test_a_line_without_end_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.log"
    path.write_text("x" * 1_000_000 + "\n" + NEEDED + "\n")
    assert command("--json", "--each-line", str(path)) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == [None, "kv_needed_gt_available"]


@pytest.mark.parametrize("directory", [False, True])
def test_against_the_model(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], directory: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    place = tmp_path if directory else tmp_path / "config.json"
    assert command("--json", "--config", str(place), str(log)) == 1
    checks = as_json(capsys)["checks"]
    assert checks[0] == "Agrees: 131072 tokens need 16.00 GiB by the arithmetic, 16.00 GiB by the log."
    assert command("--json", "--model", str(tmp_path), str(log)) == 1
    assert as_json(capsys)["checks"] == checks
    assert command("--config", str(place), str(log)) == 1
    assert "Checked against the model:\n  - Agrees: 131072 tokens" in capsys.readouterr().out


def test_unreadable_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing.log", tmp_path):
        assert command(str(path)) == 2
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("content", ["not json", "[]", None])
def test_unreadable_model(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert command("--config", str(path), str(log)) == 2
    captured = capsys.readouterr()
    assert str(path) in captured.err
    assert captured.out == ""


def test_model_that_is_not_here(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--model", str(tmp_path / "nowhere"), str(log)) == 2
    assert "nowhere" in capsys.readouterr().err


def test_release_of_the_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "v.log"
    path.write_text("ValueError: No available memory for the cache blocks.\n")
    assert command("--vllm-version", "0.8.5", str(path)) == 1
    assert "before 0.9.2" in capsys.readouterr().out

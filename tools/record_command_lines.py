r"""Record how vLLM's own parser reads random command lines, as vectors for kvwatch's.

Run with the interpreter of a vLLM installation (see tools/install_vllm.sh):

    $KVWATCH_VLLM_VENV/bin/python tools/record_command_lines.py [COUNT [SEED]] \
        > tests/observe/command_lines.jsonl

The first line holds the defaults. Each other one is a case: ``argv`` after ``vllm serve``, ``config`` the
entries of its --config file if any, and ``changed`` the parsed values that differ from the defaults. Command
lines that vLLM refuses are left out, and so are values that are no JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIG_NAME = "serve.yaml"
"""How the recorded command lines name their --config file."""

LEFT_OUT = frozenset({"config", "api_key", "hf_token", "lora_modules", "subparser"})

VALUES: dict[str, list[str]] = {
    "api-key": ["secret-key-1", "secret-key-2"],
    "api-server-count": ["0", "2"],
    "block-size": ["16", "128"],
    "chat-template": ["x y", "-x y", "template.jinja"],
    "compilation-config": ['{"mode": 3}'],
    "cpu-offload-gb": ["4", "1.5"],
    "cudagraph-capture-sizes": ["1", "2", "4"],
    "data-parallel-size": ["3"],
    "decode-context-parallel-size": ["2"],
    "device-ids": ["0,1", "2"],
    "download-dir": ["/weights"],
    "dtype": ["auto", "half", "bfloat16"],
    "gpu-memory-utilization": ["0.9", "0.5", "1"],
    "hf-config-path": ["/configs/other"],
    "hf-overrides": ['{"rope_scaling": {"factor": 2}}', '{"text_config": {"max_position_embeddings": 8}}'],
    "hf-token": ["hf_secret"],
    "host": ["0.0.0.0", "::1", "None"],
    "kv-cache-dtype": ["fp8", "auto"],
    "kv-cache-dtype-skip-layers": ["0", "1", "sliding_window"],
    "kv-cache-memory-bytes": ["8M", "1g", "123"],
    "kv-offloading-size": ["2"],
    "load-format": ["dummy"],
    "logits-processors": ["x", "y"],
    "lora-modules": ["a=b"],
    "mamba-block-size": ["16"],
    "mamba-cache-dtype": ["float32"],
    "mamba-cache-mode": ["align", "none"],
    "mamba-ssm-cache-dtype": ["float32"],
    "max-model-len": ["4096", "4k", "4K", "auto", "-1", "1.5k"],
    "max-num-batched-tokens": ["2048", "8k"],
    "max-num-seqs": ["8"],
    "num-gpu-blocks-override": ["100", "None"],
    "performance-mode": ["throughput"],
    "pipeline-parallel-size": ["2"],
    "port": ["8001", "9000"],
    "prefill-context-parallel-size": ["2"],
    "quantization": ["fp8", "None"],
    "revision": ["abc"],
    "seed": ["1", "-1"],
    "served-model-name": ["a", "b", "c d"],
    "spec-method": ["mtp"],
    "spec-model": ["draft/model"],
    "spec-tokens": ["2"],
    "speculative-config": ['{"method":"mtp","num_speculative_tokens":1}', '{"model": "a b"}'],
    "ssl-certfile": ["cert.pem"],
    "ssl-keyfile": ["key.pem"],
    "tensor-parallel-size": ["2", "4"],
    "tokenizer": ["other/tokenizer"],
    "uds": ["/tmp/x.sock"],
    "watermark": ["0.5"],
}
DOTTED = [
    (["--hf-overrides", "--hf_overrides"], [".a_b", ".a-b.c", ".rope.factor"], ["1", "x", "4k", '{"z": 1}']),
    (["--hf-overrides"], [".layers+"], ["1,2", "x"]),
    (["--speculative-config", "-sc"], [".method", ".num-x"], ["mtp", "2"]),
    (["--compilation-config", "-cc"], [".mode"], ["3"]),
]
ENTRIES: list[tuple[str, Any]] = [
    ("max-model-len", 4096),
    ("max_num_seqs", 16),
    ("gpu-memory-utilization", 0.8),
    ("enable-prefix-caching", False),
    ("enforce-eager", True),
    ("trust_remote_code", False),
    ("served-model-name", ["from-file", "too"]),
    ("quantization", None),
    ("hf-overrides", {"a": {"b": 1}}),
    ("kv-cache-memory-bytes", "2G"),
    ("model", "file/model"),
    ("api-key", "secret-in-file"),
]


class Recorder:
    """Random command lines and vLLM's reading of them."""

    def __init__(self, seed: int) -> None:
        utils = importlib.import_module("vllm.utils.argparse_utils")
        arguments = importlib.import_module("vllm.entrypoints.launchers.cli_args")
        self.parser = utils.FlexibleArgumentParser()
        serve = self.parser.add_subparsers(dest="subparser").add_parser("serve")
        arguments.make_arg_parser(serve)
        self.options = {name: action for action in serve._actions for name in action.option_strings}
        self.random = random.Random(seed)
        self.defaults = vars(self.parser.parse_args(["serve"]))

    def record(self) -> dict[str, Any] | None:
        """One case, or None where vLLM refuses it."""
        config = dict(self.random.sample(ENTRIES, self.random.randint(1, 5))) if self._chance(0.2) else {}
        argv = self._command_line(in_file="model" in config)
        if config:
            argv = self._insert_config(argv, self.random.randint(min(1, len(argv)), len(argv)))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, CONFIG_NAME)
            file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
            real = [str(file) if word == CONFIG_NAME else word for word in argv]
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    parsed = vars(self.parser.parse_args(["serve", *real]))
            except (SystemExit, ValueError, AssertionError):
                return None
        changed = _plain({key: value for key, value in parsed.items() if value != self.defaults[key]})
        return {"argv": argv, **({"config": config} if config else {}), "changed": changed}

    def _insert_config(self, argv: list[str], at: int) -> list[str]:
        """Between two flags: a --config inside of a list of values would end it."""
        while at < len(argv) and not argv[at].startswith("-"):
            at += 1
        return [*argv[:at], "--config", CONFIG_NAME, *argv[at:]]

    def _command_line(self, *, in_file: bool) -> list[str]:
        groups = [self._flag() for _ in range(self.random.randint(0, 7))]
        words = [word for group in groups for word in group]
        if self._chance(0.2) and not in_file:
            return [*words, "--model", "org/model"]
        return words if in_file and self._chance(0.5) else ["org/model", *words]

    def _flag(self) -> list[str]:
        if self._chance(0.15):
            heads, keys, values = self.random.choice(DOTTED)
            written = self.random.choice(heads) + self.random.choice(keys)
            return self._joined(written, self.random.choice(values))
        if self._chance(0.05):
            return self.random.choice([["-O3"], ["-O", "2"], ["-O=1"]])
        if self._chance(0.3):
            switches = [name for name, action in self.options.items() if action.nargs == 0]
            return [
                self._spell(self.random.choice([s for s in switches if s not in ("--help", "-h", "--grpc")]))
            ]
        name = self.random.choice(list(VALUES))
        written = self._spell(f"--{name}")
        if self.options[f"--{name}"].nargs == "+":
            return [written, *self.random.sample(VALUES[name], self.random.randint(1, len(VALUES[name])))]
        return self._joined(written, self.random.choice(VALUES[name]))

    def _joined(self, written: str, value: str) -> list[str]:
        return [f"{written}={value}"] if self._chance(0.4) else [written, value]

    def _spell(self, name: str) -> str:
        same = [other for other, action in self.options.items() if action is self.options[name]]
        short = [other for other in same if not other.startswith("--")]
        spellings = [name, name[:2] + name[2:].replace("-", "_"), *short]
        for length in range(4, len(name)):
            if sum(other.startswith(name[:length]) for other in self.options) == 1:
                spellings.append(name[: self.random.randint(length, len(name))])
                break
        spelling: str = self.random.choice(spellings)
        return spelling

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name not in LEFT_OUT}
    return {
        name: value
        for name, value in kept.items()
        if isinstance(value, str | int | float | list | dict | None)
    }


def main() -> None:
    """Print the cases."""
    logging.disable(logging.CRITICAL)
    count, seed = (
        int(sys.argv[1]) if len(sys.argv) > 1 else 300,
        int(sys.argv[2]) if len(sys.argv) > 2 else 1,
    )
    recorder = Recorder(seed)
    print(json.dumps({"defaults": _plain(recorder.defaults)}))
    recorded = 0
    while recorded < count:
        case = recorder.record()
        if case is not None:
            print(json.dumps(case))
            recorded += 1


if __name__ == "__main__":
    main()

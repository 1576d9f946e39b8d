"""Command lines as vLLM's parser read them, held against kvwatch's. See tools/record_command_lines.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvwatch.blockmath.flags import Flags
from kvwatch.observe.command_line import parse_command_line


def read_cases(text: str) -> list[dict[str, Any]]:
    """The lines of a recording: the defaults, then the cases."""
    return [json.loads(line) for line in text.splitlines()]


def check(case: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Assert that kvwatch reads one command line as vLLM did."""
    theirs: Mapping[str, Any] = {**defaults, **case["changed"]}
    files = {"serve.yaml": json.dumps(case.get("config"))}
    line = parse_command_line(["serve", *case["argv"]], read_file=files.__getitem__)
    assert (line.failures, line.unknown_flags) == ((), ())
    ours = line.flags.given()
    model = theirs["model_tag"] or case["changed"].get("model")
    assert ours.pop("model", None) == model
    assert ours.pop("speculative_config", None) == speculative_config(theirs)
    for name in {entry.name for entry in fields(Flags)} & theirs.keys() - {"model", "speculative_config"}:
        value = ours.get(name, defaults[name])
        assert (list(value) if isinstance(value, tuple) else value) == theirs[name], name
    for name in ("port", "host", "uds", "revision", "download_dir", "hf_config_path"):
        assert getattr(line, name) == theirs[name], name
    assert line.tls == bool(theirs["ssl_keyfile"] or theirs["ssl_certfile"])
    assert line.headless == (theirs["headless"] or theirs["api_server_count"] == 0)
    assert line.device_ids == (tuple(map(str, theirs["device_ids"])) if theirs["device_ids"] else None)
    assert list(line.served_names) == (theirs["served_model_name"] or ([model] if model else []))
    assert "secret" not in repr(line)


def speculative_config(parsed: Mapping[str, Any]) -> dict[str, Any] | None:
    """vLLM lays the short flags over the object when it builds its configuration."""
    config = {name.replace("-", "_"): value for name, value in (parsed["speculative_config"] or {}).items()}
    for flag, key in (("method", "method"), ("model", "model"), ("tokens", "num_speculative_tokens")):
        if parsed[f"spec_{flag}"] is not None:
            config[key] = parsed[f"spec_{flag}"]
    return config or None

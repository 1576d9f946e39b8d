"""Flags written into any kind of launch file read back as the same flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwatch.blockmath.flags import Flags
from tests.observe.nextstart_server import RunningServer, launch_file

TEXT = st.text(
    st.characters(
        codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="\u0085\u2028\u2029\ufeff"
    ),
    min_size=1,
    max_size=20,
).filter(lambda text: not text.startswith("-") and text not in ("None", "serve") and text.strip() == text)
"""As an argument could be; a flag's look is taken for a flag by vLLM as well."""

FLAGS = st.builds(
    Flags,
    model=TEXT,
    max_model_len=st.none() | st.integers(1, 10**7) | st.just(-1),
    gpu_memory_utilization=st.none() | st.floats(0.01, 1.0),
    kv_cache_memory_bytes=st.none() | st.integers(1, 2**40),
    quantization=st.none() | TEXT,
    hf_overrides=st.none() | st.dictionaries(TEXT, TEXT | st.integers(0, 9), min_size=1, max_size=2),
    enforce_eager=st.sampled_from([None, True]),
    enable_prefix_caching=st.none() | st.booleans(),
    max_num_seqs=st.none() | st.integers(1, 4096),
)


def arguments(flags: Flags) -> list[str]:
    """The command line that says these flags."""
    words = ["vllm", "serve"]
    for name, value in flags.given().items():
        option = name.replace("_", "-")
        match value:
            case True | False:
                words.append(f"--{option}" if value else f"--no-{option}")
            case dict():
                words += [f"--{option}", json.dumps(value)]
            case _:
                words += [f"--{option}", str(value)]
    return words


def systemd(words: Sequence[str]) -> str:
    def quoted(word: str) -> str:
        escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$").replace("%", "%%")
        return f'"{escaped}"'

    return "[Service]\nExecStart=/usr/bin/env " + " \\\n  ".join(map(quoted, words)) + "\n"


def script(words: Sequence[str]) -> str:
    return "#!/bin/sh\nexec " + " \\\n  ".join(map(shlex.quote, words)) + "\n"


def script_with_variables(words: Sequence[str]) -> str:
    lines = [f"V{number}={shlex.quote(word)}" for number, word in enumerate(words[2:])]
    uses = " ".join(f'"${{V{number}}}"' for number in range(len(words) - 2))
    return "\n".join([*lines, f"exec vllm serve {uses}", ""])


def compose_list(words: Sequence[str]) -> str:
    command = [word.replace("$", "$$") for word in words[2:]]
    return yaml.safe_dump({"services": {"chat": {"image": "vllm/vllm-openai:v0.20.0", "command": command}}})


def compose_text(words: Sequence[str]) -> str:
    command = shlex.join(words).replace("$", "$$")
    return yaml.safe_dump({"services": {"chat": {"image": "mine", "command": command}}})


def kubernetes(words: Sequence[str]) -> str:
    escaped = [word.replace("$", "$$") for word in words]
    one = {"name": "vllm", "image": "mine", "command": escaped[:2], "args": escaped[2:]}
    return yaml.safe_dump({"kind": "Pod", "metadata": {"name": "chat"}, "spec": {"containers": [one]}})


def kubernetes_shell(words: Sequence[str]) -> str:
    text = shlex.join(words).replace("$", "$$")
    one = {"name": "vllm", "command": ["sh", "-c", f"exec {text}"]}
    return yaml.safe_dump({"kind": "Pod", "metadata": {"name": "chat"}, "spec": {"containers": [one]}})


FORMATS: Mapping[str, tuple[str, Callable[[Sequence[str]], str]]] = {
    "systemd": ("chat.service", systemd),
    "script": ("start.sh", script),
    "script with variables": ("start.sh", script_with_variables),
    "compose, list": ("compose.yaml", compose_list),
    "compose, text": ("compose.yaml", compose_text),
    "Kubernetes": ("pod.yaml", kubernetes),
    "Kubernetes, shell": ("pod.yaml", kubernetes_shell),
}


@given(FLAGS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_format_says_the_same(tmp_path: Path, flags: Flags) -> None:
    server = RunningServer(tmp_path)
    read: dict[str, Any] = {}
    for name, (file, rendered) in FORMATS.items():
        path = tmp_path / file
        path.write_text(rendered(arguments(flags)), encoding="utf-8")
        read[name] = server.known(launch_file(path)).flags
    assert read == dict.fromkeys(FORMATS, flags)


@given(FLAGS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_config_file_says_the_same(tmp_path: Path, flags: Flags) -> None:
    server = RunningServer(tmp_path, "--config", "/c.yaml")
    given_flags = {
        name: value for name, value in flags.given().items() if value is not False and name != "model"
    }
    server.write(
        "c.yaml", yaml.safe_dump({name.replace("_", "-"): value for name, value in given_flags.items()})
    )
    assert server.flags() == given_flags

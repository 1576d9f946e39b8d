"""Whatever a launch file holds, the answer is a next start or the reason why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwatch.observe.records import Failure, NextStart
from tests.observe.nextstart_server import RunningServer, launch_file

ANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

PIECES = st.sampled_from(
    [
        *(
            "vllm",
            "serve",
            "m",
            "--max-model-len",
            "8k",
            "=",
            "A",
            "A=",
            "A+=(",
            "export ",
            "$A",
            "${A:-x}",
            "${",
        ),
        *(
            "$(",
            ")",
            "(",
            "{",
            "}",
            "`",
            "'",
            '"',
            "\\",
            "\n",
            " ",
            "  ",
            ";",
            "&&",
            "||",
            "|",
            ">",
            "<<E",
            "E\n",
        ),
        *(
            "if ",
            "then ",
            "fi",
            "for ",
            "in ",
            "do ",
            "done",
            "case ",
            "esac",
            "source x",
            "cd ..",
            "read A",
            "#",
        ),
        *(
            "[Service]\n",
            "ExecStart=",
            "Environment=",
            "EnvironmentFile=-",
            "%i",
            "%",
            "\\x41",
            "\\x",
            "@",
            "-",
            ":",
        ),
        *(
            "services:\n",
            "  chat:\n",
            "    command: ",
            "    image: vllm/vllm-openai\n",
            "&a ",
            "*a",
            "<<: ",
            "[",
            "]",
        ),
        *(
            "docker run ",
            "-e ",
            "env ",
            "sh -c ",
            "bash",
            "--config",
            "/c.yaml",
            "a.b",
            "--",
            "-O3",
            "é",
            "\u2028",
        ),
    ]
)
WORDS = st.sampled_from(
    ["vllm", "serve", "m", "--max-model-len", "8", "$A", "$(A)", "$$", "sh", "-c", "vllm serve $A"]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
SERVICE = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("image", "command", "entrypoint", "environment", "env_file", "working_dir", "extends"), JSON
    ),
)
CONTAINER = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("name", "image", "command", "args", "env", "envFrom", "workingDir"), JSON),
)


def answer(folder: Path, name: str, text: str) -> NextStart | Failure:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return RunningServer(folder).next(launch_file(path))


@pytest.mark.parametrize("name", ["chat.service", "start.sh", "chat.yaml"])
@given(pieces=st.lists(PIECES, max_size=40))
@ANY
def test_any_text(tmp_path: Path, name: str, pieces: list[str]) -> None:
    start = "[Service]\nExecStart=" if name == "chat.service" else ""
    assert isinstance(answer(tmp_path, name, start + "".join(pieces)), NextStart | Failure)


@given(
    document=JSON
    | st.fixed_dictionaries({"services": JSON | st.dictionaries(WORDS, JSON | SERVICE, max_size=2)})
)
@ANY
def test_any_compose_document(tmp_path: Path, document: Any) -> None:
    assert isinstance(answer(tmp_path, "c.yaml", json.dumps(document)), NextStart | Failure)


@given(containers=st.lists(CONTAINER | JSON, max_size=3), metadata=JSON, kind=JSON)
@ANY
def test_any_manifest(tmp_path: Path, containers: Any, metadata: Any, kind: Any) -> None:
    document = {"kind": kind, "metadata": metadata, "spec": {"containers": containers}, "items": containers}
    assert isinstance(answer(tmp_path, "p.yaml", json.dumps(document)), NextStart | Failure)

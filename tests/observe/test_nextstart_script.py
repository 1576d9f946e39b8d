"""Shell scripts as a shell would run them, checked against one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvwatch.blockmath.errors import Unsupported
from kvwatch.observe.nextstart_command import StartCommand, sole_server

BASH = shutil.which("bash")

KNOWN = {
    "one line": "vllm serve m --max-model-len 4096",
    "continued": "vllm serve m \\\n  --max-model-len \\\n  4096 # the end\n",
    "continued before anything": "\\\n  vllm serve m --a",
    "exec and redirections": "exec vllm serve m --a >>/dev/null 2>&1 </dev/null",
    "background": "vllm serve m --a & wait",
    "pipe": "vllm serve m --a | cat",
    "quotes": """vllm serve "m x" 'a "b" $c' "it's \\$5 \\\\ \\"q\\" \\a" a\\ b ''""",
    "json": """vllm serve m --hf-overrides '{"a": {"b": [1, 2]}}' --x "{\\"k\\": \\"v w\\"}" """,
    "joined pieces": """vllm serve m --a=1"2 3"'4 5'6""",
    "hash within a word": "vllm serve m#1 --a",
    "variables": 'LEN=4096\nMODEL="org/name"\nexport Q=fp8\nvllm serve "$MODEL" --l ${LEN} -q$Q --x="${Q}x"',
    "split where unquoted": 'ARGS="--a 1  --b"\nvllm serve m $ARGS "$ARGS" x${ARGS}y',
    "empty words": "E=\nvllm serve m $E '' \"$E\" x",
    "defaults": 'vllm serve m --a ${A:-1} ${B-2 3} "${C:=4 5}" $C ${D:+no} ${C:+yes} ${C:-z}',
    "nested default": 'B=7\nvllm serve m ${A:-$B} "${A:-${B}x}"',
    "appended": 'A="--x"\nA+=" --y"\nA="$A --z"\nvllm serve m $A',
    "array": 'A=(--a 1 "b c")\nA+=(--d)\nvllm serve m "${A[@]}" --e',
    "array over lines": "A=(\n  --a 1  # one\n  --b\n)\nvllm serve m ${A[@]}",
    "set by colon": ': "${P:=8001}"\nvllm serve m --port $P',
    "set and traps before": "#!/bin/bash\nset -eu\ntrap 'echo bye' EXIT\numask 077 || true\nvllm serve m",
    "loop around": "while true; do\n  vllm serve m --a 1\n  break\ndone",
    "in a function": "start() {\n  vllm serve m --a 1\n}\nstart",
    "in braces and subshell": "{ (vllm serve m --a 1); }",
    "here-document before": "cat <<EOF >/dev/null\nvllm serve other 'unclosed\nEOF\nvllm serve m --a",
    "here-string": "cat <<<'x y' >/dev/null\nvllm serve m --a",
    "comment and echo": "# vllm serve other\necho vllm serve other >&2\nvllm serve m --a",
    "and or": "true && vllm serve m --a || echo failed",
    "own environment": "A=1 B='2 3' vllm serve m --a",
    "env": "env -u X A=1 vllm serve m --a",
    "command in an if": "if true; then vllm serve m --a; fi",
    "case around": "case x in\n  x) vllm serve m --a ;;\nesac",
    "same value twice": 'L=5\nif true; then L=5; fi\nvllm serve m --l "$L"',
    "dollar alone": "vllm serve m a$ '$' \"$\" \\$x",
    "shell in a shell": "bash -c 'vllm serve m --a \"b c\"'",
    "set after another file": "L=1\neval true\nL=2\nvllm serve m --l $L",
    "brackets and equals": "vllm serve m --a=[1,2] --b={x}",
}


def parsed(text: str, environment: Mapping[str, str] | None = None) -> StartCommand:
    def read(path: str) -> str:
        raise FileNotFoundError(2, "No such file", path)

    return sole_server(text, StartCommand((), environment or {}, cwd="/srv"), read)


@pytest.mark.skipif(BASH is None, reason="no bash")
@pytest.mark.parametrize("case", KNOWN)
def test_a_script_is_read_as_bash_runs_it(case: str, tmp_path: Path) -> None:
    stub = tmp_path / "vllm"
    stub.write_text('#!/bin/sh\nfor word in "$0" "$@"; do printf "%s\\0" "$word" >>"$SEEN"; done\n')
    stub.chmod(0o755)
    seen = tmp_path / "seen"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SEEN": str(seen)}
    subprocess.run(
        [BASH or "", "-c", KNOWN[case]], env=environment, check=True, capture_output=True, timeout=20
    )
    ran = tuple(seen.read_text().split("\0")[:-1])
    assert parsed(KNOWN[case]).argv == ("vllm", *ran[1:])


UNKNOWN = {
    "dynamic_script": {
        "undefined": "vllm serve m --a $A",
        "undefined and quoted": 'vllm serve "$MODEL"',
        "command output": "vllm serve m --tp $(nvidia-smi -L | wc -l)",
        "backquotes": "vllm serve m --tp `nproc`",
        "arithmetic": "vllm serve m --port $((8000 + 1))",
        "arguments": 'vllm serve "$@"',
        "a positional": "vllm serve $1",
        "computed before": "N=$(nproc)\nvllm serve m --tp $N",
        "set under a condition": 'L=1\nif [ -n "$X" ]; then L=2; fi\nvllm serve m --l $L',
        "set after a test": 'L=1\n[ -n "$X" ] && L=2\nvllm serve m --l $L',
        "set in a subshell": "(L=2)\nvllm serve m --l $L",
        "loop variable": "for p in 1 2; do vllm serve m --port $p; done",
        "read": "read L\nvllm serve m --l $L",
        "another file": "L=1\n. ./settings\nvllm serve m --l $L",
        "another file and a default": ". ./settings\nvllm serve m --l ${L:-1}",
        "another file and an array": 'A=(--a)\n. ./settings\nvllm serve m "${A[@]}"',
        "operator on an unknown": "L=$(nproc)\nvllm serve m --l ${L:-1}",
        "eval": 'L=1\neval "$X"\nvllm serve m --l $L',
        "array set under a condition": 'A=(--a)\nif x; then A+=(--b); fi\nvllm serve m "${A[@]}"',
        "substring": "L=123\nvllm serve m --l ${L:1}",
        "indirect": "vllm serve m --l ${!L}",
        "required": "vllm serve m --l ${L:?missing}",
        "ansi quotes": "vllm serve m $'a\\nb'",
    },
    "several_servers": {"two": "vllm serve a --port 1 &\nvllm serve b --port 2"},
    "no_server_command": {
        "none": "echo vllm serve m",
        "empty": "",
        "another program": "python3 serve.py",
        "a program from a variable": "$PYTHON -m vllm.entrypoints.openai.api_server",
    },
    "broken_script": {
        "single quote": "vllm serve 'm",
        "double quote": 'vllm serve "m',
        "brace": "vllm serve ${m",
        "parenthesis": "vllm serve $(m",
    },
}


@pytest.mark.parametrize(
    ("reason", "case"), [(reason, case) for reason, cases in UNKNOWN.items() for case in cases]
)
def test_what_only_a_run_could_tell_is_never_guessed(reason: str, case: str) -> None:
    with pytest.raises(Unsupported) as raised:
        parsed(UNKNOWN[reason][case])
    assert raised.value.reason == reason


def test_the_name_of_what_is_missing_is_told() -> None:
    with pytest.raises(Unsupported, match=r"depend on LEN,"):
        parsed('vllm serve m --max-model-len "$LEN"')


def test_the_callers_environment_counts() -> None:
    found = parsed("vllm serve m --l ${LEN:-1} $X", {"LEN": "8192", "X": "--y"})
    assert found.argv == ("vllm", "serve", "m", "--l", "8192", "--y")


def test_environment_and_working_directory() -> None:
    script = (
        "export CUDA_VISIBLE_DEVICES=2\nLOCAL=1\ncd models\nexport N=$(nproc)\nVLLM_USE_V1=1 vllm serve m"
    )
    found = parsed(script)
    assert found.environment == {"CUDA_VISIBLE_DEVICES": "2", "VLLM_USE_V1": "1"}
    assert found.cwd == "/srv/models"
    assert parsed('cd "$(dirname "$0")"\nvllm serve m').cwd is None


def test_a_python_environment_leaves_variables_alone() -> None:
    assert parsed("L=2\nsource /opt/venv/bin/activate\nvllm serve m --l $L").argv[-1] == "2"


def test_a_container_of_vllms_own_image() -> None:
    found = parsed(
        "docker run --rm --gpus all -e VLLM_USE_V1=1 --env=CUDA_VISIBLE_DEVICES=0 -v /m:/m \\\n"
        "  vllm/vllm-openai:v0.20.1 --model /m --max-model-len 8k"
    )
    assert found.argv == ("vllm", "serve", "--model", "/m", "--max-model-len", "8k")
    assert found.environment == {"VLLM_USE_V1": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert found.image_version == "0.20.1"
    assert parsed("podman run vllm/vllm-openai m").image_version is None


@pytest.mark.parametrize(
    "script",
    [
        "docker run --entrypoint vllm vllm/vllm-openai:v0.20.1 serve m -tp 2",
        "docker run --entrypoint=bash vllm/vllm-openai:v0.20.1 -c 'vllm serve m -tp 2'",
        "docker run --entrypoint '' vllm/vllm-openai:v0.20.1 vllm serve m -tp 2",
        "docker run -e A=1 registry/mine:1 vllm serve m -tp 2",
        "uvx --from vllm==0.20.1 vllm serve m -tp 2",
        "conda run -n chat --no-capture-output vllm serve m -tp 2",
        "poetry run vllm serve m -tp 2",
        "srun --gres=gpu:2 vllm serve m -tp 2",
        "tmux new-session -d -s chat 'vllm serve m -tp 2'",
        "screen -dmS chat vllm serve m -tp 2",
        "su chat -c 'exec vllm serve m -tp 2'",
    ],
)
def test_a_server_behind_what_starts_it(script: str) -> None:
    assert parsed(script).argv == ("vllm", "serve", "m", "-tp", "2")


def test_another_program_in_a_container_is_no_server() -> None:
    for script in ("docker run --entrypoint bash vllm/vllm-openai -c x", "docker exec chat vllm serve m"):
        with pytest.raises(Unsupported) as raised:
            parsed(script)
        assert raised.value.reason == "no_server_command"


@pytest.mark.parametrize(
    "text",
    [
        "$(" * 5000,
        '"$(' * 5000,
        "${a:-" * 5000,
        "a=(" * 5000,
        "<<E\n" * 1000,
        "A=$A$A\n" * 200,
        "export B=1\n" * 5000,
    ],
)
def test_hostile_scripts_end(text: str) -> None:
    with pytest.raises((Unsupported, RecursionError)):
        parsed(f"A=xxxxxxxx\n{text}\nvllm serve $A")

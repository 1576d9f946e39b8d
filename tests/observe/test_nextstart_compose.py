"""Docker compose files, by the Compose specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.observe.nextstart_server import RunningServer, launch_file

OFFICIAL = "image: vllm/vllm-openai:v0.20.0"


@pytest.fixture
def server(tmp_path: Path) -> RunningServer:
    return RunningServer(tmp_path, "--max-model-len", "4096")


def service(*lines: str, name: str = "chat") -> str:
    return "\n".join([f"  {name}:", *(f"    {line}" for line in lines)])


def compose(*services: str) -> str:
    return "\n".join(["services:", *services, ""])


def write(tmp_path: Path, text: str | bytes, name: str = "compose.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "arguments as a list": (
        [OFFICIAL, "command: [--model, /models/m, --max-model-len, '8k', --enforce-eager]"],
        {"max_model_len": 8000, "enforce_eager": True},
    ),
    "arguments as text": (
        [OFFICIAL, "command: >-", "  --model /models/m", "  --quantization 'a b' --max-num-seqs 4"],
        {"quantization": "a b", "max_num_seqs": 4},
    ),
    "numbers and booleans in a list": (
        [OFFICIAL, "command: [/models/m, --max-model-len, 4096, --gpu-memory-utilization, 0.8]"],
        {"max_model_len": 4096, "gpu_memory_utilization": 0.8},
    ),
    "an entry point of its own": (
        ["image: mine", "entrypoint: vllm serve /models/m", "command: --max-model-len 8192"],
        {"max_model_len": 8192},
    ),
    "the whole command": (
        ["image: x", "command: vllm serve m --max-num-seqs 3"],
        {"max_num_seqs": 3},
    ),
    "a shell with the container's variables": (
        [
            "image: mine",
            "entrypoint: [bash, -c]",
            "command: ['exec vllm serve /models/m --max-model-len $$LEN']",
            "environment: {LEN: 8192}",
        ],
        {"max_model_len": 8192},
    ),
    "variables": (
        [
            OFFICIAL,
            "command: --max-model-len ${LEN} --max-num-seqs ${S:-7} -q a$$b${EMPTY-x}${EMPTY:-y}",
        ],
        {"max_model_len": 8192, "max_num_seqs": 7, "quantization": "a$by"},
    ),
    "an anchor merged in": (
        ["<<: &base {image: vllm/vllm-openai}", "command: --max-num-seqs 5"],
        {"max_num_seqs": 5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_command_of_a_service(server: RunningServer, tmp_path: Path, case: str) -> None:
    lines, flags = CASES[case]
    write(tmp_path, "LEN=8192\nEMPTY=\n", ".env")
    path = write(tmp_path, compose(service("image: redis", name="cache"), service(*lines)))
    assert server.known(launch_file(path)).source == "compose"
    assert server.flags(launch_file(path)) == flags


def test_the_release_of_the_image(server: RunningServer, tmp_path: Path) -> None:
    for tag, version in ((":v0.20.0", "0.20.0"), (":v0.19.1-cu130", "0.19.1"), (":latest", None), ("", None)):
        path = write(tmp_path, compose(service(f"image: vllm/vllm-openai{tag}", "command: /models/m")))
        assert server.known(launch_file(path)).version == version
    path = write(tmp_path, compose(service("image: mine/vllm-openai:v0.20.0", "command: /models/m")))
    assert server.known(launch_file(path)).version is None


def test_a_file_that_overrides(server: RunningServer, tmp_path: Path) -> None:
    base = write(
        tmp_path,
        compose(
            service(
                OFFICIAL,
                "command: --max-model-len 1",
                "environment: {VLLM_USE_V1: 1, VLLM_PORT: 0}",
            )
        ),
    )
    over = write(
        tmp_path,
        compose(service("command: --max-model-len 2", "environment: [VLLM_PORT=1]")),
        "o.yml",
    )
    found = server.known(launch_file(base, over))
    assert found.flags.max_model_len == 2
    assert found.environment == {"VLLM_USE_V1": "1", "VLLM_PORT": "1"}
    assert found.version == "0.20.0"


def test_only_variables_with_a_bearing_are_kept(server: RunningServer, tmp_path: Path) -> None:
    write(tmp_path, "HF_TOKEN=hf_secret\nVLLM_USE_V1=0\n", "vllm.env")
    path = write(
        tmp_path,
        compose(
            service(
                OFFICIAL,
                "env_file: vllm.env",
                "command: --api-key secret",
                "environment: [API_KEY=secret]",
            )
        ),
    )
    found = server.known(launch_file(path))
    assert found.environment == {"VLLM_USE_V1": "0"}
    assert "secret" not in repr(found)


DOTENV = """
# the card has 80 GB
export LEN=8192
SEQS = 64   # as measured
BASE='--enforce-eager'
MORE="$BASE --max-num-batched-tokens ${TOKENS:-2048}" # quoted
UNTOLD=${FROM_THE_SHELL}
"""


def test_variables_of_the_dotenv_file(server: RunningServer, tmp_path: Path) -> None:
    write(tmp_path, DOTENV, ".env")
    told = "command: --max-model-len ${LONG:-${LEN}} --max-num-seqs $SEQS $MORE"
    assert server.flags(launch_file(write(tmp_path, compose(service(OFFICIAL, told))))) == {
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "max_num_batched_tokens": 2048,
    }
    for unknown in ("$UNTOLD", "${LONG:-$UNTOLD}"):
        path = write(tmp_path, compose(service(OFFICIAL, f"command: --max-model-len {unknown}")))
        assert server.reason(launch_file(path)) == "undefined_variable"
    path = write(tmp_path, compose(service(OFFICIAL, "command: --hf-overrides ${X:-{}}")))
    assert server.reason(launch_file(path)) == "broken_variable"


def test_one_of_two_servers_is_named(server: RunningServer, tmp_path: Path) -> None:
    services = [service(OFFICIAL, f"command: --max-model-len {n}", name=f"s{n}") for n in (1, 2)]
    path = write(tmp_path, compose(*services))
    assert server.reason(launch_file(path)) == "several_servers"
    assert server.flags(launch_file(path, service="s2")) == {"max_model_len": 2}
    assert server.reason(launch_file(path, service="s3")) == "no_such_service"


REFUSED: dict[str, str | bytes] = {
    "undefined_variable": compose(service(OFFICIAL, "command: --max-model-len $LEN")),
    "extends": compose(service("extends: {service: base}", "command: --max-model-len 1")),
    "image_entrypoint": compose(service("image: mine", "command: --max-model-len 1")),
    "broken_command": compose(service(OFFICIAL, 'command: "--x \'unclosed"')),
    "dynamic_script": compose(service("image: mine", "command: bash -c 'vllm serve $$(cat model)'")),
    "no_server_command": compose(service("image: redis", "command: redis-server")),
    "not_yaml": "services: [",
    "not_text": b"services: \xff\xfe",
    "efbig": b"services: {}\n" + b"#" * 300_000,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_told_is_said(server: RunningServer, tmp_path: Path, reason: str) -> None:
    assert server.reason(launch_file(write(tmp_path, REFUSED[reason]))) == reason


def test_cyclic_and_swollen_documents(server: RunningServer, tmp_path: Path) -> None:
    cyclic = "services: &s\n  chat:\n    image: mine\n    command: &c [bash, *c]\n    deploy: *s\n"
    assert server.reason(launch_file(write(tmp_path, cyclic))) in ("no_server_command", "too_deep")
    swollen = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 101)}]}}\n" for n in range(1, 20)
    )
    assert server.reason(launch_file(write(tmp_path, swollen + "services: {}\n"))) == "not_yaml"

"""systemd units as systemd would load them."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from kvwatch.observe.nextstart_files import TrackedFiles
from kvwatch.observe.nextstart_systemd import Manager, unit_command
from tests.observe.nextstart_server import RunningServer, launch_file

SERVE = "/opt/venv/bin/vllm serve /models/m"
ETC = "etc/systemd/system"


def unit(*lines: str) -> str:
    return "\n".join(["[Unit]", "Description=chat", "", "[Service]", *lines, "", "[Install]", ""])


def exec_start(text: str) -> str:
    return unit(f"ExecStart={text}")


@pytest.fixture
def server(tmp_path: Path) -> RunningServer:
    return RunningServer(tmp_path, "--max-model-len", "4096", unit="chat.service")


CASES = {
    "plain": ([f"ExecStart={SERVE} --max-model-len 8192"], {"max_model_len": 8192}),
    "continued, with a comment between": (
        [
            f"ExecStart={SERVE} \\",
            "  # the longest",
            "  --max-model-len 8k \\",
            "  --enforce-eager",
        ],
        {"max_model_len": 8000, "enforce_eager": True},
    ),
    "quoted": (
        [f'ExecStart={SERVE} "--max-model-len" \'8192\' --hf-overrides \'{{"a": "b c"}}\''],
        {"max_model_len": 8192, "hf_overrides": {"a": "b c"}},
    ),
    "escaped blank and prefix": (
        [f"ExecStart=-{SERVE} --quantization a\\x20b"],
        {"quantization": "a b"},
    ),
    "argv[0] given": (
        ["ExecStart=@/opt/venv/bin/vllm vllm serve /models/m --max-num-seqs 8"],
        {"max_num_seqs": 8},
    ),
    "cleared, then set again": (
        [f"ExecStart={SERVE} --max-model-len 1", "ExecStart=", f"ExecStart={SERVE} --max-model-len 2"],
        {"max_model_len": 2},
    ),
    "one of several of a oneshot": (
        ["Type=oneshot", "ExecStart=/bin/true", f"ExecStart={SERVE} --max-model-len 2"],
        {"max_model_len": 2},
    ),
    "braced variable is one word": (
        ['Environment="LEN=8192" ARGS="--max-num-seqs 4"', f"ExecStart={SERVE} --max-model-len ${{LEN}}"],
        {"max_model_len": 8192},
    ),
    "bare variable is split": (
        ['Environment=LEN=1 "ARGS=--max-num-seqs 4 --enforce-eager"', f"ExecStart={SERVE} $ARGS"],
        {"max_num_seqs": 4, "enforce_eager": True},
    ),
    "undefined variable is nothing": ([f"ExecStart={SERVE} $NOTHING"], {}),
    "dollar": ([f"ExecStart={SERVE} --quantization a$$b"], {"quantization": "a$b"}),
    "no expansion behind a colon": ([f"ExecStart=:{SERVE} --quantization ${{X}}"], {"quantization": "${X}"}),
    "specifiers": (
        [f"ExecStart={SERVE} --quantization %n,%N,%p,%%,%t"],
        {"quantization": "chat.service,chat,chat,%,/run"},
    ),
    "behind env and numactl": (
        [f"ExecStart=/usr/bin/env A=1 numactl --cpunodebind=0 -m 0 {SERVE} --max-num-seqs 2"],
        {"max_num_seqs": 2},
    ),
    "a shell's command": (
        [f"ExecStart=/bin/bash -lc 'exec {SERVE} --max-num-seqs 2 >>/var/log/x 2>&1'"],
        {"max_num_seqs": 2},
    ),
    "module form": (
        ["ExecStart=/opt/venv/bin/python -m vllm.entrypoints.openai.api_server --max-num-seqs 3"],
        {"max_num_seqs": 3},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_command_of_a_unit(server: RunningServer, case: str) -> None:
    lines, flags = CASES[case]
    server.write(f"{ETC}/chat.service", unit(*lines))
    assert server.known().source == "systemd"
    assert server.flags() == flags


def test_paths_in_systemds_order(server: RunningServer) -> None:
    generated = "run/systemd/generator"
    places = (f"{generated}.late", "lib", "usr/lib", generated, "run", "etc", f"{generated}.early")
    for length, place in enumerate((*places, "run/systemd/transient"), start=1):
        folder = place if "systemd" in place else f"{place}/systemd/system"
        server.write(f"{folder}/chat.service", exec_start(f"{SERVE} --max-model-len {length}"))
        assert server.flags() == {"max_model_len": length}


def test_drop_ins_by_name_over_all_directories(server: RunningServer) -> None:
    server.write(f"{ETC}/chat.service", exec_start(f"{SERVE} --max-model-len 1"))
    override = "[Service]\nExecStart=\nExecStart=" + SERVE
    server.write("usr/lib/systemd/system/chat.service.d/50-a.conf", f"{override} --max-model-len 2")
    assert server.flags() == {"max_model_len": 2}
    server.write("run/systemd/system/chat.service.d/50-a.conf", f"{override} --max-model-len 3")
    assert server.flags() == {"max_model_len": 3}
    server.write("usr/lib/systemd/system/service.d/60-b.conf", f"{override} --max-model-len 4")
    assert server.flags() == {"max_model_len": 4}
    server.write(f"{ETC}/chat.service.d/60-b.conf", f"{override} --max-model-len 5")
    assert server.flags() == {"max_model_len": 5}
    assert server.known().files[:2] == (
        "/etc/systemd/system/chat.service",
        "/run/systemd/system/chat.service.d/50-a.conf",
    )
    mask = server.root / ETC / "chat.service.d/60-b.conf"
    mask.unlink()
    mask.symlink_to("/dev/null")
    assert server.flags() == {"max_model_len": 3}


def test_a_template_with_its_instance(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, unit="vllm-big@chat-4k\\x2dlong.service")
    command = f"{SERVE} --quantization %p,%i,%I,%j"
    server.write(f"{ETC}/vllm-big@.service", exec_start(command))
    assert server.flags() == {"quantization": "vllm-big,chat-4k\\x2dlong,chat/4k-long,big"}
    server.write(f"{ETC}/vllm-.service.d/a.conf", "[Service]\nExecStart=\n" + exec_start(SERVE))
    assert server.flags() == {}


def test_environment_files_win_over_assignments(server: RunningServer) -> None:
    server.write("etc/vllm.env", '# lengths\nLEN=8192\nEXTRA="--enforce-eager"\nHF_TOKEN=hf_secret\n')
    server.write(
        f"{ETC}/chat.service",
        unit(
            "Environment=LEN=1 VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=3",
            "EnvironmentFile=/etc/vllm.env",
            "EnvironmentFile=-/etc/none.env",
            "UnsetEnvironment=CUDA_VISIBLE_DEVICES",
            f"ExecStart={SERVE} --max-model-len ${{LEN}} $EXTRA",
        ),
    )
    found = server.known()
    assert (found.flags.max_model_len, found.flags.enforce_eager) == (8192, True)
    assert found.environment == {"VLLM_USE_V1": "1"}
    assert found.whole_environment
    assert "hf_secret" not in repr(found)


REFUSED = {
    "unit_not_found": None,
    "dynamic_variable": exec_start(f"{SERVE} --max-model-len ${{INVOCATION_ID}}"),
    "specifier": exec_start(f"{SERVE} --quantization %H"),
    "broken_unit": exec_start(f"{SERVE} 'unclosed"),
    "environment_file_missing": unit("EnvironmentFile=/etc/none", f"ExecStart={SERVE}"),
    "dynamic_script": exec_start(f"/bin/sh -c '{SERVE} --max-model-len $(nproc)'"),
    "not_text": "[Service]\0",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_told_is_said(server: RunningServer, reason: str) -> None:
    text = REFUSED[reason]
    if text is not None:
        server.write(f"{ETC}/chat.service", text)
    assert server.reason() == reason


def test_a_masked_unit(server: RunningServer) -> None:
    place = server.write(f"{ETC}/chat.service", "")
    place.unlink()
    place.symlink_to("/dev/null")
    assert server.reason() == "unit_masked"


def test_a_unit_that_starts_something_else_says_nothing(server: RunningServer) -> None:
    server.write(f"{ETC}/chat.service", exec_start("/usr/bin/jupyterhub --port 1"))
    assert server.known().source == "command_line"
    assert server.flags() == {"max_model_len": 4096}


def test_the_unit_of_a_user(tmp_path: Path) -> None:
    cgroup = "0::/user.slice/user-0.slice/user@0.service/app.slice/chat.service\n"
    server = RunningServer(tmp_path, cgroup=cgroup)
    server.write("etc/systemd/user/chat.service", exec_start(f"{SERVE} --max-model-len 1"))
    assert server.flags() == {"max_model_len": 1}
    server.write("root/.config/systemd/user/chat.service", exec_start(f"{SERVE} --quantization %t,%U"))
    assert server.flags() == {"quantization": "/run/user/0,0"}
    assert not server.known().whole_environment


def test_a_configured_unit_with_its_drop_ins(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "x@.service"
    path.write_text(exec_start(f"{SERVE} --quantization %i"))
    assert server.flags(launch_file(path, service="x@one.service")) == {"quantization": "one"}
    assert server.reason(launch_file(path)) == "specifier"
    override = tmp_path / "o.conf"
    override.write_text(f"[Service]\nExecStart=\nExecStart={SERVE} --max-num-seqs 9\n")
    assert server.flags(launch_file(path, override)) == {"max_num_seqs": 9}


# --- against systemd itself ----------------------------------------------------------------------------

ANALYZE = shutil.which("systemd-analyze")
PLACES = (
    "etc/systemd/system",
    "etc/systemd/system.control",
    "run/systemd/system",
    "usr/lib/systemd/system",
    "usr/local/lib/systemd/system",
)
INSTANCE, TEMPLATE = "vllm-big@chat.service", "vllm-big@.service"


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
@pytest.mark.parametrize("seed", range(8))
def test_precedence_as_systemd_has_it(tmp_path: Path, seed: int) -> None:
    """systemd names the command that it settled on, since that program does not exist."""
    random = Random(seed)
    numbers = itertools.count(1)

    def write(path: str) -> None:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"[Service]\nExecStart=\nExecStart=/none/c{next(numbers)}/vllm serve m\n")

    for place in random.sample(PLACES, 2):
        write(f"{place}/{random.choice([INSTANCE, TEMPLATE])}")
    for _ in range(random.randint(1, 6)):
        stem = random.choice([INSTANCE, TEMPLATE, "vllm-.service", "service"])
        write(f"{random.choice(PLACES)}/{stem}.d/{random.choice('abc')}.conf")
    told = subprocess.run(
        [ANALYZE or "", f"--root={tmp_path}", "verify", "--man=no", INSTANCE],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    theirs = re.findall(r"Command (/none/\S+) is not executable", told.stderr)
    command = unit_command(INSTANCE, Manager(), TrackedFiles(str(tmp_path)))
    assert command is not None
    assert [command.argv[0]] == theirs

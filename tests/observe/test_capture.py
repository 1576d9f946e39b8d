from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Holders, Plan, Rule, ServerConfig
from kvwatch.observe.capture import (
    FORMAT,
    Capture,
    CaptureError,
    capture_bytes,
    capture_text,
    read_captures,
    take_capture,
)
from kvwatch.observe.command_line import is_preload
from kvwatch.observe.cycle import Observation
from kvwatch.observe.launch import server_arguments, title_prefix
from kvwatch.observe.plain import NotPlain, from_plain, to_plain
from kvwatch.observe.processes import SPAWNED, python_arguments
from kvwatch.observe.records import (
    Failure,
    GpuMemory,
    GpuProcess,
    Launch,
    ModelConfig,
    Process,
    ProcessRecord,
)
from kvwatch.observe.redaction import LONGEST_TEXT, recognised_arguments, redact
from tests.nodes import NOW, PARENT, gpu, observation, process, server, serving_node

# --- any observation ------------------------------------------------------------------------------------

TEXTS = st.text(max_size=12)
FLOATS = st.floats(allow_nan=False)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXTS | st.sampled_from(["$number", "$mapping"]), inner, max_size=3)
    ),
    max_leaves=8,
)
st.register_type_strategy(
    Mapping,
    lambda hint: st.dictionaries(
        *(JSON if own is Any else st.from_type(own) for own in getattr(hint, "__args__", (str, str))),
        max_size=3,
    ),
)
st.register_type_strategy(float, FLOATS)
st.register_type_strategy(str, TEXTS)
st.register_type_strategy(Path, TEXTS.map(Path))
OBSERVATIONS = st.from_type(Observation)
CONFIGS = st.from_type(Config)
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(OBSERVATIONS, CONFIGS)
def test_every_value_survives_the_way_through_json(seen: Observation, config: Config) -> None:
    for value, hint in ((seen, Observation), (config, Config)):
        text = json.dumps(to_plain(value, hint), allow_nan=False)
        assert from_plain(json.loads(text), hint, "it") == value


def a_node() -> Observation:
    """One server of alice's, a notebook of bob's, and what their command lines and environments hold."""
    seen = serving_node(
        (process(900, "ipykernel_launcher", user="bob", uid=1001, unit="jupyter-bob.service"), 2 * GIB),
        (process(901, "Xorg", user="root", uid=0, argv=("/usr/lib/xorg/Xorg", ":0")), GIB),
    )
    assert isinstance(seen.processes, ProcessRecord)
    argv = ("/usr/bin/python3", "/usr/bin/vllm", "serve", "/home/alice/llama", "--api-key", SECRET)
    everyone = dict(seen.processes.processes)
    for pid, command in ((PARENT, argv), (PARENT + 1, ("VLLM::EngineCore", ""))):
        slice_of = "/user.slice/user-1000.slice/user@1000.service/app.slice/vllm-alice.service"
        everyone[pid] = replace(everyone[pid], user="alice", argv=command, cgroup=slice_of)
    one = seen.servers[0]
    told = replace(
        one.launch,
        flags=Flags(model="/home/alice/llama", hf_overrides={"hf_token": SECRET, "rope_theta": 1e6}),
        model="/home/alice/llama",
        cwd="/home/alice",
        environment={
            "HF_TOKEN": SECRET,
            "HOME": "/home/alice",
            "HF_HOME": "/home/alice/hf",
            "VLLM_PORT": "1",
        },
    )
    found = ModelConfig(
        "/home/alice/llama/config.json",
        {"hidden_size": 4096, "chat_template": "x" * 5000, "_name_or_path": "/data/alice/llama"},
        1,
    )
    return replace(
        seen,
        processes=replace(seen.processes, processes=everyone),
        servers=(replace(one, launch=told, model=found),),
    )


SECRET = "Zq7-planted"


@settings(max_examples=10, deadline=None, suppress_health_check=SLOW)
@given(OBSERVATIONS, CONFIGS, st.booleans())
def test_a_redacted_capture_is_redacted_for_good(seen: Observation, config: Config, keep: bool) -> None:
    once = redact(seen, config, keep_names=keep)
    again = redact(once.observation, once.config, keep_names=keep)
    assert (again.observation, again.config) == (once.observation, once.config)


# --- what is taken out ----------------------------------------------------------------------------------

LEAKS = (
    f"--api-key {SECRET}",
    f"--api-key='{SECRET} {SECRET}'",
    f"HF_TOKEN={SECRET}",
    f"Authorization: Bearer {SECRET}",
    f'{{"password": "{SECRET}"}}',
    f"http://{SECRET}:{SECRET}@host:80/v1?key={SECRET}#{SECRET}",
    f"https://user:{SECRET}?{SECRET}@host/",
    f"s3://bucket/llama?X-Amz-Signature={SECRET}@{SECRET}",
    "hf_" + "Zq7planted" * 3,
    "sk-proj-" + "Zq7planted" * 2,
    "eyJhbGciOiJIUzI1.eyJZq7planted.Zq7planted",
    "/home/alice/m",
    "file:///home/alice/x",
    "/home/bob:/home/alice",
    "/proc/77/root/home/alice/m",
    "/var/home/alice",
    "/scratch/alice/models",
    "~alice/models",
)


def plant(value: Any, poison: str) -> Any:
    """Every text in a record with something in it that must not leave the node."""
    match value:
        case str():
            return f"{value} {poison}"
        case Path():
            return Path(f"{poison}/{value}")
        case Mapping():
            return {key: plant(item, poison) for key, item in value.items()}
        case tuple() | frozenset() | list():
            return type(value)(plant(item, poison) for item in value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kept = {"user"} if isinstance(value, Process) else set()
            own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return replace(value, **{name: plant(own[name], poison) for name in own.keys() - kept})
        case _:
            return value


FULL_CONFIG = Config(
    holders=Holders(allowed=(Rule(user="alice", workload="vllm-alice.service"), Rule(user="b*"))),
    servers=(
        ServerConfig(
            url="http://127.0.0.1:8000",
            flags=Flags(model="m", hf_overrides={"api_key": SECRET, "x": ["y"]}),
            token_file=Path("/home/alice/token"),
        ),
    ),
    plans=(Plan("fp8", "llama", Flags(kv_cache_dtype="fp8")),),
    source=Path("/home/alice/kvwatch.yaml"),
)


@pytest.mark.parametrize("poison", LEAKS)
def test_no_field_of_any_record_lets_a_secret_out(poison: str) -> None:
    text = capture_text(take_capture(plant(a_node(), poison), plant(FULL_CONFIG, poison)))
    assert "Zq7" not in text
    assert "alice" not in text
    assert "bob" not in text


def test_what_identifies_a_person_or_opens_a_door_is_gone_and_the_rest_is_there() -> None:
    capture = take_capture(a_node(), FULL_CONFIG)
    seen, listed = capture.observation, capture.observation.processes
    assert isinstance(listed, ProcessRecord)
    parent, engine, notebook, xorg = (listed.processes[pid] for pid in (PARENT, PARENT + 1, 900, 901))
    assert (parent.name, parent.user, parent.uid, parent.argv) == ("vllm", "user1", None, ("vllm", "serve"))
    assert parent.cgroup == "/user.slice/user-~.slice/user@~.service/app.slice/vllm-user1.service"
    assert engine.argv == ("VLLM::EngineCore",)
    assert (notebook.user, notebook.unit, notebook.argv) == ("user2", "jupyter-user2.service", ())
    assert (xorg.user, xorg.uid, xorg.argv) == ("root", 0, ())
    launch, model = seen.servers[0].launch, seen.servers[0].model
    assert launch.environment == {"HOME": "~", "HF_HOME": "~/hf", "VLLM_PORT": "1"}
    assert (launch.model, launch.cwd) == ("~/llama", "~")
    assert launch.flags == Flags(model="~/llama", hf_overrides={"hf_token": "[redacted]", "rope_theta": 1e6})
    assert isinstance(model, ModelConfig)
    assert model.path == "~/llama/config.json"
    assert model.config == {
        "hidden_size": 4096,
        "chat_template": "[5000 characters removed]",
        "_name_or_path": "/data/user1/llama",
    }
    assert seen.nvml == a_node().nvml
    assert seen.servers[0].vllm == a_node().servers[0].vllm
    assert capture.removed == (
        "3 command lines, reduced to what kvwatch recognises a program by",
        "1 environment variables that kvwatch has no use for",
        "2 user names, now user1, user2 and so on",
        "8 home directories, now ~",
        "2 values with the name or the form of a key, password or token",
        f"1 texts of more than {LONGEST_TEXT} characters",
    )


def test_a_program_may_be_called_like_a_person_and_still_not_tell_of_one() -> None:
    names = {2: "alice", 3: "postgres: alice", 4: "postgres: alice-db idle", 5: "alice: malice"}
    everyone = tuple(process(pid, name, user="alice") for pid, name in names.items())
    listed = take_capture(observation((), everyone), Config()).observation.processes
    assert isinstance(listed, ProcessRecord)
    assert [one.name for one in listed.processes.values()] == [
        "alice",
        "postgres: user1",
        "postgres: user1-db idle",
        "alice: malice",
    ]


def test_rules_about_users_go_on_meaning_the_same_processes() -> None:
    assert take_capture(a_node(), FULL_CONFIG).config.holders.allowed == (
        Rule(user="user1", workload="vllm-user1.service"),
        Rule(user="user2"),
    )
    gone = Config(holders=Holders(neighbours=(Rule(user="carol"), Rule(user="*"), Rule(program="Xorg"))))
    assert take_capture(a_node(), gone).config.holders.neighbours == (Rule(user="*"), Rule(program="Xorg"))


def test_names_are_kept_on_request_and_nothing_else_is() -> None:
    capture = take_capture(a_node(), FULL_CONFIG, keep_names=True)
    listed = capture.observation.processes
    assert isinstance(listed, ProcessRecord)
    assert (listed.processes[PARENT].user, listed.processes[PARENT].uid) == ("alice", 1000)
    assert listed.processes[900].unit == "jupyter-bob.service"
    assert capture.config.holders == FULL_CONFIG.holders
    assert SECRET not in capture_text(capture)
    assert capture.observation.servers[0].launch.cwd == "~"


def test_harmless_texts_stay() -> None:
    details = (
        "compute processes of GPU 0: Insufficient Permissions (NVML error 4)",
        "max_num_batched_tokens=8192, bos_token_id: 128000, num_speculative_tokens=3",
        "--ssl-keyfile /etc/kvwatch/tls.key --tokenizer-mode auto --max-num-batched-tokens 8192",
        "meta-llama/Llama-3.1-8B-Instruct at http://127.0.0.1:8000/metrics",
        "/opt/models/llama/config.json is not JSON: line 3, column 7",
        "/proc/4711/root/models/llama",
        "libnvidia-ml.so.1 is not on this machine; Xorg:0 and N/A",
    )
    seen = observation((gpu({}, failures=tuple(Failure("nvml", "error", detail) for detail in details)),))
    assert take_capture(seen, Config()).observation == seen


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("VLLM::EngineCore",),
        ("team-a::Worker_TP0 extra", ""),
        ("ray::RayWorkerWrapper.execute_method",),
        ("vllm", "serve", "m"),
        ("/usr/bin/python3.11", "-u", "/opt/bin/vllm", "serve", "m", "--api-key", "k"),
        ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"),
        ("python3", "train.py", "--token", "k"),
        ("python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", SPAWNED),
        ("/usr/bin/python3", "/opt/bin/vllm", "preload", "--model", "m", "--api-key", "k"),
        ("/usr/lib/xorg/Xorg", ":0"),
        ("sh", "-c", "vllm serve m"),
    ],
)
def test_what_is_left_of_a_command_line_is_taken_for_the_same_program(argv: tuple[str, ...]) -> None:
    left = recognised_arguments(argv)
    assert recognised_arguments(left) == left
    assert (server_arguments(left) is None) == (server_arguments(argv) is None)
    assert len(left) <= 2 or left == ("python", "-c", "", SPAWNED)
    assert (python_arguments(argv) is None) or left[0] in ("vllm", "python")
    assert is_preload(left) == is_preload(argv)
    assert (SPAWNED in left) == (SPAWNED in argv)
    assert title_prefix(process(1, "x", argv=left)) == title_prefix(process(1, "x", argv=argv))


# --- the file -------------------------------------------------------------------------------------------


def written(path: Path, *captures: Capture) -> Path:
    path.write_bytes(b"".join(capture_bytes(one, compress=path.suffix == ".gz") for one in captures))
    return path


@pytest.mark.parametrize("name", ["node.json", "node.json.gz"])
def test_files_hold_one_capture_after_the_other(tmp_path: Path, name: str) -> None:
    captures = (
        take_capture(a_node(), FULL_CONFIG),
        take_capture(observation(Failure("nvml", "gpu_lost", "lost"), time=NOW + 15), Config()),
    )
    path = written(tmp_path / name, *captures)
    assert read_captures(path) == captures
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_the_header_comes_first_and_says_what_it_is() -> None:
    document = json.loads(capture_text(take_capture(a_node(), Config())))
    assert list(document) == [
        "kvwatch_capture", "time", "kvwatch", "python", "platform", "removed", "config", "observation",
    ]  # fmt: skip
    assert document["kvwatch_capture"] == FORMAT
    assert document["time"] == "2027-01-15T08:00:00.000+00:00"


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    one = server(model={"time_step_limit": [0.0, math.inf], "odd": {"$number": "x"}})
    seen = observation((gpu({}),), servers=(one,))
    path = written(tmp_path / "c", take_capture(seen, Config()))
    assert json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read_captures(path)[0].observation == seen


GOOD: Mapping[str, Any] = json.loads(capture_text(take_capture(serving_node(), Config())))


def changed(**fields: Any) -> str:
    return json.dumps({**GOOD, **fields})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "the file is empty"),
        ("{", "not JSON"),
        ("[]", "not a capture: no field kvwatch_capture"),
        ("{}", "not a capture: no field kvwatch_capture"),
        (changed(kvwatch_capture=2, kvwatch="9.9.9"), "a capture of format 2 (written by kvwatch 9.9.9)"),
        (changed(more=1), "capture.more: no such field"),
        (changed(python=3), "capture.python: int instead of str"),
        (changed(observation={"time": 1.0}), "capture.observation.nvml: missing"),
        (changed(observation={"time": True}), "capture.observation.time: bool instead of float"),
        (changed(observation={"time": None}), "capture.observation.time: null instead of float"),
        (changed(observation=None), "capture.observation: null instead of dict"),
        (changed(observation={"nvml": {}}), "capture.observation.nvml: none of NvmlRecord, Failure"),
        (changed(config={"web": {"listen_addresses": "x"}}), "listen_addresses: str instead of list"),
        (changed() + "x", "not JSON"),
    ],
)
def test_another_file_is_refused_with_its_name_and_field(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "file"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CaptureError) as refused:
        read_captures(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert problem in str(refused.value)


PACKED = gzip.compress(b"{}", mtime=0)


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8b", PACKED[:-4], PACKED[:12] + b"\xff" * 20, b"\xff\xfe{}"],
    ids=["too short", "cut off", "garbled", "no text"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"damaged gzip|no UTF-8"):
        read_captures(path)


@pytest.mark.parametrize(
    ("plain", "hint", "problem"),
    [
        ([1, 2, 3], tuple[int, int], "it: 3 items instead of 2"),
        ({"x": {"pid": 1, "kinds": []}}, Mapping[int, GpuProcess], "it.x: the key is not a whole number"),
        ({"total": 1, "free": 1.5, "used": 0}, GpuMemory, "it.free: float instead of int"),
        ({"pid": None, "flags": {}}, Launch, "it.start_time: missing"),
    ],
)
def test_values_of_another_form_are_refused(plain: Any, hint: Any, problem: str) -> None:
    with pytest.raises(NotPlain) as refused:
        from_plain(plain, hint, "it")
    assert str(refused.value) == problem


def test_a_type_without_a_plain_form_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="no plain form"):
        to_plain(b"", bytes)

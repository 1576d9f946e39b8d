from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.blockmath.flags import VARIABLES, Flags
from kvwatch.observe.command_line import CommandLine, parse_command_line, server_arguments
from kvwatch.observe.serve_flags import ALIASES, CURRENT, RETIRED, SHORT, Arity, resolve, resolve_short
from tests.observe.command_lines import check, read_cases

DEFAULTS, *RECORDED = read_cases(Path(__file__).with_name("command_lines.jsonl").read_text())


def parse(text: str, **files: str) -> CommandLine:
    return parse_command_line(["serve", *text.split()], read_file=lambda name: files[name.partition(".")[0]])


def reasons(line: CommandLine) -> list[str]:
    return [failure.reason for failure in line.failures]


# --- which processes are servers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        "/opt/venv/bin/python3 /opt/venv/bin/vllm serve m --port 1",
        "python3.12 -u -B /usr/local/bin/vllm serve m --port 1",
        "vllm serve m --port 1",
        "/nix/store/x/bin/vllm serve m --port 1",
        "python -m vllm.entrypoints.cli.main serve m --port 1",
        "python -m vllm.scripts serve m --port 1",
        "python /opt/vllm/lib/site-packages/vllm/entrypoints/cli/main.py serve m --port 1",
        "python -m vllm.entrypoints.openai.api_server m --port 1",
        "python3 -X dev /x/vllm/entrypoints/openai/api_server.py m --port 1",
        "python -m vllm.entrypoints.launchers.api_server.entry m --port 1",
    ],
)
def test_servers(argv: str) -> None:
    arguments = server_arguments(argv.split())
    assert arguments is not None
    assert tuple(word for word in arguments if word != "serve") == ("m", "--port", "1")
    assert ("serve" in arguments) == ("api_server" not in argv)


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "vllm",
        "vllm bench serve --model m",
        "vllm chat",
        "vllm preload --model m",
        "python3 /usr/bin/vllm run-batch -i x",
        "grep vllm serve",
        "bash -c vllm\\ serve\\ m",
        "/bin/sh /usr/local/bin/vllm serve m",
        "vim vllm serve",
        "uv run vllm serve m",
        "docker run vllm/vllm-openai vllm serve m",
        "python -c vllm serve m",
        "python -m pytest vllm serve",
        "python train.py vllm serve m",
        "python /x/openai/api_server.py --model m",
        "VLLM::EngineCore",
    ],
)
def test_no_servers(argv: str) -> None:
    assert server_arguments(argv.replace("\\ ", "\0").split()) is None


@pytest.mark.parametrize(
    ("text", "ray"),
    [
        ("m --distributed-executor-backend ray", True),
        ("m --data-parallel-backend=ray", True),
        ("m --distributed-executor-backend mp", False),
        ("m", False),
    ],
)
def test_workers_under_ray(text: str, ray: bool) -> None:
    assert parse_command_line(text.split()).ray is ray


# --- against vLLM's own parser --------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED, ids=[str(number) for number in range(len(RECORDED))])
def test_reads_what_vllm_reads(case: Mapping[str, Any]) -> None:
    check(case, DEFAULTS["defaults"])


# --- spellings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("m --gpu-mem 0.5", Flags(model="m", gpu_memory_utilization=0.5)),
        ("m --gpu_memory_utilization=.5", Flags(model="m", gpu_memory_utilization=0.5)),
        ("m --device-memory-utilization 0.5", Flags(model="m", gpu_memory_utilization=0.5)),
        (
            "m -tp 2 -pp=3 -dp 4 -dcp 2 -pcp 1 -ep",
            Flags(
                model="m",
                tensor_parallel_size=2,
                pipeline_parallel_size=3,
                data_parallel_size=4,
                decode_context_parallel_size=2,
                prefill_context_parallel_size=1,
                enable_expert_parallel=True,
            ),
        ),
        ("m -qfp8", Flags(model="m", quantization="fp8")),
        ("m -q fp8 -q None", Flags(model="m")),
        ("--model m --max-model-len 4k", Flags(model="m", max_model_len=4000)),
        ("m --max-model-len 8 --max-model-len 16", Flags(model="m", max_model_len=16)),
        ("m --max-model-len -1", Flags(model="m", max_model_len=-1)),
        ("m --enforce-eager --no-enforce-eager", Flags(model="m", enforce_eager=False)),
        ("m --enable-chunked-prefill=False", Flags(model="m", enable_chunked_prefill=False)),
        ("--enable-chunked-prefill false m", Flags(model="m", enable_chunked_prefill=False)),
        ("m --swap-space 4", Flags(model="m", swap_space=4.0)),
        ("m --attention-config.backend X", Flags(model="m", attention_backend="X")),
        ('m -ac {"backend":"X"}', Flags(model="m", attention_backend="X")),
        (
            "m --hf-overrides {} --hf-overrides.a.b 1 --hf-overrides.a.c=x",
            Flags(model="m", hf_overrides={"a": {"b": 1, "c": "x"}}),
        ),
        (
            "m -sc.method mtp --spec-tokens 2",
            Flags(model="m", speculative_config={"method": "mtp", "num_speculative_tokens": 2}),
        ),
        ("-- m", Flags(model="m")),
        ("", Flags()),
    ],
)
def test_spellings(text: str, flags: Flags) -> None:
    line = parse(text)
    assert line.flags == flags
    assert line.failures == ()
    assert line.unknown_flags == ()


SAMPLES: dict[str, st.SearchStrategy[Any]] = {
    "str | None": st.sampled_from(["a", "fp8", "FLASH_ATTN", "a/b.c", "x y"]),
    "int | None": st.integers(1, 10**12),
    "float | None": st.floats(0.001, 1.0, allow_nan=False),
    "bool | None": st.booleans(),
    "tuple[str, ...] | None": st.lists(st.sampled_from(["0", "1", "sliding_window"]), min_size=1).map(tuple),
    "Mapping[str, Any] | None": st.dictionaries(
        st.sampled_from(["a", "b_c", "d"]), st.integers() | st.text(max_size=5) | st.booleans(), min_size=1
    ),
}
ANY_FLAGS = st.fixed_dictionaries(
    {},
    optional={
        entry.name: SAMPLES[str(entry.type)]
        for entry in fields(Flags)
        if entry.name not in VARIABLES | {"model"}
    },
)


@cache
def shortest_prefix(option: str) -> int:
    """How many letters of a flag's name tell it from all others."""
    return next((n for n in range(1, len(option)) if resolve(option[:n]) == option), len(option))


def spell(name: str, value: object, chance: random.Random) -> list[str]:
    """One flag in one of the ways in which it can be written."""
    option = name.replace("_", "-")
    if value is False:
        option = f"no-{option}"
    if chance.random() < 0.3:
        option = option[: chance.randint(shortest_prefix(option), len(option))]
    written = f"--{option.replace('-', '_') if chance.random() < 0.3 else option}"
    short = next((each for each, full in SHORT.items() if full == name.replace("_", "-")), None)
    if short and chance.random() < 0.5 and value is not False:
        written = short
    if isinstance(value, bool):
        return [written]
    if isinstance(value, tuple):
        return [written, *value]
    if isinstance(value, dict) and chance.random() < 0.5:
        return [word for key, each in value.items() for word in (f"--{name}.{key}", json.dumps(each))]
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"{written}={text}"] if chance.random() < 0.5 else [written, text]


@settings(deadline=None, max_examples=60)
@given(ANY_FLAGS, st.randoms(use_true_random=False))
def test_any_flags_in_any_spelling_come_back(values: dict[str, Any], chance: random.Random) -> None:
    groups = [spell(name, value, chance) for name, value in values.items()]
    groups.append(["--api-key", "s3cret"])
    chance.shuffle(groups)
    line = parse_command_line(["serve", "org/model", *(word for group in groups for word in group)])
    assert line.flags == Flags.from_mapping({"model": "org/model", **values})
    assert (line.failures, line.unknown_flags) == ((), ())
    assert "s3cret" not in repr(line)


@given(st.lists(st.text(max_size=12)))
def test_any_words_are_read_without_an_error(words: list[str]) -> None:
    parse_command_line(words)


# --- where it listens -----------------------------------------------------------------------------------


def test_defaults_of_the_address() -> None:
    line = parse("m")
    assert (line.host, line.port, line.uds, line.tls, line.headless) == (None, 8000, None, False, False)


@pytest.mark.parametrize("port", ["x", "70000", "-1"])
def test_port_that_is_none(port: str) -> None:
    line = parse(f"m --port {port}")
    assert line.port is None
    assert reasons(line) == ["bad_flag"]


def test_ports_per_rank() -> None:
    assert parse("m -dp 2 -dpm").ports_per_rank


# --- what cannot be read --------------------------------------------------------------------------------


def test_value_that_is_none_fails_alone() -> None:
    line = parse("m --max-model-len banana --gpu-memory-utilization 1.5 --max-num-seqs 8")
    assert line.flags == Flags(model="m", max_num_seqs=8)
    assert reasons(line) == ["bad_flag", "bad_flag"]
    assert line.failures[0].detail.startswith("--max-model-len: ")
    assert line.failures[1].detail.startswith("--gpu-memory-utilization: ")


@pytest.mark.parametrize("flag", ["--hf-overrides", "--speculative-config", "--attention-config"])
@pytest.mark.parametrize("value", ["{", "[1]", "word"])
def test_broken_objects(flag: str, value: str) -> None:
    line = parse(f"m {flag} {value}")
    assert line.flags == Flags(model="m")
    assert [failure.detail.partition(":")[0] for failure in line.failures] == [flag]


def test_unknown_flags_by_name_only() -> None:
    line = parse("m --new-secret s3cret more -zz=s3cret --rope-scaling s3cret --tens 2 --no-such.x s3cret")
    assert line.unknown_flags == ("--new-secret", "-zz", "--rope-scaling", "--no-such")
    assert line.flags == Flags(model="m", tensor_parallel_size=2)
    assert "s3cret" not in repr(line)


def test_what_the_present_parser_has_no_more() -> None:
    line = parse("m --disable-log-requests --use-v2-block-manager --num-scheduler-steps 8 -tp 2")
    assert line.unknown_flags == (
        "--disable-log-requests",
        "--use-v2-block-manager",
        "--num-scheduler-steps",
    )
    assert line.flags == Flags(model="m", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("--enable-lora --max-lora-rank=64", {"enable_lora": "true", "max_lora_rank": "64"}),
        ("--no-enable-lora", {"enable_lora": "false"}),
        ("-O3", {"optimization_level": "3"}),
        ("-O=3", {"optimization_level": "3"}),
        ("-O 3", {"optimization_level": "3"}),
        ("-cc.cudagraph_mode=NONE", {"compilation_config.cudagraph_mode": "NONE"}),
        ("--limit-mm-per-prompt.image 3", {"limit_mm_per_prompt.image": "3"}),
        ('--compilation-config {"mode":3}', {"compilation_config": '{"mode":3}'}),
        ("--cudagraph-capture-sizes 1 2 4 --port 1", {"cudagraph_capture_sizes": "1 2 4"}),
        ("--api-key s3cret --chat-template x", {}),
    ],
)
def test_flags_beside_those_that_are_followed(words: str, beside: dict[str, str]) -> None:
    line = parse(f"m {words}")
    assert (line.beside, line.flags) == (beside, Flags(model="m"))


def test_what_follows_an_unknown_flag_is_not_the_model() -> None:
    assert parse("--new-secret s3cret").flags.model is None


def test_ambiguous_prefix_is_unknown() -> None:
    line = parse("m --max-num 4")
    assert line.unknown_flags == ("--max-num",)


@pytest.mark.parametrize(
    "text",
    [
        "m --api-key s3cret also-s3cret",
        "m --api-key=s3cret",
        "m --api_k s3cret",
        "m --hf-token s3cret",
        "m --api-key.a s3cret",
        'm --ssl-keyfile-s3 x --kv-transfer-config {"key":"s3cret"}',
    ],
)
def test_secrets_are_never_kept(text: str) -> None:
    assert "s3cret" not in repr(parse(text)).replace("--ssl-keyfile-s3", "")


# --- --config -------------------------------------------------------------------------------------------


def test_config_file_yields_to_the_command_line() -> None:
    text = "\n".join(
        [
            "model: filed",
            "max-model-len: 4k",
            "max_num_seqs: 7",
            "served-model-name: [a, b]",
            "port: 9",
            "api-key: s3cret",
        ]
    )
    line = parse("m --max-model-len 8 --config c.yaml --enforce-eager", c=text)
    assert line.flags == Flags(model="m", max_model_len=8, max_num_seqs=7, enforce_eager=True)
    assert (line.served_names, line.port, line.config_file) == (("a", "b"), 9, "c.yaml")
    assert "s3cret" not in repr(line)


def test_config_file_gives_the_model() -> None:
    assert parse("--config c.yaml --port 1", c="model: filed").flags.model == "filed"


def test_config_file_values() -> None:
    line = parse("m --config c.yaml", c="enforce-eager: true\nquantization: null\nhf-overrides: {a: {b: 1}}")
    assert line.flags == Flags(model="m", enforce_eager=True, hf_overrides={"a": {"b": 1}})


def test_false_in_a_config_file_counts_for_the_old_entry_point_only() -> None:
    files = {"c.yaml": "enable-prefix-caching: false\nheadless: false"}
    arguments = ["--model", "m", "--config", "c.yaml"]
    old = parse_command_line(arguments, read_file=files.__getitem__)
    assert old.flags == Flags(model="m", enable_prefix_caching=False)
    assert parse_command_line(["serve", *arguments], read_file=files.__getitem__).flags == Flags(model="m")


def test_config_file_with_an_equals_sign_is_not_read() -> None:
    """vLLM accepts it and does not read it either."""
    line = parse("m --config=c.yaml", c="max-num-seqs: 1")
    assert (line.flags, line.config_file) == (Flags(model="m"), None)


@pytest.mark.parametrize(
    ("text", "reason"), [("a: [", "config_broken"), ("- 1", "config_broken"), ("", "config_broken")]
)
def test_broken_config_file(text: str, reason: str) -> None:
    line = parse("m --config c.yaml --max-num-seqs 3", c=text)
    assert line.flags == Flags(model="m", max_num_seqs=3)
    assert reasons(line) == [reason]
    assert "c.yaml" in line.failures[0].detail


def test_broken_config_file_names_the_line() -> None:
    assert "line 2" in parse("m --config c.yaml", c="a: 1\nb: }").failures[0].detail


@pytest.mark.parametrize(
    "text",
    [
        "hf-overrides: " + "[" * 5000,
        "\n".join(
            ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
            + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
        ),
        "a: 2020-99-99",
    ],
    ids=["deep", "bomb", "date"],
)
def test_hostile_config_file(text: str) -> None:
    assert reasons(parse("m --config c.yaml", c=text)) == ["config_broken"]


def test_hostile_arguments() -> None:
    nested = "[" * 100_000
    line = parse_command_line(
        ["serve", "m", "--hf-overrides", nested, "-sc.a", nested, f"--speculative-config{'.a' * 9999}", "1"]
        * 2
    )
    assert line.flags.model == "m"
    assert "--speculative-config" in line.unknown_flags


def test_endless_arguments() -> None:
    line = parse_command_line(["serve", "m", *["-x"] * 100_000, "--max-num-seqs", "3"])
    assert line.flags == Flags(model="m")
    assert reasons(line) == ["too_many_arguments"]


def test_unreadable_config_file() -> None:
    def refuse(name: str) -> str:
        raise PermissionError(13, "Permission denied", name)

    line = parse_command_line(["serve", "m", "--config", "c.yaml"], read_file=refuse)
    assert reasons(line) == ["config_unreadable"]
    assert line.failures[0].detail == "--config c.yaml cannot be read: Permission denied"


def test_config_file_without_a_reader() -> None:
    assert reasons(parse_command_line(["serve", "m", "--config", "c.yaml"])) == ["config_unread"]


def test_config_without_a_file() -> None:
    assert reasons(parse("m --config")) == ["bad_flag"]


# --- the table ------------------------------------------------------------------------------------------


def test_table_knows_every_start_up_flag() -> None:
    names = {entry.name.replace("_", "-") for entry in fields(Flags) if entry.name not in VARIABLES}
    assert names <= CURRENT.keys() | RETIRED.keys()


def test_table_is_consistent() -> None:
    assert not CURRENT.keys() & RETIRED.keys()
    assert set(SHORT.values()) | set(ALIASES.values()) <= CURRENT.keys()
    assert all(CURRENT[name] is Arity.SWITCH for name in CURRENT if name.startswith("no-"))


def test_every_name_stands_for_itself() -> None:
    assert all(resolve(name) == ALIASES.get(name, name) for name in (*CURRENT, *RETIRED))
    assert all(resolve_short(name) == SHORT[name] for name in SHORT)


def test_retired_names_have_no_prefixes() -> None:
    assert resolve("swap-space") == "swap-space"
    assert resolve("swap-spac") is None

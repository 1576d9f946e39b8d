from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.blockmath.flags import Flags
from kvwatch.config import (
    GIB,
    Config,
    Holders,
    Plan,
    Rule,
    ServerConfig,
    as_mapping,
    duration,
    load,
    parse,
    size,
)
from kvwatch.yamlfile import ConfigError

ROOT = Path(__file__).resolve().parents[1]
FILE = Path("k.yaml")


def test_the_annotated_file_is_the_default() -> None:
    assert load(ROOT / "kvwatch.yaml") == Config()


def test_the_annotated_file_shows_every_setting() -> None:
    shown = yaml.safe_load((ROOT / "kvwatch.yaml").read_text(encoding="utf-8"))
    every = as_mapping(Config())
    assert shown.keys() == every.keys()
    for section, values in every.items():
        if isinstance(values, dict) and section != "plans":
            assert shown[section].keys() == values.keys(), section


@pytest.mark.parametrize("text", ["", "# only a comment\n", "web:\n", "servers: []\nplans: {}\n"])
def test_empty_means_defaults(text: str) -> None:
    assert parse(text, FILE) == Config()


def test_a_full_file() -> None:
    config = parse(
        """
web:
  listen_address: ["127.0.0.1:1", "unix:/run/k"]
  config_file: web.yml
  max_scrapes: 3
  enable_reload: true
poll: {interval: 500ms, nvml_timeout: 2}
discovery: false
holders:
  top: 5
  release_grace: 2m
  allowed: [{program: Xorg, user: "gdm*"}]
  neighbours: [{container: "3f2a*"}]
restart: {cuda_context: 1GiB, nccl: 0}
servers:
  - url: http://localhost:8000/
    name: chat
    gpus: [0, "1"]
    flags: {max-model-len: 32k, kv_cache_dtype: fp8}
    model_config: /m
plans:
  long: {server: chat, max_model_len: 64K}
""",
        Path("/etc/kvwatch/k.yaml"),
    )
    assert config.web.listen_addresses == ("127.0.0.1:1", "unix:/run/k")
    assert config.web.config_file == Path("/etc/kvwatch/web.yml")
    assert (config.poll.interval, config.poll.nvml_timeout, config.poll.vllm_timeout) == (0.5, 2.0, 4.0)
    assert config.holders == Holders(
        top=5,
        release_grace=120.0,
        allowed=(Rule(program="Xorg", user="gdm*"),),
        neighbours=(Rule(container="3f2a*"),),
    )
    assert (config.restart.cuda_context, config.restart.nccl) == (GIB, 0)
    assert config.servers == (
        ServerConfig(
            url="http://localhost:8000",
            name="chat",
            gpus=("0", "1"),
            flags=Flags(max_model_len=32000, kv_cache_dtype="fp8"),
            model_config=Path("/m"),
        ),
    )
    assert config.plans == (Plan("long", "chat", Flags(max_model_len=65536)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "k.yaml:1: the file: expected a mapping (key: value)"),
        ("web:\n  listen: 1", "k.yaml:2: web.listen: unknown field (did you mean listen_address?)"),
        ("poll:\n\n  interval: soon", "k.yaml:3: poll.interval: 'soon' is not a duration (15s, 500ms, 5m)"),
        ("poll: {interval: 0}", "k.yaml:1: poll.interval: 0 is not a duration (15s, 500ms, 5m)"),
        ("restart: {nccl: 2 GiBs}", "k.yaml:1: restart.nccl: '2 GiBs' is not a size (1048576, 512MiB, 2GiB)"),
        ("discovery: maybe", "k.yaml:1: discovery: 'maybe' is not true or false"),
        (
            "holders: {release_grace: never}",
            "k.yaml:1: holders.release_grace: 'never' is not a duration (15s, 500ms, 5m)",
        ),
        ("holders: {top: 0}", "k.yaml:1: holders.top: 0 is not a whole number of at least 1"),
        (
            "holders:\n  allowed:\n    - {}",
            "k.yaml:3: holders.allowed[0]: needs program, user, workload or container",
        ),
        ("servers:\n  - name: x", "k.yaml:2: servers[0].url: missing"),
        ("servers: 3", "k.yaml:1: servers: expected a list"),
        (
            "servers: [{url: 'ftp://x'}]",
            "k.yaml:1: servers[0].url: 'ftp://x' is not an http:// or https:// address",
        ),
        (
            "servers:\n  - url: http://a\n    flags:\n      max_model_ln: 3",
            (
                "k.yaml:4: servers[0].flags.max_model_ln: not a vLLM flag that bears on start-up"
                " (did you mean max_model_len?)"
            ),
        ),
        (
            "plans:\n  p: {gpu_memory_utilization: 1.5}",
            "k.yaml:2: plans.p.gpu_memory_utilization: 1.5 is not in (0, 1]",
        ),
        ("plans:\n  p: {server: a}", "k.yaml:2: plans.p: changes no flag"),
        ("plans:\n  p:", "k.yaml:2: plans.p: is empty"),
        ("web: {}\nweb: {}", "k.yaml:2: web: given twice"),
        ("web: [", "k.yaml:1: expected the node content, but found '<stream end>'"),
    ],
)
def test_errors_name_line_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, FILE)
    assert str(caught.value).splitlines()[0] == message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "k.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"k\.yaml"):
        load(path)


@given(st.text(max_size=200))
def test_any_text_gives_a_configuration_or_a_config_error(text: str) -> None:
    try:
        outcome: object = parse(text, FILE)
    except ConfigError as error:
        outcome = str(error)
    assert isinstance(outcome, Config) or str(outcome).startswith("k.yaml")


@given(
    st.floats(min_value=0.001, max_value=1e6),
    st.sampled_from([("ms", 0.001), ("s", 1), ("m", 60), ("h", 3600)]),
)
def test_durations(number: float, unit: tuple[str, float]) -> None:
    assert duration(f"{number:f}{unit[0]}") == pytest.approx(round(number, 6) * unit[1])


@given(st.integers(0, 10**6))
def test_sizes(number: int) -> None:
    assert size(f"{number} MiB") == number * 2**20
    assert size(f"{number}GB") == number * 10**9
    assert size(number) == number

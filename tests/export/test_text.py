from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Plan
from kvwatch.export.text import _ranges, status_text, table
from kvwatch.observe.cycle import SourceStatus
from kvwatch.observe.records import Failure, NvmlRecord
from tests.export.test_page import NOTEBOOK, cycle
from tests.nodes import observation, process, server, serving_node


def test_columns_line_up() -> None:
    text = table(("A", "NUMBER"), [("x", "1"), ("long", "22")], right=frozenset({1}))
    assert text.splitlines() == ["A     NUMBER", "x          1", "long      22"]


def test_columns_that_give_way() -> None:
    row = ("n" * 60, "x" * 30, "1")
    text = table(("NAME", "X", "N"), [row], cut={0: 12, 1: 5})
    assert text.splitlines()[1] == f"{'n' * 44}…  {'x' * 30}  1"
    text = table(("NAME", "X", "N"), [("n" * 60, "x" * 90, "1")], cut={0: 12, 1: 5})
    assert text.splitlines()[1] == f"{'n' * 11}…  {'x' * 62}…  1"
    assert table(("NAME",), [("n" * 90,)]).splitlines()[1] == "n" * 90


def test_everything_fits_80_columns() -> None:
    name = "registry-of-models/some-organisation-llama-3.3-70b-instruct-awq"
    holders = tuple((process(900 + n, "python" * 9, user="x" * 30), GIB // 2) for n in range(3))
    seen = serving_node(*holders, name=name, own=72 * GIB)
    (card,) = seen.nvml.gpus  # type: ignore[union-attr]
    long = replace(card, name="NVIDIA GeForce RTX 5090 Laptop GPU of another name")
    text = status_text(cycle(replace(seen, nvml=NvmlRecord((long,)))))
    assert max(map(len, text.splitlines())) <= 80
    assert "registry-of-models… 72.0 GiB" in text
    assert "foreign 1.50 GiB" in text


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [("", ""), ("0", "0"), ("01", "0,1"), ("0123", "0-3"), ("02345", "0,2-5"), ("10", "1,0")],
)
def test_gpus_in_a_row_are_drawn_together(gpus: str, shown: str) -> None:
    assert _ranges(tuple(gpus)) == shown
    assert _ranges(("0:1", "0:2", "0:3")) == "0:1,0:2,0:3"


def test_a_feasible_node_in_two_tables() -> None:
    lines = status_text(cycle(serving_node((NOTEBOOK, GIB)))).splitlines()
    assert lines[0].split() == ["GPU", "NAME", "TOTAL", "FREE", "HELD", "BY"]
    assert "llama 73.0 GiB, foreign 1.00 GiB" in lines[1]
    assert lines[3].split()[0] == "SERVER"
    assert lines[4].split()[:7] == ["llama", "0", "10%", "374384", "tok", "32768", "ok"]


def test_an_infeasible_restart_says_why_and_what_to_do() -> None:
    text = status_text(cycle(serving_node((NOTEBOOK, 8 * GIB), own=70 * GIB)))
    joined = " ".join(text.split())
    assert "FAILS" in text
    assert "a restart would fail: free memory on the card on GPU 0: 2.15 GiB missing" in joined
    assert "vLLM would say: Free memory on device" in joined
    assert "behind that: sampler warm-up on GPU 0: 2.64 GiB missing" in joined
    assert "remedy: stop foreign ipykernel_launcher of dana (pid 900, 8.00 GiB on GPU 0)" in joined
    assert "remedy: --gpu-memory-utilization 0.88 instead of 0.92" in joined
    assert max(map(len, text.splitlines())) <= 80


def test_an_unknown_verdict_says_what_is_missing() -> None:
    down = server(page=Failure("vllm", "connection_refused", "nothing listens on 127.0.0.1:8000"))
    text = status_text(cycle(observation((), (process(1, "x"),), (down,))))
    assert "down" in text
    assert "restart unknown (server_down): nothing listens on 127.0.0.1:8000" in " ".join(text.split())


def test_plans_are_told_beside() -> None:
    config = Config(
        plans=(
            Plan("longer", None, Flags(max_model_len=65536)),
            Plan("too-long", None, Flags(max_model_len=131072)),
            Plan("two-engines", None, Flags(data_parallel_size=2)),
        )
    )
    text = " ".join(status_text(cycle(serving_node(num_blocks=6000), config)).split())
    assert "plan longer: would start" in text
    assert "plan too-long: would fail: room for one full request; longest 95984" in text
    assert "plan two-engines: unknown (activation_unknown)" in text


def test_a_node_without_servers_or_nvml() -> None:
    text = status_text(cycle(observation(Failure("nvml", "library_not_found", "no libnvidia-ml.so.1"))))
    assert "no vLLM server found" in text


def test_what_is_down_is_told_in_80_columns() -> None:
    gone = Failure("nvml", "library_not_found", "not found: " + "word " * 30)
    status = SourceStatus("nvml", up=False, last_success=None, seconds=None, failure=gone)
    text = status_text(cycle(replace(serving_node(), nvml=gone, sources=(status,))))
    assert "\n\nnvml: not found: word" in text
    assert max(map(len, text.splitlines())) <= 80

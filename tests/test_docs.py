"""The documentation says what the code does."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvwatch.cli.main import COMMANDS, parser
from kvwatch.config import Config
from kvwatch.demo.node import DemoNode
from kvwatch.demo.scenario import load_scenario
from kvwatch.export.catalogue import FAMILIES
from kvwatch.export.document import document
from kvwatch.forecast.explain import RULES
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from tests.support import ROOT
from tools.build_docs import FILES
from tools.generated import stale

DOCS = ROOT / "docs"
NAMES = [family.name for family in FAMILIES]
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "kvwatch").rglob("*.py"))


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_reference_is_up_to_date() -> None:
    assert stale(FILES) == [], "python -m tools.build_docs"


def test_every_page_has_its_place() -> None:
    settings = re.sub(r"(?m)^hooks:\n.*", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    nav = set(leaves(yaml.safe_load(settings)["nav"]))
    pages = {str(path.relative_to(DOCS)) for path in PAGES if path.parent.name != "runbooks"}
    assert pages == nav


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


def test_every_kind_of_failed_start_is_explained() -> None:
    named = set(re.findall(r"`(\w+)`", read("why-it-wont-start.md")))
    assert set(RULES) <= named


def test_the_reasons_of_unknown_verdicts_exist() -> None:
    table = read("troubleshooting.md").split("## Memory is unattributed")[0]
    reasons = [
        reason for row in re.findall(r"(?m)^\| (`.*?) \|", table) for reason in re.findall(r"`(\w+)`", row)
    ]
    assert len(reasons) > 5
    assert [reason for reason in reasons if f'"{reason}"' not in CODE] == []


def test_the_way_back_from_every_family_leads_to_code_that_exists() -> None:
    table = read("extending.md").split("## Where does this byte come from?")[1].split("From a figure")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `kvwatch_")]
    patterns = [pattern for row in rows for pattern in re.findall(r"`(kvwatch_[a-z_*]+)`", row[0])]
    assert {one for one in patterns if not fnmatch.filter(NAMES, one)} == set()
    assert {name for name in NAMES if not any(fnmatch.fnmatch(name, one) for one in patterns)} == set()
    named = re.findall(
        r"`([a-z0-9_/]+\.py)`((?:[:,] `\w+`)*)", " ".join(cell for row in rows for cell in row[1:])
    )
    assert len(named) > 20
    for file, functions in named:
        code = (ROOT / "kvwatch" / file).read_text(encoding="utf-8")
        for function in re.findall(r"`(\w+)`", functions):
            assert f"def {function}(" in code, f"{file}: {function}"


class Minute45(DemoNode):
    """The demo's node in the minute of the worked example."""

    @property
    def minute(self) -> float:
        return 44.0


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    with Minute45(load_scenario(), speed=1) as node:
        monitor = Monitor(Observer(node, Config(), now=node.now), Config(), now=node.now, simulated=True)
        told = document(monitor.cycle())
        monitor.close()
    return told


def test_the_worked_example_has_the_codes_own_numbers(example: dict[str, Any]) -> None:
    gpu, server = example["gpus"][0], example["servers"][0]
    site, engine = server["restart"]["gpus"][0], server["engines"][0]
    block = engine["pool_bytes"] // engine["blocks"]
    numbers = {
        *(gpu["total_bytes"], gpu["reserved_bytes"], gpu["free_bytes"]),
        *(one["bytes"] for one in gpu["held"]),
        *site.values(),
        *(abs(check["margin_bytes"] or 0) for check in server["restart"]["checks"]),
        *(block, engine["pool_bytes"], engine["blocks"]),
        *(server["max_model_len"], server["max_model_len"] // engine["block_size"]),
        (engine["blocks"] - 1) * engine["block_size"],
    }
    vocabulary = json.loads((ROOT / "kvwatch/demo/data/config.json").read_text(encoding="utf-8"))[
        "vocab_size"
    ]
    numbers |= {vocabulary, 1024 * vocabulary * 4}
    told = {int(text.replace(",", "")) for text in re.findall(r"\d{1,3}(?:,\d{3})+", read("arithmetic.md"))}
    assert len(told) > 15
    assert told - numbers == set()


def examples() -> Iterator[str]:
    """Lines of shell in the documentation that call kvwatch, but those with flags of vLLM."""
    for path in [ROOT / "README.md", *PAGES]:
        for fence in FENCE.findall(path.read_text(encoding="utf-8").replace("\\\n", " ")):
            for line in fence.splitlines():
                call = re.match(r"(?:\$ )?(kvwatch .*?)(?:\s+#.*|\s*[|>&].*)?$", line.strip())
                if call and not call[1].startswith("kvwatch plan"):
                    yield call[1]


@pytest.mark.parametrize("line", sorted(set(examples())))
def test_examples_are_commands_that_exist(line: str) -> None:
    _, command, *arguments = line.split()
    assert command in COMMANDS
    parser(command).parse_args([command, *arguments])

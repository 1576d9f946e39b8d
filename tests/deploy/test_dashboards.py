"""The dashboards: Grafana's schema, the rules of dashboard-linter, and every query on recorded nodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.build import BOARDS, FOLDER, files
from dashboards.record import HOURS, write_blocks
from kvwatch.export.catalogue import BY_NAME, FAMILIES
from tests.deploy.promql import families, selectors
from tests.e2e.prometheus import Prometheus

pytestmark = pytest.mark.xdist_group("dashboards")

DOCUMENTS = {board.uid: board.as_json() for board in BOARDS}
PANELS = [(uid, panel) for uid, document in DOCUMENTS.items() for panel in document["panels"]]
TARGETS = [(uid, panel, target) for uid, panel in PANELS for target in panel["targets"]]
VARIABLES = {"$job": ".+", "$node": ".+", "$server": ".+", "$__rate_interval": "10m"}
TARGET_LABELS = {"job", "instance"}
NOT_SHOWN = {
    # The same as the verdicts beside them, by check: for alerts.
    "kvwatch_pending_blocked",
    "kvwatch_plan_blocked",
}


def panel_name(value: Any) -> str:
    return re.sub(r"\W+", "-", value["title"]) if isinstance(value, dict) and "title" in value else ""


def filled(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


# --- files ----------------------------------------------------------------------------------------------


def test_generated_files_are_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert written == files(), "run python -m dashboards.build"


@pytest.mark.parametrize("uid", DOCUMENTS)
def test_grafana_knows_every_field(uid: str) -> None:
    """What the typed model of Grafana 11.6 drops or turns into something else is not part of the schema."""
    plugins.register_default_plugins()
    read = json.loads(json.dumps(Dashboard.from_json(DOCUMENTS[uid]), cls=JSONEncoder))
    assert list(differences(DOCUMENTS[uid], read)) == []


def test_the_schema_check_notices_a_wrong_field() -> None:
    plugins.register_default_plugins()
    document = json.loads(json.dumps(DOCUMENTS["kvwatch-self"]))
    document["panels"][0]["options"]["colourMode"] = "value"
    read = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    assert list(differences(document, read)) == ["panels.0.options.colourMode"]


def differences(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths of what was written and not read back."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            place = f"{path}.{key}".lstrip(".")
            if key not in read:
                yield place
            else:
                yield from differences(value, read[key], place)
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, pair in enumerate(zip(written, read, strict=True)):
            yield from differences(*pair, f"{path}.{number}")
    elif written != read:
        yield path


# --- dashboard-linter's rules ---------------------------------------------------------------------------


@pytest.mark.parametrize("uid", DOCUMENTS)
def test_board_follows_the_linter(uid: str) -> None:
    document = DOCUMENTS[uid]
    assert document["editable"] is False
    assert document["title"]
    assert document["description"]
    datasource, *others = document["templating"]["list"]
    assert (datasource["name"], datasource["type"], datasource["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert [one["name"] for one in others][:2] == ["job", "node"]
    for variable in others:
        assert variable["label"]
        assert variable["datasource"]["uid"] == "${datasource}"
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".+")
        assert variable["refresh"] == 2
        selector = variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0]
        assert families(filled(selector)) <= set(BY_NAME)


def test_uids_are_stable() -> None:
    assert set(DOCUMENTS) == {"kvwatch-fleet", "kvwatch-node", "kvwatch-server", "kvwatch-self"}


@pytest.mark.parametrize(("uid", "panel"), PANELS, ids=panel_name)
def test_panel_follows_the_linter(uid: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]


@pytest.mark.parametrize("uid", DOCUMENTS)
def test_panels_do_not_overlap(uid: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DOCUMENTS[uid]["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize(("uid", "panel", "target"), TARGETS, ids=panel_name)
def test_query_follows_the_linter(uid: str, panel: dict[str, Any], target: dict[str, Any]) -> None:
    expression = target["expr"]
    found = list(selectors(filled(expression)))
    assert found
    for selector in found:
        family = BY_NAME[selector.name]
        matchers = {matcher.name for matcher in selector.matchers.matchers}
        assert matchers >= TARGET_LABELS
        assert matchers <= TARGET_LABELS | set(family.labels)
        if family.kind == "counter":
            assert re.search(rf"\b(rate|increase)\({selector.name}\b", expression)
    for window in re.findall(r"\[([^\]]+)\]", expression):
        assert window == "$__rate_interval"
    for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
        assert re.search(rf"\bby \([^)]*\b{label}\b", expression) or label in labels_of(found)


def test_tables_join_on_the_labels_that_name_a_row() -> None:
    for _, panel in PANELS:
        for step in panel.get("transformations", ()):
            if step["id"] == "organize":
                named = [name for name in step["options"]["renameByName"] if not name.startswith("Value")]
                for target in panel["targets"]:
                    assert f"by ({', '.join(named)})" in target["expr"], panel["title"]


def labels_of(found: list[Any]) -> set[str]:
    return TARGET_LABELS.union(*(BY_NAME[selector.name].labels for selector in found))


def test_every_family_is_shown() -> None:
    shown = set().union(*(families(filled(target["expr"])) for _, _, target in TARGETS))
    assert {family.name for family in FAMILIES} - shown == NOT_SHOWN


# --- recorded nodes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """A Prometheus with the recording, and the time at which that ends."""

    prometheus: Prometheus
    end: float


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    directory: Path = tmp_path_factory.mktemp("recorded")
    end = time.time()
    write_blocks(directory / "data", end)
    with Prometheus(directory) as prometheus:
        yield Recorded(prometheus, end)


@pytest.mark.parametrize(("uid", "panel", "target"), TARGETS, ids=panel_name)
def test_query_finds_series(
    uid: str, panel: dict[str, Any], target: dict[str, Any], recorded: Recorded
) -> None:
    expression = filled(target["expr"])
    promql_parser.parse(expression)
    series = recorded.prometheus.query_range(expression, recorded.end - HOURS * 3600, recorded.end, step=240)
    assert series

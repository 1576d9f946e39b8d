from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest as reference_text
from prometheus_client.openmetrics.exposition import generate_latest as reference_openmetrics
from prometheus_client.utils import floatToGoString

from kvwatch.export.catalogue import Family
from kvwatch.export.textformat import FamilyWriter, number, written

GAUGE = Family("kvwatch_things_bytes", "gauge", ("zone", "kind"), 'Things, "quoted", with a \\ in it.')
COUNTER = Family("kvwatch_errors_total", "counter", ("source",), "Errors.")
PLAIN = Family("kvwatch_up", "gauge", (), "Always 1.")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.one_of(st.floats(), st.integers(-(2**60), 2**60))


class Registry:
    """What the reference writes pages of."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self._metrics


@given(values)
def test_numbers_are_written_as_the_client_library_writes_them(value: float) -> None:
    assert number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]
    assert math.isnan(value) or float(number(value)) == float(value)


@given(
    st.lists(st.tuples(texts, texts, values), max_size=4),
    st.lists(st.tuples(texts, values), max_size=3),
    values,
)
def test_pages_are_those_of_the_client_library(
    gauges: list[tuple[str, str, float]], counters: list[tuple[str, float]], plain: float
) -> None:
    gauge = GaugeMetricFamily(GAUGE.name, GAUGE.help, labels=GAUGE.labels)
    for zone, kind, value in gauges:
        gauge.add_metric([zone, kind], value)
    counter = CounterMetricFamily("kvwatch_errors", COUNTER.help, labels=COUNTER.labels)
    for source, value in counters:
        counter.add_metric([source], value)
    registry = Registry(gauge, counter, GaugeMetricFamily(PLAIN.name, PLAIN.help, value=plain))
    writers = [FamilyWriter(family) for family in (GAUGE, COUNTER, PLAIN)]
    lines = [
        [writers[0].line(value, {"zone": zone, "kind": kind}) for zone, kind, value in gauges],
        [writers[1].line(value, {"source": source}) for source, value in counters],
        [writers[2].line(plain, {})],
    ]
    text = written(zip([writer.text_head for writer in writers], lines, strict=True))
    assert text == reference_text(registry)
    openmetrics = written(zip([writer.openmetrics_head for writer in writers], lines, strict=True))
    assert openmetrics + b"# EOF\n" == reference_openmetrics(registry)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("labels", [{}, {"zone": "a"}, {"zone": "a", "kind": "b", "more": "c"}])
def test_other_labels_are_an_error(labels: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        FamilyWriter(GAUGE).line(1, labels)

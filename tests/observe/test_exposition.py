from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.observe.exposition import MAX_LINE_BYTES, MAX_SERIES, FamilyFilter, MalformedPage, Sample
from tests.observe.vllm_pages import recorded, recorded_names

WANTED = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:h_bucket", "up")
FILTER = FamilyFilter(WANTED)


def oracle(text: str, names: tuple[str, ...] = WANTED) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(text)
    found = [
        (s.name, s.labels, float(s.value)) for family in families for s in family.samples if s.name in names
    ]
    return sorted(found, key=repr)


def flat(samples: dict[str, list[Sample]]) -> list[tuple[str, dict[str, str], float]]:
    return sorted(((s.name, dict(s.labels), s.value) for rows in samples.values() for s in rows), key=repr)


def reason(page: bytes) -> str:
    with pytest.raises(MalformedPage) as caught:
        FILTER.samples(page)
    return caught.value.reason


@pytest.mark.parametrize("name", recorded_names())
def test_recorded_pages_read_as_the_reference_parser_reads_them(name: str) -> None:
    text = recorded(name).decode()
    names = tuple({s.name for family in text_string_to_metric_families(text) for s in family.samples})
    assert flat(FamilyFilter(names).samples(text.encode())) == oracle(text, names)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


label_sets = st.dictionaries(
    st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    max_size=4,
)
values = st.floats().map(lambda value: repr(value).replace("inf", "Inf").replace("nan", "NaN"))
names = st.sampled_from([*WANTED, "vllm:kv_cache_usage", "vllm:num_requests_waiting_by_reason", "upper"])
blanks = st.sampled_from(["", " ", "\t", "  "])


@st.composite
def lines(draw: st.DrawFn) -> str:
    name, labels, value = draw(names), draw(label_sets), draw(values)
    gap = draw(blanks)
    inside = f",{gap}".join(f'{label}{gap}="{escaped(text)}"' for label, text in labels.items())
    comma = draw(st.sampled_from(["", ","])) if labels else ""
    shows_braces = draw(st.booleans()) or bool(labels)
    braces = f"{{{inside}{comma}}}" if shows_braces else ""
    timestamp = draw(st.sampled_from(["", " 1700000000000", " -1"]))
    return f"{draw(blanks)}{name}{gap if braces else ''}{braces} {gap}{value}{timestamp}"


@settings(max_examples=150, deadline=None)
@given(st.lists(lines(), max_size=6))
def test_generated_pages_read_as_the_reference_parser_reads_them(page: list[str]) -> None:
    text = "# HELP up a comment\n" + "".join(f"{line}\n" for line in page)
    expected = oracle(text)
    identities = [(name, sorted(labels.items())) for name, labels, _ in expected]
    if any(identities.count(identity) > 1 for identity in identities):
        assert reason(text.encode()) == "duplicate_series"
    else:
        assert repr(flat(FILTER.samples(text.encode()))) == repr(expected)


SEED = r"""vllm:kv_cache_usage_perc{engine="0",model_name="a\\b\"c"} 0.25 17
up 1.0
vllm:h_bucket{le="+Inf",} 3e2
"""
SEED_ALPHABET = '\\"{}=, \t\r\n#+-.0123456789eEinfNa_:vlmhup\x00\xa0é٣'
NAME = re.compile(f"(?:{'|'.join(WANTED)})[ \t{{]")


@st.composite
def damaged(draw: st.DrawFn) -> str:
    text = SEED
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 3))
        text = text[:at] + draw(st.text(SEED_ALPHABET, max_size=3)) + text[at + cut :]
    return text


@settings(max_examples=500, deadline=None)
@given(damaged())
def test_a_damaged_page_is_refused_or_reads_as_the_reference_parser_reads_it(text: str) -> None:
    try:
        samples = FILTER.samples(text.encode())
    except MalformedPage:
        return
    wanted_lines = [line for line in text.split("\n") if NAME.match(line.lstrip(" \t"))]
    assert repr(flat(samples)) == repr(oracle("".join(f"{line}\n" for line in wanted_lines)))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_end_in_samples_or_in_a_typed_failure(noise: bytes) -> None:
    outcome: dict[str, list[Sample]] | str
    try:
        outcome = FILTER.samples(b"up" + noise + b"\n")
    except MalformedPage as error:
        outcome = error.reason
    if isinstance(outcome, str):
        assert outcome in {"bad_sample", "not_utf8", "duplicate_series"}
    else:
        assert outcome.keys() <= {*WANTED}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (b"", "empty_page"),
        (b" \n\n", "empty_page"),
        (b"up 1.0", "truncated"),
        (b"up 1.0\nvllm:num_requests_waiting{engi", "truncated"),
        (b"up\n\nup{} \n", "bad_sample"),
        (b"up one\n", "bad_sample"),
        (b"up 1_000\n", "bad_sample"),
        (b"up 0x10\n", "bad_sample"),
        (b"up 1 2 3\n", "bad_sample"),
        ("up ٣\n".encode(), "bad_sample"),
        (b'up{a="1" 2\n', "bad_sample"),
        (b'up{a="1",a="2"} 2\n', "bad_sample"),
        (b'up{a="\\x"} 2\n', "bad_sample"),
        (b"up{a=1} 2\n", "bad_sample"),
        (b'up{a="1"b="2"} 2\n', "bad_sample"),
        (b'up{a="\xff"} 2\n', "not_utf8"),
        (b"up\r\xff\n", "not_utf8"),
        (b'up{a="1"} 2 \xff\n', "not_utf8"),
        (b"up 1\nup 1\n", "duplicate_series"),
        (b'up{a="1",b="2"} 1\nup{b="2",a="1"} 5\n', "duplicate_series"),
        (b'up{a="' + b"x" * MAX_LINE_BYTES + b'"} 1\n', "line_too_long"),
        (b"".join(b'up{a="%d"} 1\n' % n for n in range(MAX_SERIES + 1)), "too_many_series"),
    ],
)
def test_refuses(page: bytes, expected: str) -> None:
    assert reason(page) == expected


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        (b'le="1.0",engine="0"', True),
        (b'le="%s"' % (b"9" * 3000), False),
        (b",".join(b'l%d=""' % number for number in range(200)), False),
    ],
)
def test_labels_are_remembered_where_they_are_few_and_short(labels: bytes, kept: bool) -> None:
    page = b"up{%s} 1\n" % labels
    first, second = (FILTER.samples(page)["up"][0] for _ in range(2))
    assert first == second
    assert (first.labels is second.labels) == kept


def test_other_families_are_not_looked_at() -> None:
    page = b'other{a="1"} what\nup_and_away{ 1\nup{a="\\\\n\\n\\""} +Inf\nvllm:num_requests_waiting NaN\n'
    samples = FILTER.samples(page)
    assert samples["up"] == [Sample("up", {"a": '\\n\n"'}, math.inf, frozenset({("a", '\\n\n"')}))]
    assert math.isnan(samples["vllm:num_requests_waiting"][0].value)
    assert samples.keys() == {"up", "vllm:num_requests_waiting"}

"""A vLLM server's log, read for why it did not start.

Pure text in, findings out: nothing is opened here. Memory is bounded however long the log is.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvwatch.blockmath.flags import Flags
from kvwatch.observe.log_failures import ALIASES, ARGPARSE, CONSEQUENCES, FAILURES
from kvwatch.observe.log_information import INFORMATION, INFORMATIVE
from kvwatch.observe.log_messages import Message, Value, squeeze
from kvwatch.observe.logline import MAX_LINE, LogLine, split_line

MAX_TEXT = 600
MAX_FINDINGS = 256
_WINDOW_LINES = 14
_WINDOW_CHARACTERS = 6000
_RECENT_LINES = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One line (or wrapped run of lines) of the log that says something about the start.

    Attributes:
        kind: for example ``kv_needed_gt_available``; ``info_…`` and ``warn_…`` are no failures.
        numbers: as printed; the unit is in the key where the log prints one.
        text: the message without its prefixes, shortened.
        line: 1-based number of the line where the message begins.
        process: for example ``EngineCore_DP0``; None where the line does not say.
        stage: where memory ran out: ``load``, ``profile``, ``kv_alloc``, ``capture``, ``sampler`` or
            ``runtime``; None where it is not known, or memory did not run out.
    """

    kind: str
    numbers: Mapping[str, Value]
    text: str
    line: int = 1
    process: str | None = None
    pid: int | None = None
    stage: str | None = None

    @property
    def is_failure(self) -> bool:
        return not self.kind.startswith(INFORMATIVE)

    @property
    def is_consequence(self) -> bool:
        """Whether it only reports a failure that the log shows further up."""
        return self.kind in CONSEQUENCES

    def number(self, name: str) -> float | None:
        """A number of the line, None where it has no such number."""
        value = self.numbers.get(name)
        return None if isinstance(value, bool) or not isinstance(value, int | float) else value

    def printed(self, name: str) -> float:
        """A number that every message of this kind prints."""
        value = self.number(name)
        assert value is not None, f"{self.kind} prints no {name}"
        return value


@dataclass(frozen=True, slots=True)
class StartLog:
    """What the log says about the last start that failed, or about the last start where none did.

    Attributes:
        failures: distinct failures in log order.
        information: the informative lines of that start, in log order, repeats dropped.
        arguments: what the server was told, as it logged it; empty where it did not.
        version: release, for example ``0.19.0``.
        lines: how many lines were read.
        attempts: how many starts the log shows.
        started: whether that start reached the point where it serves.
        recovered: whether a later start in the same log served.
    """

    failures: tuple[Finding, ...] = ()
    information: tuple[Finding, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None
    lines: int = 0
    attempts: int = 0
    started: bool = False
    recovered: bool = False

    @property
    def root_cause(self) -> Finding | None:
        """The failure that the others follow from, None where nothing failed.

        The earliest one that is no mere consequence; an out-of-memory error whose stage is known, or that
        names the holders, explains more than one that only repeats torch's words.
        """
        return min(self.failures, key=_vagueness, default=None)

    @property
    def flags(self) -> Flags:
        """The logged arguments that bear on start-up; values that vLLM's flags do not take are left out."""
        return flags_of(self.arguments)

    def info(self, kind: str) -> tuple[Finding, ...]:
        """Informative findings of one kind, in log order."""
        return tuple(finding for finding in self.information if finding.kind == kind)


_VAGUENESS = {"unclassified_error": 2, "cuda_oom": 1, "model_not_found": 1}
"""A hub that does not answer is retried and often no matter."""


def _vagueness(finding: Finding) -> int:
    if finding.is_consequence:
        return 3
    return _VAGUENESS.get(finding.kind, 0)


def flags_of(arguments: Mapping[str, Any]) -> Flags:
    """Start-up flags of a mapping that may hold any argument of the server."""
    flags = Flags()
    for name, value in arguments.items():
        try:
            given = Flags.from_mapping({name: value}).given()
        except ValueError:
            continue
        flags = flags.with_changes(**given)
    return flags


# --- one message ----------------------------------------------------------------------------------

_LEAD = re.compile(
    r"(?:\W*[\w.]*(?:Error|Exception|Interrupt|Exit)(?:\([\w.]*\))?:)*(?:Valueerror,)?(?:Workerfailedwitherror['\"])?"
)
_SOURCE_QUOTE = re.compile(r"(?:^|[(\[,=+]|if|not|return)[rbfu]{0,2}[\"']$")


def classify_line(text: str) -> Finding | None:
    """The finding of one message, given with its prefixes and possibly wrapped over several lines.

    Returns None for text that says nothing about a start. Whether an out-of-memory error struck while loading
    or later cannot be told from one line; `read_log` can.
    """
    lines = [line for part in text.splitlines() for line in split_line(part)]
    if not lines:
        return None
    return _classify(replace(lines[0], body=" ".join(line.body for line in lines)), 1)


def _classify(line: LogLine, number: int) -> Finding | None:
    squeezed = squeeze(line.body)
    finding = None
    if line.level not in ("WARNING", "WARN", "DEBUG", "TRACE"):
        finding = _failure(line, squeezed) or _argparse_failure(line)
    finding = finding or _first_match(INFORMATION, squeezed, line)
    return finding and replace(finding, line=number, process=line.process, pid=line.pid)


def _failure(line: LogLine, squeezed: str) -> Finding | None:
    return _first_match(FAILURES, squeezed, line, guarded=True)


def _first_match(
    messages: tuple[Message, ...], squeezed: str, line: LogLine, *, guarded: bool = False
) -> Finding | None:
    for message in messages:
        if not _mentions(squeezed, message.anchors):
            continue
        match = message.pattern.search(squeezed)
        if match is None or (guarded and not _is_said(squeezed[: match.start()], line)):
            continue
        numbers = message.parse(match)
        numbers |= {alias: numbers[name] for name, alias in ALIASES.items() if name in numbers}
        return Finding(message.name(match), numbers, _shorten(line.body))
    return None


def _mentions(text: str, words: tuple[str, ...]) -> bool:
    for word in words:  # noqa: SIM110 -- any() takes half as long again, on every line of a log
        if word in text:
            return True
    return False


def _is_said(before: str, line: LogLine) -> bool:
    """Whether a message is reported at this place, and not quoted by source code or by a logged request."""
    if line.level in ("INFO", "NOTICE") and not _LEAD.fullmatch(before):
        return False
    return not _SOURCE_QUOTE.search(before)


def _argparse_failure(line: LogLine) -> Finding | None:
    if "error: " not in line.body:
        return None
    for kind, pattern in ARGPARSE:
        if match := pattern.search(line.body):
            numbers: dict[str, Value] = {
                name: value.strip() for name, value in match.groupdict().items() if value is not None
            }
            return Finding(kind, numbers, _shorten(line.body))
    return None


def _shorten(text: str) -> str:
    plain = " ".join(text[: 4 * MAX_TEXT].split())
    return plain if len(plain) <= MAX_TEXT else plain[: MAX_TEXT - 1] + "…"


# --- what the server was told ---------------------------------------------------------------------

_ARGUMENTS = re.compile(
    r"non-default args: (?P<dict>\{.*)|args: Namespace\((?P<namespace>.*)|with config: (?P<config>.*)"
)
_VERSION = re.compile(
    r"(?:LLM engine \(v|vLLM API server version |█\s+version )(?P<version>\d+\.\d+[\w.+-]*)"
)
_NEW_START = ("non-default args: ", "args: Namespace(", "vLLM API server version ")
_ARGUMENT_NAMES = frozenset(Flags.__dataclass_fields__)
_ENGINE_NAMES = {"max_seq_len": "max_model_len"}
_PAIR = re.compile(
    r"'?(?P<name>\w+)'?(?:=|: )(?P<value>'[^']*'|\"[^\"]*\"|-?\d+(?:\.\d+)?(?![\w.])|True|False|None)"
)


def logged_arguments(body: str) -> dict[str, Any]:
    """Arguments in a line that prints a dict, a Namespace or the engine's configuration; empty for any other.

    Objects without a literal form are skipped; nothing is evaluated.
    """
    match = _ARGUMENTS.search(body)
    if match is None:
        return {}
    whole = _literal(match["dict"] or "")
    if isinstance(whole, dict):
        return {name: value for name, value in whole.items() if isinstance(name, str)}
    pairs = _PAIR.findall(match["dict"] or match["namespace"] or match["config"] or "")
    values = {_ENGINE_NAMES.get(name, name): _literal(value) for name, value in pairs}
    return {name: value for name, value in values.items() if name in _ARGUMENT_NAMES and value is not None}


def _literal(text: str) -> object:
    """The value of a Python literal, None for any other text."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


# --- the whole log --------------------------------------------------------------------------------

_FRAME = re.compile(r'\s*File "[^"]+", line \d+, in (?P<function>[\w<>.]+)')
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt))(?::|$)")
_STAGES_BY_FUNCTION = (
    ("sampler", frozenset({"_dummy_sampler_run", "_dummy_pooler_run"})),
    ("profile", frozenset({"profile_cudagraph_memory"})),
    ("capture", frozenset({"capture_model", "capture_graph", "capture_graphs", "_capture_cudagraphs"})),
    (
        "kv_alloc",
        frozenset(
            {
                "initialize_kv_cache",
                "initialize_kv_cache_tensors",
                "_allocate_kv_cache",
                "_allocate_kv_cache_tensors",
                "_init_cache_engine",
                "init_kv_cache",
            }
        ),
    ),
    ("profile", frozenset({"profile_run", "determine_available_memory", "determine_num_available_blocks"})),
    ("load", frozenset({"load_model", "load_weights", "get_model", "initialize_model"})),
)
_STAGES_BY_PROGRESS = {
    "info_load_started": "load",
    "info_load": "profile",
    "info_kv_avail": "kv_alloc",
    "info_blocks": "kv_alloc",
    "info_kv_tokens": "kv_alloc",
    "info_kv_tokens_and_concurrency": "kv_alloc",
    "info_capture_started": "capture",
    "info_graph": "sampler",
    "info_started": "runtime",
}
_KIND_BY_STAGE = {
    "load": "cuda_oom_load",
    "kv_alloc": "cuda_oom_kv_alloc",
    "capture": "cuda_oom_cudagraph_capture",
    "sampler": "cuda_oom_sampler_warmup",
    "runtime": "cuda_oom_runtime",
}
_FAILURE_ANCHORS = tuple(dict.fromkeys(anchor for message in FAILURES for anchor in message.anchors))
_SERVING = ("HTTP/1.", "Avg prompt throughput", "Received request ", "Added request ")
"""What a serving log is full of; requests can quote anything."""
_NOT_WHILE_SERVING = frozenset({"config_invalid", "config_validation_failed", "model_not_found"})
"""A serving log has the like of these from requests."""
_ONE_LINE = frozenset(kind for kind, _ in ARGPARSE)
_WORDS = (
    *dict.fromkeys(anchor for message in FAILURES + INFORMATION for anchor in message.anchors),
    *("Traceback", ",line", "rror", "Exception", "args:", "version", "withconfig:"),
)


def read_log(lines: Iterable[str]) -> StartLog:
    """Read a log, line by line.

    Args:
        lines: with or without line ends. Lines longer than 64 KiB are cut.
    """
    reader = _Reader()
    for line in lines:
        reader.feed(line)
    return reader.result()


def classify_lines(lines: Iterable[str]) -> Iterator[Finding | None]:
    """`classify_line` of each line, each looked at by itself."""
    return (classify_line(line) for line in lines)


@dataclass(slots=True)
class _Attempt:
    """One start of the server."""

    failures: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    information: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    version: str | None = None
    started: bool = False
    stage: str | None = None
    last_error: Finding | None = None

    def add(self, finding: Finding) -> None:
        kept = self.failures if finding.is_failure else self.information
        key = (finding.kind, repr(sorted(finding.numbers.items())))
        if len(kept) < MAX_FINDINGS:
            kept.setdefault(key, finding)


@dataclass(slots=True)
class _Window:
    """A message that may go on in the lines to come."""

    line: LogLine
    number: int
    finding: Finding | None
    lines_left: int = _WINDOW_LINES


@dataclass(slots=True)
class _Traceback:
    """The traceback a process is printing."""

    functions: set[str] = field(default_factory=set)
    after_frame: bool = False


def _tells_more(finding: Finding, known: Finding | None) -> bool:
    return known is None or (finding.kind, finding.numbers) != (known.kind, known.numbers)


class _Reader:
    """Feeds lines, keeps the last failed start and the current one."""

    def __init__(self) -> None:
        self._lines = 0
        self._restarts = 0
        self._current = _Attempt()
        self._failed: _Attempt | None = None
        self._window: _Window | None = None
        self._recent: deque[str] = deque(maxlen=_RECENT_LINES)
        self._tracebacks: dict[str | None, _Traceback] = {}

    def feed(self, raw: str) -> None:
        """Take one line. Most lines hold no word that matters, which substring search finds out fast."""
        self._lines += 1
        if self._current.started and _mentions(raw, _SERVING):
            return
        raw = raw[:MAX_LINE]
        if self._window is not None or _mentions(squeeze(raw), _WORDS):
            for line in split_line(raw):
                self._take(line)
        self._recent.append(raw)

    def _take(self, line: LogLine) -> None:
        traceback = self._traceback(line)
        if traceback.after_frame and line.body.startswith("    "):
            traceback.after_frame = False
            return
        traceback.after_frame = False
        if self._read_traceback(line, traceback):
            self._close_window()
            return
        self._read_arguments(line)
        finding = _classify(line, self._lines)
        if self._window is not None:
            if finding is None and self._extend(self._window, line):
                return
            self._close_window()
        if finding is not None and finding.is_failure and finding.kind not in _ONE_LINE:
            self._window = _Window(line, self._lines, finding)
        elif finding is not None:
            self._keep(finding)
        elif _mentions(squeeze(line.body), _FAILURE_ANCHORS):
            self._open_window(line)
        else:
            self._remember_exception(line, traceback)

    # tracebacks

    def _traceback(self, line: LogLine) -> _Traceback:
        if line.process not in self._tracebacks and len(self._tracebacks) > MAX_FINDINGS:
            self._tracebacks.clear()
        return self._tracebacks.setdefault(line.process, _Traceback())

    def _read_traceback(self, line: LogLine, traceback: _Traceback) -> bool:
        if line.body.lstrip().startswith("Traceback (most recent call last)"):
            traceback.functions.clear()
            return True
        match = _FRAME.match(line.body)
        if match is None:
            return False
        if len(traceback.functions) < MAX_FINDINGS:
            traceback.functions.add(match["function"])
        traceback.after_frame = True
        return True

    def _remember_exception(self, line: LogLine, traceback: _Traceback) -> None:
        if not traceback.functions or self._current.last_error is not None:
            return
        match = _EXCEPTION.match(line.body)
        if match and line.level not in ("WARNING", "INFO", "DEBUG"):
            self._current.last_error = Finding(
                "unclassified_error",
                {"exception": match["type"]},
                _shorten(line.body),
                self._lines,
                line.process,
                line.pid,
            )

    # messages over several lines

    def _open_window(self, line: LogLine) -> None:
        """Start from the lines before: the fragment that was recognised need not be the message's first."""
        earlier = [part for raw in self._recent for part in split_line(raw)]
        for start in range(len(earlier)):
            joined = replace(line, body=" ".join(part.body for part in [*earlier[start:], line]))
            finding = _classify(replace(joined, level=line.level or earlier[start].level), self._lines)
            if finding is not None and finding.is_failure:
                self._window = _Window(
                    joined,
                    self._lines - len(earlier) + start,
                    replace(finding, line=self._lines - len(earlier) + start),
                )
                return
        body = " ".join(part.body for part in [*earlier, line])
        self._window = _Window(replace(line, body=body), self._lines, None)

    def _extend(self, window: _Window, line: LogLine) -> bool:
        """Join a line to the window if it can go on the message; whether it was taken."""
        window.lines_left -= 1
        stripped = line.body.strip()
        if window.lines_left <= 0 or not stripped or len(window.line.body) > _WINDOW_CHARACTERS:
            return False
        if line.process not in (None, window.line.process):
            return True  # another process wrote in between; its own messages are taken before this
        if line.level not in (None, window.line.level) or _EXCEPTION.match(stripped):
            return False
        joined = replace(window.line, body=f"{window.line.body} {stripped}")
        finding = _classify(joined, window.number)
        window.line = joined
        if finding is not None and finding.is_failure and _tells_more(finding, window.finding):
            window.finding = finding
        return True

    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is not None and window.finding is not None:
            self._keep(window.finding)

    # what is kept

    def _keep(self, finding: Finding) -> None:
        attempt = self._current
        if attempt.started and finding.kind in _NOT_WHILE_SERVING:
            return
        if finding.kind.startswith("cuda_oom"):
            finding = self._with_stage(finding)
        if finding.kind == "info_started":
            attempt.started = True
        attempt.stage = _STAGES_BY_PROGRESS.get(finding.kind, attempt.stage)
        attempt.add(finding)

    def _with_stage(self, finding: Finding) -> Finding:
        traceback = self._tracebacks.get(finding.process)
        functions = traceback.functions if traceback else set()
        stage = next(
            (stage for stage, names in _STAGES_BY_FUNCTION if names & functions), self._current.stage
        )
        kind = _KIND_BY_STAGE.get(stage or "", "cuda_oom") if finding.kind == "cuda_oom" else finding.kind
        return replace(finding, kind=kind, stage=stage)

    def _read_arguments(self, line: LogLine) -> None:
        if _mentions(line.body, _NEW_START):
            self._next_attempt()
        if match := _VERSION.search(line.body):
            self._current.version = match["version"]
        arguments = logged_arguments(line.body)
        if arguments:
            self._current.arguments = {**arguments, **self._current.arguments}

    def _next_attempt(self) -> None:
        """Begin anew, unless the start at hand has only printed the first of its opening lines."""
        self._close_window()
        if not self._current.failures and not self._current.started:
            return
        if self._current.failures:
            self._failed = self._current
        self._current = _Attempt()
        self._restarts += 1
        self._tracebacks.clear()

    def result(self) -> StartLog:
        self._close_window()
        current = self._current
        chosen = current if current.failures or self._failed is None else self._failed
        failures = tuple(chosen.failures.values())
        if failures and chosen.last_error is not None and all(finding.is_consequence for finding in failures):
            failures = (chosen.last_error, *failures)
        return StartLog(
            failures=failures,
            information=tuple(chosen.information.values()),
            arguments=chosen.arguments,
            version=chosen.version,
            lines=self._lines,
            attempts=self._restarts + 1 if self._lines else 0,
            started=chosen.started,
            recovered=chosen is not current and current.started,
        )

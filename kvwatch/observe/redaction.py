"""What is taken out of a cycle's records before they leave the node in a capture.

Removed: command lines, but for what kvwatch recognises a program by; environment variables that are not in
`kvwatch.observe.launch.ENVIRONMENT`; users' names; home directories; user, password and query of addresses;
whatever has the name or the form of a key or token; long texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvwatch.config import Config, Rule
from kvwatch.observe.command_line import is_preload, server_arguments
from kvwatch.observe.cycle import Observation
from kvwatch.observe.launch import ENVIRONMENT
from kvwatch.observe.processes import SPAWNED, python_arguments
from kvwatch.observe.records import Failure, Launch, Process

REDACTED = "[redacted]"
LONGEST_TEXT = 1000
"""Characters. A chat template within a config.json is longer, anything that bears on memory is shorter."""
FIRST_PERSONAL_UID = 1000
"""Accounts below belong to services (login.defs); they tell nothing of a person and say what a process is."""

KINDS: Mapping[str, str] = {
    "command_lines": "command lines, reduced to what kvwatch recognises a program by",
    "environment": "environment variables that kvwatch has no use for",
    "users": "user names, now user1, user2 and so on",
    "homes": "home directories, now ~",
    "addresses": "addresses, their user, password and query",
    "secrets": "values with the name or the form of a key, password or token",
    "long_texts": f"texts of more than {LONGEST_TEXT} characters",
}
"""What each count of `Redacted.removed` is a count of."""

_TITLE = re.compile(r"[\w.-]+::[A-Za-z][\w.:-]{0,63}")
_SENSITIVE = (
    r"(?:api|access|private)[_-]?key|secret|passw(?:or)?d|credentials?|authorization"
    r"|(?:^|(?<=[_.-]))(?:auth|bearer)|token"
)
_SENSITIVE_KEY = re.compile(rf"(?:{_SENSITIVE})$", re.IGNORECASE)
_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s'",;]+)"""
_NOT_A_NUMBER = r"(?!\d+(?:\.\d+)?(?![\w.-]))"
_SECRETS = (
    re.compile(
        rf"((?:{_SENSITIVE})(?![a-z])[\w-]*[\"']?\s*[=:]\s*(?:(?:bearer|basic)\s+)?){_NOT_A_NUMBER}{_WORD}",
        re.IGNORECASE,
    ),
    re.compile(rf"(--[\w-]*(?:key|token|secret|password)(?![a-z])[\w-]*[=\s]\s*){_WORD}", re.IGNORECASE),
    re.compile(rf"(\b(?:bearer|basic)\s+){_WORD}", re.IGNORECASE),
    re.compile(
        r"()\b(?:hf_[A-Za-z0-9]{16,}|(?:sk|pk|nvapi|glpat|xox[abprs])-[\w-]{12,}|gh[pousr]_[A-Za-z0-9]{16,}"
        r"|github_pat_\w{16,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?)"
    ),
)
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s'\"<>]*)", re.IGNORECASE)
_SINGLE_SLASH = re.compile(r"^([A-Za-z][\w+.-]+:/)(?!/)")
"""The start of an address that was taken for a path."""
_PATH = re.compile(r"(?<![\w.~/-])(?!(?<=:)//)~?/[^\s'\":,;]*")
_OTHERS_HOME = re.compile(r"(?<![\w/.-])~[A-Za-z_][\w.-]*")
_HOME = re.compile(r"^((?:/+proc/+\d+/+root)?)(?:/+root|(?:/+[\w.-]+)?/+(?:home|Users)/+[^/]+)(?=/|$)")
_PERSONAL_SLICE = re.compile(r"\buser([-@])[1-9]\d{3,}(?=\.)")


_PASSES = 8
"""At most: what one pass takes out can bring to light what the next one finds."""


@dataclass(frozen=True, slots=True)
class Redacted:
    """What may leave the node. ``removed`` counts what does not, by the names in `KINDS`."""

    observation: Observation
    config: Config
    removed: Mapping[str, int]


def redact(observation: Observation, config: Config, *, keep_names: bool = False) -> Redacted:
    """Both without what is private. Applied to its own result it changes nothing.

    Args:
        keep_names: leave users' names as they are.
    """
    redactor = _Redactor(observation, keep_names=keep_names)
    clean, clean_config = redactor.value(observation), redactor.config(config)
    return Redacted(clean, clean_config, {kind: redactor.removed[kind] for kind in KINDS})


def recognised_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """The shortest command line that kvwatch takes for the same kind of program.

    A title (``VLLM::EngineCore``) stays, a vLLM server becomes ``vllm serve``, a Python program ``python``
    (with the mark of multiprocessing where it has that); of others nothing is left.
    """
    if not argv:
        return ()
    title = argv[0].partition(" ")[0]
    if _TITLE.fullmatch(title):
        return (title,)
    if server_arguments(argv) is not None:
        return ("vllm", "serve")
    if is_preload(argv):
        return ("vllm", "preload")
    if python_arguments(argv) is None:
        return ()
    return ("python", "-c", "", SPAWNED) if SPAWNED in argv else ("python",)


def _processes(observation: Observation) -> list[Process]:
    record = observation.processes
    return [] if isinstance(record, Failure) else list(record.processes.values())


def _pseudonyms(processes: Iterable[Process]) -> Mapping[str, str]:
    """``user1`` for the person with the lowest uid, and so on."""
    people = {one.user: one.uid or 0 for one in processes if one.user is not None and _is_person(one)}
    ordered = sorted(people, key=lambda name: (people[name], len(name), name))
    return {name: f"user{number}" for number, name in enumerate(ordered, 1)}


def _is_person(process: Process) -> bool:
    if process.uid is None:
        return process.user != "root"
    return process.uid >= FIRST_PERSONAL_UID


def _homes(observation: Observation) -> list[str]:
    """Home directories that the servers name, the longest first."""
    told = {server.launch.environment.get("HOME", "").rstrip("/") for server in observation.servers}
    return sorted((home for home in told if home.startswith("/")), key=len, reverse=True)


class _Redactor:
    """One pass over one capture's values."""

    def __init__(self, observation: Observation, *, keep_names: bool) -> None:
        processes = _processes(observation)
        self._keep_names = keep_names
        self._users = sorted({one.user for one in processes if one.user is not None})
        self._names = {} if keep_names else _pseudonyms(processes)
        self._homes = _homes(observation)
        self._tokens = _words(self._names)
        self._words = _words(name for name in self._names if len(name) > 2 and not name.isdigit())
        self.removed: Counter[str] = Counter({"users": len(self._names)})

    def value(self, value: Any) -> Any:
        """Any part of the records, with the same type."""
        match value:
            case str():
                return self._text(value)
            case Path():
                return Path(self._text(_SINGLE_SLASH.sub(r"\1/", str(value))))
            case Process():
                return self._process(value)
            case Launch():
                return self._launch(value)
            case Failure():
                return replace(value, detail=self._renamed(self._text(value.detail), self._words))
            case Mapping():
                return {self.value(key): self._entry(key, item) for key, item in value.items()}
            case tuple() | frozenset() | list():
                return type(value)(self.value(item) for item in value)
            case _ if is_dataclass(value) and not isinstance(value, type):
                return replace(value, **self._fields(value))
            case _:
                return value

    def config(self, config: Config) -> Config:
        """The configuration; rules about users name those whom this capture knows, by their new names."""
        holders = config.holders
        clean: Config = self.value(config)
        return replace(
            clean,
            holders=replace(
                clean.holders,
                allowed=self._rules(holders.allowed),
                neighbours=self._rules(holders.neighbours),
            ),
        )

    # --- records ---

    def _fields(self, record: Any) -> dict[str, Any]:
        return {field.name: self.value(getattr(record, field.name)) for field in fields(record)}

    def _process(self, process: Process) -> Process:
        argv = recognised_arguments(process.argv)
        self.removed["command_lines"] += argv != process.argv
        person = not self._keep_names and _is_person(process)
        user = process.user
        changes = {
            **self._fields(replace(process, argv=())),
            "name": self._title(self._text(process.name)),
            "argv": argv,
            "user": self._names.get(user, user) if user is not None else None,
            "uid": None if person else process.uid,
            "cgroup": self._group(process.cgroup),
            "unit": self._group(process.unit),
        }
        return replace(process, **changes)

    def _launch(self, launch: Launch) -> Launch:
        known = {name: text for name, text in launch.environment.items() if name in ENVIRONMENT}
        self.removed["environment"] += len(launch.environment) - len(known)
        return replace(launch, **self._fields(replace(launch, environment=known)))

    def _rules(self, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(
            replace(self.value(rule), user=user, workload=self._group(rule.workload))
            for rule in rules
            for user in self._matching(rule.user)
        )

    def _matching(self, pattern: str | None) -> Iterable[str | None]:
        """The users of this capture that a pattern means; a pattern without letters names nobody."""
        if self._keep_names or pattern is None or not re.search(r"\w", pattern):
            return (pattern,)
        return [self._names.get(user, user) for user in self._users if fnmatchcase(user, pattern)]

    def _entry(self, key: Any, item: Any) -> Any:
        if isinstance(key, str) and isinstance(item, str) and item and _SENSITIVE_KEY.search(key):
            return self._counted("secrets", item, REDACTED)
        return self.value(item)

    # --- texts ---

    def _text(self, text: str) -> str:
        if len(text) > LONGEST_TEXT:
            return self._counted("long_texts", text, f"[{len(text)} characters removed]")
        for _ in range(_PASSES):
            before, text = text, self._pass(text)
            if text == before:
                break
        return text

    def _pass(self, text: str) -> str:
        if "://" in text:
            text = _ADDRESS.sub(self._address, text)
        for secret in _SECRETS:
            text = secret.sub(lambda found: self._counted("secrets", found[0], found[1] + REDACTED), text)
        text = _OTHERS_HOME.sub(lambda found: self._counted("homes", found[0], "~"), text)
        return _PATH.sub(self._path, text) if "/" in text else text

    def _address(self, found: re.Match[str]) -> str:
        scheme, rest = found.groups()
        kept = re.split(r"[?#]", rest, maxsplit=1)[0]
        if "@" in kept:
            kept = kept.rpartition("@")[2]
        elif "@" in rest and "/" not in kept:
            kept = REDACTED
        self.removed["addresses"] += kept != rest
        host, slash, path = kept.partition("/")
        path = self._shortened(slash + path)
        return f"{scheme}{host}{'/' if host and path.startswith('~') else ''}{path}"

    def _path(self, found: re.Match[str]) -> str:
        return self._shortened(found[0])

    def _shortened(self, path: str) -> str:
        for home in self._homes:
            if path == home or path.startswith(f"{home}/"):
                path = self._counted("homes", path, f"~{path[len(home) :]}")
        if match := _HOME.match(path):
            short = f"{match[1]}/~" if match[1] else "~"
            path = self._counted("homes", path, short + path[match.end() :])
        return "/".join(self._names.get(part, part) for part in path.split("/"))

    def _title(self, name: str) -> str:
        """A program's name stays; what it says of itself after that (``postgres: alice``) may name people."""
        program, blank, rest = name.partition(" ")
        return program + blank + self._renamed(rest, self._tokens)

    def _group(self, text: str | None) -> str | None:
        """A cgroup path or unit, in which a user's name is a word among others."""
        if text is None or self._keep_names:
            return text and self._text(text)
        return self._renamed(_PERSONAL_SLICE.sub(r"user\1~", self._text(text)), self._tokens)

    def _renamed(self, text: str, names: re.Pattern[str] | None) -> str:
        return names.sub(lambda found: self._names[found[0]], text) if names else text

    def _counted(self, kind: str, before: str, after: str) -> str:
        self.removed[kind] += before != after
        return after


def _words(names: Iterable[str]) -> re.Pattern[str] | None:
    """Matches each of the names where it stands alone."""
    longest_first = sorted(names, key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(map(re.escape, longest_first))})(?![^\W_])")

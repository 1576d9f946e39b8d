"""A systemd unit as systemd would load it: its file, its drop-ins, and the command that they come to.

Rules as of systemd.unit(5), systemd.service(5) and systemd.exec(5): search paths in their order, drop-ins by
name across all paths, an empty assignment clears a list, ``%`` specifiers before ``$`` variables.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvwatch.blockmath.errors import Unsupported
from kvwatch.observe.nextstart_command import StartCommand, serving_command
from kvwatch.observe.nextstart_files import TrackedFiles

SYSTEM_PATHS = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
)
_USER_PATHS = (
    "{home}/.config/systemd/user.control",
    "/run/user/{uid}/systemd/user.control",
    "/run/user/{uid}/systemd/transient",
    "/run/user/{uid}/systemd/generator.early",
    "{home}/.config/systemd/user",
    "/etc/systemd/user",
    "/run/user/{uid}/systemd/user",
    "/run/systemd/user",
    "/run/user/{uid}/systemd/generator",
    "{home}/.local/share/systemd/user",
    "/usr/local/lib/systemd/user",
    "/usr/lib/systemd/user",
    "/run/user/{uid}/systemd/generator.late",
)
_NULL = "/dev/null"
_SECTION = "Service"
_PREFIXES = "@-:+!|"
_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)\})")
_WHOLE_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_SET_BY_SYSTEMD = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "MAINPID", "INVOCATION_ID", "JOURNAL_STREAM"),
        *(
            f"{kind}_DIRECTORY"
            for kind in ("RUNTIME", "STATE", "CACHE", "LOGS", "CONFIGURATION", "CREDENTIALS")
        ),
        "XDG_RUNTIME_DIR",
    }
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}


@dataclass(frozen=True, slots=True)
class Manager:
    """The systemd instance that runs a unit: the system's, or a user's.

    Attributes:
        paths: directories of unit files, the first one wins.
        uid, home, user: of the user; root's for the system's.
    """

    paths: tuple[str, ...] = SYSTEM_PATHS
    is_system: bool = True
    uid: int = 0
    home: str | None = "/root"
    user: str | None = "root"

    @classmethod
    def of_user(cls, uid: int, user: str | None, home: str | None) -> Manager:
        """A user's own instance."""
        paths = (path for path in _USER_PATHS if home is not None or "{home}" not in path)
        found = tuple(path.format(home=home, uid=uid) for path in paths)
        return cls(found, is_system=False, uid=uid, home=home, user=user)


def unit_command(name: str, manager: Manager, files: TrackedFiles) -> StartCommand | None:
    """The server that a unit starts, None where it starts something else.

    Raises:
        Unsupported: the unit is not to be found, is masked, or its command cannot be told.
    """
    path = _unit_file(name, manager, files)
    texts = [files.required(path), *(files.required(each) for each in _drop_ins(name, manager, files))]
    return command_of(name, texts, manager, files)


def command_of(name: str, texts: Sequence[str], manager: Manager, files: TrackedFiles) -> StartCommand | None:
    """The server that a unit of these texts (unit file, then drop-ins) starts.

    Raises:
        Unsupported: its command cannot be told.
    """
    return _Unit(name, manager, files, _settings(texts)).command()


def _unit_file(name: str, manager: Manager, files: TrackedFiles) -> str:
    template = _template(name)
    for candidate in [name, *([template] if template else [])]:
        for directory in manager.paths:
            path = f"{directory}/{candidate}"
            if files.target(path) == _NULL:
                raise Unsupported("unit_masked", f"{name} is masked: it cannot be started")
            if files.exists(path):
                return path
    raise Unsupported("unit_not_found", f"the file of unit {name} is in none of systemd's directories")


def _template(name: str) -> str | None:
    prefix, at, rest = name.partition("@")
    return f"{prefix}@.{rest.rpartition('.')[2]}" if at else None


def _drop_ins(name: str, manager: Manager, files: TrackedFiles) -> list[str]:
    """Drop-ins in the order in which they apply; of one file name the first directory's counts."""
    found: dict[str, str] = {}
    stems = list(_drop_in_stems(name))
    places = [f"{directory}/{stem}.d" for directory in manager.paths for stem in stems]
    places += [f"{directory}/{name.rpartition('.')[2]}.d" for directory in manager.paths]
    for place in places:
        for file in files.names(place):
            if file.endswith(".conf"):
                found.setdefault(file, f"{place}/{file}")
    return [path for _, path in sorted(found.items()) if files.target(path) != _NULL]


def _drop_in_stems(name: str) -> Iterator[str]:
    """``a-b@1.service``, ``a-.service`` for each dash, then the template."""
    yield name
    base, _, suffix = name.rpartition(".")
    prefix = base.partition("@")[0]
    for place in reversed([at for at, character in enumerate(prefix) if character == "-"]):
        if place + 1 < len(base):
            yield f"{prefix[: place + 1]}.{suffix}"
    if template := _template(name):
        yield template


# --- the text ------------------------------------------------------------------------------------------


def _settings(texts: Iterable[str]) -> dict[str, list[str]]:
    """Assignments of the service section by name, in order; an empty one clears those before."""
    settings: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        section = ""
        for line in _logical_lines(text):
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1]
                continue
            name, equals, value = line.partition("=")
            if section != _SECTION or not equals:
                continue
            if value.strip():
                settings[name.strip()].append(value.strip())
            else:
                settings[name.strip()].clear()
    return settings


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with continuations joined; comments are left out, also between a line and its continuation."""
    pending: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("#", ";")) or (not stripped and not pending):
            continue
        if stripped.endswith("\\"):
            pending.append(stripped[:-1])
            continue
        yield " ".join([*pending, stripped]).strip()
        pending.clear()
    if pending:
        yield " ".join(pending).strip()


def _words(text: str) -> list[str]:
    """Words between blanks; quotes group, backslashes escape as in C."""
    words: list[str] = []
    current: str | None = None
    quote = ""
    characters = iter(text)
    for character in characters:
        if character == "\\":
            current = (current or "") + _escaped(characters)
        elif quote:
            quote, current = ("", current) if character == quote else (quote, (current or "") + character)
        elif character in "'\"":
            quote, current = character, current or ""
        elif character in " \t\n":
            if current is not None:
                words.append(current)
            current = None
        else:
            current = (current or "") + character
    if quote:
        raise Unsupported("broken_unit", f"a {quote} is not closed")
    return words if current is None else [*words, current]


def _escaped(characters: Iterator[str]) -> str:
    letter = next(characters, "")
    if letter == "x":
        digits = next(characters, "") + next(characters, "")
        try:
            return chr(int(digits, 16)) if digits != "00" else ""
        except ValueError:
            raise Unsupported("broken_unit", f"\\x{digits} is no escape sequence") from None
    return _ESCAPES.get(letter, letter)


# --- the unit ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unit:
    """One unit with its settings merged."""

    name: str
    manager: Manager
    files: TrackedFiles
    settings: Mapping[str, list[str]]

    def command(self) -> StartCommand | None:
        environment, whole = self._environment()
        for line in self.settings.get("ExecStart", []):
            base = StartCommand(
                argv=tuple(self._arguments(line, environment, whole=whole)),
                environment=environment,
                whole_environment=whole,
                cwd=self._working_directory(),
            )
            if (found := serving_command(base, self.files.text)) is not None:
                return found
        return None

    def _arguments(self, line: str, environment: Mapping[str, str], *, whole: bool) -> list[str]:
        stripped = line.lstrip(_PREFIXES)
        prefixes = line[: len(line) - len(stripped)]
        words = [self._specified(word) for word in _words(stripped)]
        if "@" in prefixes:
            words = [*words[:1], *words[2:]]
        if ":" in prefixes:
            return words
        return [text for word in words for text in self._expanded(word, environment, whole=whole)]

    def _expanded(self, word: str, environment: Mapping[str, str], *, whole: bool) -> list[str]:
        """``$NAME`` as a word of its own is split at blanks; ``${NAME}`` never is."""
        if match := _WHOLE_VARIABLE.fullmatch(word):
            return _words(self._value(match[1], environment, whole=whole))
        return [
            _VARIABLE.sub(
                lambda found: self._value(found[1], environment, whole=whole) if found[1] else "$", word
            )
        ]

    def _value(self, name: str, environment: Mapping[str, str], *, whole: bool) -> str:
        value = environment.get(name)
        if value is None and (not whole or name in _SET_BY_SYSTEMD):
            raise Unsupported("dynamic_variable", f"{self.name} uses ${name}, whose value no file tells")
        return value or ""

    def _environment(self) -> tuple[dict[str, str], bool]:
        """Variables in systemd's order (files win), and whether the files tell all of them."""
        environment: dict[str, str] = {}
        for line in self.settings.get("Environment", []):
            for word in _words(line):
                name, equals, value = self._specified(word).partition("=")
                if equals:
                    environment[name] = value
        whole = self.manager.is_system and not self.settings.get("PassEnvironment")
        for entry in self.settings.get("EnvironmentFile", []):
            path = self._specified(entry.removeprefix("-"))
            try:
                environment.update(environment_file(self.files.text(path)))
            except FileNotFoundError:
                if not entry.startswith("-"):
                    raise Unsupported("environment_file_missing", f"{path} does not exist") from None
            except (OSError, Unsupported):
                whole = False
        for line in self.settings.get("UnsetEnvironment", []):
            for word in _words(line):
                environment.pop(word.partition("=")[0], None)
        return environment, whole

    def _working_directory(self) -> str | None:
        given = self.settings.get("WorkingDirectory")
        if not given:
            return "/" if self.manager.is_system else self.manager.home
        path = self._specified(given[-1].removeprefix("-"))
        if path != "~":
            return path
        return None if self.manager.is_system else self.manager.home

    def _specified(self, text: str) -> str:
        return re.sub("%(.)", self._specifier, text) if "%" in text else text

    def _specifier(self, found: re.Match[str]) -> str:
        stem = self.name.rpartition(".")[0]
        prefix, at, named = stem.partition("@")
        instance = None if at and not named else named
        system = self.manager.is_system
        runtime = "/run" if system else f"/run/user/{self.manager.uid}"
        known: dict[str, str | None] = {
            "%": "%",
            "n": self.name,
            "N": stem,
            "p": prefix,
            "P": _unescaped(prefix),
            "i": instance,
            "I": None if instance is None else _unescaped(instance),
            "j": prefix.rpartition("-")[2],
            "J": _unescaped(prefix.rpartition("-")[2]),
            "t": runtime,
            "S": "/var/lib" if system else None,
            "C": "/var/cache" if system else None,
            "L": "/var/log" if system else None,
            "E": "/etc" if system else None,
            "h": self.manager.home,
            "u": self.manager.user,
            "U": str(self.manager.uid),
        }
        value = known.get(found[1])
        if value is None:
            raise Unsupported("specifier", f"{self.name} uses %{found[1]}, which kvwatch cannot tell")
        return value


def _unescaped(text: str) -> str:
    """The inverse of ``systemd-escape``: dashes are slashes, ``\\x2d`` is a byte."""
    slashed = text.replace("-", "/")
    return re.sub(r"(?:\\x[0-9a-f]{2})+", _unescaped_bytes, slashed)


def _unescaped_bytes(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("\\x", "")).decode(errors="replace")


def environment_file(text: str) -> dict[str, str]:
    """Variables of an ``EnvironmentFile``: one assignment per line, quotes as in a shell, no expansion."""
    found: dict[str, str] = {}
    for line in _logical_lines(text):
        name, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name.strip()):
            found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1]
    if len(value) > 1 and value[0] == value[-1] == '"':
        return re.sub(r"\\([\"\\`$])", r"\1", value[1:-1])
    return re.sub(r"\\(.)", r"\1", value)

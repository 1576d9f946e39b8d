"""The server that a Docker compose file starts, by the rules of the Compose specification."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.errors import Unsupported
from kvwatch.observe.nextstart_command import (
    ReadText,
    StartCommand,
    container_command,
    serving_command,
    sole,
)

_MERGED = frozenset({"environment", "env_file"})
_ALTERNATIVE = r"(?:[^{}]|\$\{[^{}]*\})*"
_VARIABLE = re.compile(rf"\$(?:(\$)|([A-Za-z_]\w*)|\{{([A-Za-z_]\w*)(?:(:?[-?+])({_ALTERNATIVE}))?\}}|\{{)")
_DOTENV = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$")
_QUOTED = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"")
_COMMENT = re.compile(r"(?:^|\s+)#.*")


def compose_command(
    documents: Sequence[Any], service: str | None, read: ReadText, folder: str
) -> StartCommand:
    """The server of a compose file.

    Args:
        documents: the file, then the files that override it.
        service: the one to start; None where only one of them is a server.
        read: of the host's file system.
        folder: of the first file, for ``.env``.

    Raises:
        Unsupported: there is no such service, none or several serve, or its command cannot be told.
    """
    services = _merged(documents)
    if service is not None and service not in services:
        raise Unsupported("no_such_service", f"the compose file has no service {service}")
    chosen = services if service is None else {service: services[service]}
    variables = _dotenv(read, folder)

    def command(given: Mapping[str, Any]) -> StartCommand | None:
        return serving_command(_Service(given, variables, read, folder).command(), read)

    return sole(chosen.items(), command)


def _merged(documents: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Services by name. What a later file says of a service replaces, but for what is merged."""
    services: dict[str, dict[str, Any]] = {}
    for document in documents:
        listed = document.get("services") if isinstance(document, Mapping) else None
        for name, given in listed.items() if isinstance(listed, Mapping) else ():
            if isinstance(given, Mapping):
                known = services.setdefault(str(name), {})
                lists = {key: [*known.get(key, []), *_as_list(given.get(key))] for key in _MERGED}
                known.update({**given, **lists})
    return services


def _as_list(value: object) -> list[Any]:
    """Environment and files in list form; a mapping's entries become ``NAME=value``."""
    match value:
        case None:
            return []
        case Mapping():
            return [str(name) if text is None else f"{name}={_scalar(text)}" for name, text in value.items()]
        case list():
            return value
        case _:
            return [value]


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dotenv(read: ReadText, folder: str) -> dict[str, str]:
    try:
        return dotenv(read(f"{folder}/.env"))
    except (OSError, Unsupported):
        return {}


@dataclass(frozen=True, slots=True)
class _Service:
    """One service with what its file may refer to."""

    given: Mapping[str, Any]
    variables: Mapping[str, str]
    read: ReadText
    folder: str

    def command(self) -> StartCommand:
        """What its container runs."""
        if "extends" in self.given:
            raise Unsupported("extends", "the service extends another one")
        image = self.given.get("image")
        return container_command(
            image=self._text(image) if isinstance(image, str) else None,
            entrypoint=self._words("entrypoint"),
            arguments=self._words("command") or [],
            environment=self._environment(),
            cwd=self._text(cwd) if isinstance(cwd := self.given.get("working_dir"), str) else None,
        )

    def _words(self, name: str) -> list[str] | None:
        match self.given.get(name):
            case str() as text:
                known = self._text(text)
                try:
                    return shlex.split(known)
                except ValueError as error:
                    raise Unsupported("broken_command", f"{name}: {error}") from None
            case list() as words:
                return [self._text(_scalar(word)) for word in words]
            case _:
                return None

    def _environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for file in self.given.get("env_file", []):
            found.update(self._file(file))
        for entry in self.given.get("environment", []):
            name, equals, value = str(entry).partition("=")
            found.pop(name, None)
            if equals:
                found[name] = self._text(value)
        return found

    def _file(self, file: object) -> dict[str, str]:
        path = str(file.get("path", "")) if isinstance(file, Mapping) else str(file)
        try:
            return dotenv(self.read(path if path.startswith("/") else f"{self.folder}/{path}"))
        except (OSError, Unsupported):
            return {}

    def _text(self, text: str) -> str:
        return _interpolated(text, self.variables)


# --- variables -----------------------------------------------------------------------------------------


def _interpolated(text: str, variables: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME:-default}``, one within another's default too; ``$$`` is a dollar.

    Raises:
        Unsupported: a variable is not among those given: the shell that runs compose may set it.
    """

    def value(found: re.Match[str]) -> str:
        dollar, plain, braced, operator, alternative = found.groups()
        if dollar:
            return "$"
        name = plain or braced
        if name is None:
            raise Unsupported("broken_variable", "a ${ that is no variable of compose's")
        value = variables.get(name)
        given = value is not None and (value != "" or not (operator or "").startswith(":"))
        match (operator or "?")[-1], given:
            case ("-", False) | ("+", True):
                return _interpolated(alternative, variables)
            case ("+", False):
                return ""
            case ("?", False):
                detail = f"the compose file uses ${name}, which .env does not set"
                raise Unsupported("undefined_variable", detail)
        return value or ""

    return _VARIABLE.sub(value, text)


def dotenv(text: str) -> dict[str, str]:
    """Variables of an ``.env`` file or ``env_file``: ``export`` and comments may be there, and variables.

    One whose value cannot be told is left out.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := _DOTENV.match(line):
            found.pop(match[1], None)
            try:
                found[match[1]] = _dotenv_value(match[2], found)
            except Unsupported:
                continue
    return found


def _dotenv_value(text: str, variables: Mapping[str, str]) -> str:
    quoted = _QUOTED.match(text)
    if quoted is None:
        return _interpolated(_COMMENT.sub("", text), variables)
    literal, expanded = quoted.groups()
    if literal is not None:
        return str(literal)
    return re.sub(r"\\([\\\"$])", r"\1", _interpolated(expanded, variables))

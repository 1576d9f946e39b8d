"""The command line as data: what the reference, the man page and the completion are written from."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvwatch.cli.main import COMMANDS, parser

_PLAIN = ("positional arguments", "options")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument.

    Attributes:
        names: of an option, long and short; empty for a positional one.
        value: what stands for its value in help; empty for a flag.
        choices: all values there are, where they are limited.
    """

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    meaning: str

    @property
    def usage(self) -> str:
        """As it is typed: ``--log-level LEVEL``."""
        return " ".join(part for part in (", ".join(self.names), self.value) if part)


@dataclass(frozen=True, slots=True)
class Command:
    """One command with its arguments by group; those of no named group come first, under an empty title.

    Attributes:
        notes: what the groups say of themselves, by title.
        examples: command lines.
    """

    name: str
    summary: str
    description: str
    groups: Mapping[str, tuple[Argument, ...]]
    notes: Mapping[str, str]
    examples: tuple[str, ...]
    epilog: str


def commands() -> tuple[Command, ...]:
    """Every command of `kvwatch`."""
    return tuple(_command(name, summary) for name, summary in COMMANDS.items())


def _command(name: str, summary: str) -> Command:
    found = _parser_of(name)
    groups: dict[str, tuple[Argument, ...]] = {}
    for group in found._action_groups:
        title = "" if group.title in _PLAIN else group.title or ""
        groups[title] = groups.get(title, ()) + tuple(_arguments(group._group_actions))
    notes = {group.title: group.description for group in found._action_groups if group.title}
    lines = (found.epilog or "").splitlines()
    examples = tuple(line.strip() for line in lines if line.startswith("  "))
    prose = " ".join(line for line in lines if not line.startswith("  ") and line != "examples:")
    return Command(
        name=name,
        summary=summary,
        description=_one_line(found.description),
        groups={title: arguments for title, arguments in groups.items() if arguments},
        notes={title: _one_line(note) for title, note in notes.items() if note},
        examples=examples,
        epilog=_one_line(prose),
    )


def _parser_of(name: str) -> argparse.ArgumentParser:
    """One command's own parser, which argparse keeps among the choices of the top one."""
    for action in parser(name)._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: argparse.ArgumentParser = action.choices[name]
            return found
    raise LookupError(name)


def _arguments(actions: Iterable[argparse.Action]) -> Iterable[Argument]:
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        yield Argument(
            names=tuple(action.option_strings),
            value=_value(action),
            choices=tuple(map(str, action.choices or ())),
            meaning=_one_line((action.help or "") % {**vars(action), "prog": "kvwatch"}),
        )


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    text = metavar if isinstance(metavar, str) else " ".join(metavar)
    return f"[{text}]" if action.nargs == "?" and action.option_strings else text


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())

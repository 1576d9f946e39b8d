"""Writes share/ out of the code: the man page and the completions for bash and zsh.

python -m tools.build_shell            # write
python -m tools.build_shell --check    # exit code 1 where a file differs from what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from kvwatch.cli.main import parser
from tools.arguments import Argument, Command, commands
from tools.generated import Files, main

NOTE = "Written by `python -m tools.build_shell`."
_EXIT = (
    ("0", "as asked; for status: every server would start again"),
    ("1", "something is wrong; for status: a server would not start again"),
    ("2", "unknown, or a wrong command line or configuration"),
)
_FILES = (("kvwatch.yaml", "in the working directory, or"), ("/etc/kvwatch/kvwatch.yaml", "configuration"))


def man_page() -> str:
    """kvwatch(1)."""
    return "\n".join(_man_lines()) + "\n"


def _man_lines() -> Iterator[str]:
    yield f'.\\" {NOTE}'
    yield '.TH KVWATCH 1 "" "kvwatch" "User Commands"'
    yield from (".SH NAME", r"kvwatch \- tells whether the vLLM servers of a node would start again")
    yield from (".SH SYNOPSIS", r".B kvwatch", r".I COMMAND", "[arguments]")
    yield from (".SH DESCRIPTION", _roff(parser().description or ""))
    for command in commands():
        yield from _man_command(command)
    yield ".SH EXIT STATUS"
    yield from _terms(_EXIT)
    yield ".SH FILES"
    yield from _terms(_FILES)


def _man_command(command: Command) -> Iterator[str]:
    yield f'.SH "KVWATCH {_roff(command.name.upper())}"'
    yield _roff(command.description)
    for title, arguments in command.groups.items():
        if title:
            yield f'.SS "{_roff(title)}"'
            if note := command.notes.get(title):
                yield _roff(note)
        yield from _terms((one.usage, one.meaning) for one in arguments)
    if command.examples:
        yield from (".SS Examples", ".nf", *map(_roff, command.examples), ".fi")
    if command.epilog:
        yield from (".PP", _roff(command.epilog))


def _terms(terms: Iterator[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Iterator[str]:
    for term, meaning in terms:
        yield from (".TP", rf"\fB{_roff(term)}\fR", _roff(meaning) or r"\&")


def _roff(text: str) -> str:
    """Text in which nothing is taken for a request, and a hyphen can be copied."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("\N{HORIZONTAL ELLIPSIS}", r"\|.\|.\|.")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


_COMPLETION = """\
# {note}
# shellcheck shell=bash

_kvwatch() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} words=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        words="{commands}"
    else
        case ${{COMP_WORDS[1]}}:$prev in
{choices}
        esac
        if [[ -z $words && $cur == -* ]]; then
            case ${{COMP_WORDS[1]}} in
{options}
            esac
        fi
    fi
    # Nothing of ours fits: a file name may.
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}}

complete -o default -F _kvwatch kvwatch
"""


def bash_completion() -> str:
    """Commands, their options, and the values of those that have a list."""
    known = commands()
    return _COMPLETION.format(
        note=NOTE,
        commands=" ".join(("--help", "--version", *(command.name for command in known))),
        choices="\n".join(line for command in known for line in _choice_lines(command)),
        options="\n".join(
            f'                {command.name}) words="{" ".join(_options(command))}" ;;' for command in known
        ),
    )


def _all(command: Command) -> list[Argument]:
    return [one for arguments in command.groups.values() for one in arguments]


def _options(command: Command) -> list[str]:
    return ["--help", *(name for one in _all(command) for name in one.names if name.startswith("--"))]


def _choice_lines(command: Command) -> Iterator[str]:
    for one in _all(command):
        if one.choices and one.names:
            patterns = " | ".join(f"{command.name}:{name}" for name in one.names)
            yield f'            {patterns}) words="{" ".join(one.choices)}" ;;'


_ZSH = """\
#compdef kvwatch
# {note}

local curcontext=$curcontext state line
local -a commands=(
{commands}
)

_arguments -C \\
    '(- *)'{{-h,--help}}'[show help]' \\
    '(- *)--version[show the version]' \\
    '1:command:->command' \\
    '*::argument:->argument'

case $state in
    command) _describe command commands ;;
    argument)
        curcontext="${{curcontext%:*:*}}:kvwatch-$words[1]:"
        case $words[1] in
{arguments}
        esac
        ;;
esac
"""


def zsh_completion() -> str:
    """Commands and options with their meanings, the values of those that have a list, and file names."""
    known = commands()
    return _ZSH.format(
        note=NOTE,
        commands="\n".join(f"    {_quoted(f'{one.name}:{one.summary}')}" for one in known),
        arguments="\n".join(line for command in known for line in _zsh_command(command)),
    )


def _zsh_command(command: Command) -> Iterator[str]:
    specs = ["'(- *)'{-h,--help}'[show help]'", *(spec for one in _all(command) for spec in _zsh_specs(one))]
    yield f"            {command.name})"
    yield "                _arguments \\"
    yield from (f"                    {spec} \\" for spec in specs[:-1])
    yield f"                    {specs[-1]}"
    yield "                ;;"


def _zsh_specs(one: Argument) -> Iterator[str]:
    """What `_arguments` wants to know of one argument, once for each of its names."""
    value = "value" if one.choices else re.sub(r"\W+", " ", one.value).strip().lower()
    action = f"({' '.join(one.choices)})" if one.choices else "_files" if value in _FILE_VALUES else " "
    optional = ":" if one.value.startswith("[") else ""
    if not one.names:
        yield f"':{value}:{action}'"
    for name in one.names:
        opposite = name.startswith("--no-") and f"the opposite of --{name.removeprefix('--no-')}"
        meaning = _quoted(_in_brackets(opposite or one.meaning))[1:-1]
        yield f"'*{name}[{meaning}]{f':{optional}{value}:{action}' if value else ''}'"


def _in_brackets(text: str) -> str:
    """Text that can stand in the brackets of a specification."""
    return text.replace("\\", r"\\").replace("[", r"\[").replace("]", r"\]").replace(":", r"\:")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"'\''") + "'"


_FILE_VALUES = frozenset({"file", "path", "dir", "logfile", "model"})
"""What stands for the name of a file."""

FILES: Files = {
    "share/man/man1/kvwatch.1": man_page,
    "share/bash-completion/completions/kvwatch": bash_completion,
    "share/zsh/site-functions/_kvwatch": zsh_completion,
}


if __name__ == "__main__":
    sys.exit(main("tools.build_shell", "Writes share/ out of the code.", FILES))

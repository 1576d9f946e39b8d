"""Writes docs/reference out of the code: metrics, command line, configuration, runbooks.

python -m tools.build_docs            # write
python -m tools.build_docs --check    # exit code 1 where a page differs from what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kvwatch.export.catalogue import FAMILIES, Family
from tools.arguments import Command, commands
from tools.generated import ROOT, Files, main

RUNBOOKS = ROOT / "docs" / "runbooks"
NOTE = "<!-- Written by `python -m tools.build_docs`. -->"

_METRICS = """\
Every family that kvwatch publishes, in the page's order. A value that could not be read is absent; it is
never 0 and never an old one. `gpu` is NVML's index, `0:1` for a MIG instance. Names and labels are a public
interface: they change with a major version only.
[Where each comes from](../extending.md#where-does-this-byte-come-from) leads to the code.
"""
_RUNBOOKS = """\
One page per alert: what it means, what it costs, how to look closer, what to do.
"""
_CLI = """\
`kvwatch COMMAND --help` says the same on the terminal.
"""
_CONFIGURATION = """\
There is nothing that must be configured. The file is looked for as `kvwatch.yaml` in the working directory,
then as `/etc/kvwatch/kvwatch.yaml`; `--config` names another. A running daemon reads it again when it changes
and on SIGHUP, and keeps the old one where the new one has an error. `kvwatch check-config FILE` names the
line and the field of an error.

This is the whole of it, with every default:
"""


def metrics_page() -> str:
    """The catalogue as a table."""
    rows = [_metric_row(family) for family in FAMILIES]
    head = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    return "\n".join([NOTE, "", "# Metrics", "", _METRICS, *head, *rows, ""])


def _metric_row(family: Family) -> str:
    labels = " ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {_cell(family.help)} |"


def cli_page() -> str:
    """Every command with its arguments."""
    parts = [NOTE, "", "# Command line", "", _CLI]
    for command in commands():
        parts.extend(_command(command))
    return "\n".join(parts)


def _command(command: Command) -> Iterator[str]:
    yield f"## kvwatch {command.name}\n\n{command.description}\n"
    if command.examples:
        yield "\n".join(("```sh", *command.examples, "```", ""))
    for title, arguments in command.groups.items():
        if note := command.notes.get(title):
            yield f"{title}: {note}.\n"
        yield f"| {title or 'argument'} | meaning |\n|---|---|"
        yield from (f"| `{_cell(one.usage)}` | {_cell(one.meaning)} |" for one in arguments)
        yield ""
    if command.epilog:
        yield f"{command.epilog[0].upper()}{command.epilog[1:]}.\n"


def configuration_page() -> str:
    """The annotated default file."""
    text = (ROOT / "kvwatch.yaml").read_text(encoding="utf-8").rstrip()
    return "\n".join([NOTE, "", "# Configuration", "", _CONFIGURATION, "```yaml", text, "```", ""])


def runbooks_page() -> str:
    """Every runbook with the first sentence of its meaning."""
    rows = [
        f"| [{path.stem}](../runbooks/{path.name}) | {_cell(_meaning(path))} |"
        for path in sorted(RUNBOOKS.glob("*.md"))
    ]
    head = ["| alert | meaning |", "|---|---|"]
    return "\n".join([NOTE, "", "# Runbooks", "", _RUNBOOKS, *head, *rows, ""])


def _meaning(path: Path) -> str:
    text = path.read_text(encoding="utf-8").split("## Meaning", 1)[1].strip()
    first = " ".join(text.split("\n\n", 1)[0].split())
    return re.split(r"(?<=[.:]) ", first, maxsplit=1)[0].rstrip(":.") + "."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


FILES: Files = {
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/command-line.md": cli_page,
    "docs/reference/configuration.md": configuration_page,
    "docs/reference/runbooks.md": runbooks_page,
}


if __name__ == "__main__":
    sys.exit(main("tools.build_docs", "Writes docs/reference out of the code.", FILES))

"""vLLM's start-up flags as options of a command, generated from the arithmetic's own list."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from kvwatch.blockmath.flags import Flags

_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
_METAVARS = {
    "int | None": "N",
    "float | None": "X",
    "str | None": "NAME",
    "tuple[str, ...] | None": "NAMES",
    "Mapping[str, Any] | None": "JSON",
}
NAMES = tuple(field.name for field in fields(Flags) if field.name != "model")
"""The flags that a plan takes; the model is a positional argument."""


def add_flag_options(parser: argparse.ArgumentParser) -> None:
    """One option for each flag of `vllm serve` that bears on start-up."""
    group = parser.add_argument_group(
        "vLLM's flags", "as for `vllm serve`; what is not given has the release's default"
    )
    for field in fields(Flags):
        if field.name not in NAMES:
            continue
        names = [name for name in (_SHORT.get(field.name), f"--{field.name.replace('_', '-')}") if name]
        kind = str(field.type)
        if kind == "bool | None":
            group.add_argument(*names, action=argparse.BooleanOptionalAction, default=None)
        else:
            group.add_argument(*names, dest=field.name, metavar=_METAVARS[kind])


def flags_of(args: argparse.Namespace) -> Flags:
    """The flags that were given.

    Raises:
        ValueError: a value is not of its flag's type; the text names the flag.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name in NAMES}
    return Flags.from_mapping({name.replace("_", "-"): value for name, value in given.items()})

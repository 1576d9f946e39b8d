"""Write kvwatch/blockmath/weights/field_defaults.py: defaults of fields that only weights depend on.

Run with the Python of a real vLLM, from the top of the repository:

    $KVWATCH_VLLM_VENV/bin/python -m tools.weight_defaults > kvwatch/blockmath/weights/field_defaults.py

Fields are the string literals in the weights package; what model_defaults.py has already is left out.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from kvwatch.blockmath.modelconfig import class_defaults
from tools.model_defaults import config_classes, raw_defaults

PACKAGE = Path("kvwatch/blockmath/weights")
NOT_FIELDS = {"model_type", "architectures", "dtype", "name", "mlp", "moe", "attention", "mamba"}
COMPUTED = {"head_dim", "num_key_value_heads", "layer_types", "mlp_layer_types", "per_layer_config"}
"""Fields whose defaults the classes work out from others."""
HEADER = '''"""Defaults of fields that only weights depend on. Written by tools/weight_defaults.py."""

from __future__ import annotations

from collections.abc import Mapping

# ruff: noqa: E501
# fmt: off
FIELD_DEFAULTS: Mapping[str, Mapping[str, object]] = {'''


def field_names() -> set[str]:
    """All string literals of the package that may be a field of a configuration."""
    found: set[str] = set()
    for path in PACKAGE.glob("*.py"):
        if path.name.endswith("_defaults.py"):
            continue
        for literal in re.findall(r'"([A-Za-z0-9_?=]+)"', path.read_text()):
            found.update(re.split(r"[?=]", literal))
    return found - NOT_FIELDS - COMPUTED


def factories(cls: type) -> dict[str, Any]:
    """Defaults that a dataclass makes with a function."""
    if not dataclasses.is_dataclass(cls):
        return {}
    return {
        field.name: field.default_factory()
        for field in dataclasses.fields(cls)
        if field.default_factory is not dataclasses.MISSING
    }


def plain(value: Any) -> bool:
    """Whether a default is data: a number, a word, or a short list or mapping of numbers."""
    if isinstance(value, list | tuple):
        return len(value) <= 4 and all(isinstance(item, int) for item in value)
    if isinstance(value, dict):
        return 0 < len(value) <= 4 and all(isinstance(item, int) for item in value.values())
    return isinstance(value, bool | int | float | str)


def row(name: str, cls: type, wanted: set[str]) -> dict[str, Any]:
    """The defaults of one class that are worth a place."""
    known = class_defaults(name).fields
    try:
        defaults = {**raw_defaults(cls), **factories(cls)}
    except Exception as error:  # noqa: BLE001 - a broken class is left out, and said so
        print(f"{name}: {error}", file=sys.stderr)
        return {}
    return {
        field: value
        for field, value in sorted(defaults.items())
        if field in wanted and field not in known and plain(value) and value is not False
    }


def main() -> None:
    """Print the module."""
    warnings.simplefilter("ignore")
    wanted = field_names()
    print(HEADER)
    for name, cls in sorted(config_classes().items()):
        if values := row(name, cls, wanted):
            parts = ", ".join(f'"{key}": {value!r}'.replace("'", '"') for key, value in values.items())
            print(f'    "{name}": {{{parts}}},')
    print("}")


if __name__ == "__main__":
    main()

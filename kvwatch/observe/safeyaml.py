"""YAML that anybody may have written: plain values only, and nothing small that means something huge."""

from __future__ import annotations

from typing import Any

import yaml

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader written in C, where PyYAML has it: the other takes seconds for a hostile file."""
_MAX_MERGED = 100
"""PyYAML before 6.0.4 takes the same entries in again for each alias of them."""
_MAX_PAIRS = 10_000
_BAD_VALUES = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What PyYAML lets through from the conversion of a value (``!!int ""``, a date of the year 0)."""


class NotYaml(ValueError):
    """The text is no YAML, or not a reasonable one; says where."""


class _Loader(_BASE):  # type: ignore[misc]
    """Bounds merge keys: a few lines of ``<<: [*a, *a]`` upon each other are millions of entries."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        parts = sum(len(value.value) if isinstance(value, yaml.SequenceNode) else 1 for value in merged)
        if parts <= _MAX_MERGED:
            super().flatten_mapping(node)
        if parts > _MAX_MERGED or len(node.value) > _MAX_PAIRS:
            raise yaml.constructor.ConstructorError(None, None, "too many merged keys", node.start_mark)


def load_documents(text: str) -> list[Any]:
    """All documents of a text. Aliases may make values that contain themselves.

    Raises:
        NotYaml: it is no YAML, or expands beyond reason.
    """
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise NotYaml(f"no YAML{where}: {getattr(error, 'problem', None) or 'unreadable'}") from None
    except _BAD_VALUES as error:
        raise NotYaml(f"no YAML: {error}") from None


def load_document(text: str) -> Any:
    """The only document of a text, None where it is empty.

    Raises:
        NotYaml: it is no YAML, expands beyond reason, or holds several documents.
    """
    documents = load_documents(text)
    if len(documents) > 1:
        raise NotYaml("more than one document")
    return documents[0] if documents else None

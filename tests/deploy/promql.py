"""What PromQL expressions refer to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser


def selectors(expression: str) -> Iterator[Any]:
    """Every vector selector of an expression.

    Raises:
        ValueError: it is not PromQL.
    """
    yield from _walk(promql_parser.parse(expression))


def families(expression: str) -> set[str]:
    """Names of the series that an expression reads."""
    return {selector.name for selector in selectors(expression)}


def _walk(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, part, None)
        if child is not None:
            yield from _walk(child)
    for child in getattr(node, "args", None) or ():
        yield from _walk(child)

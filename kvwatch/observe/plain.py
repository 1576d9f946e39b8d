"""Records as values that JSON can hold, and back, by nothing but their type hints.

A field that is empty and whose default is the same is left out. A member of a union of records is wrapped in
its class name; sets are sorted lists, tuples are lists, numbers that JSON lacks are their names.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_NUMBER = "$number"
_MAPPING = "$mapping"
_SCALARS: Mapping[type, tuple[type, ...]] = {bool: (bool,), int: (int,), str: (str,), float: (float, int)}


class NotPlain(ValueError):
    """A value that is not of the form its type asks for; the text names the field."""


# --- records -> plain -----------------------------------------------------------------------------------


def to_plain(value: Any, hint: Any) -> Any:
    """The value, which is of the type `hint`, out of None, bool, int, float, str, list and dict.

    Raises:
        TypeError: the hint is of a kind that is not provided for.
    """
    if value is None:
        return None
    if hint is Any:
        return _any_to_plain(value)
    if hint in _SCALARS:
        return value if not isinstance(value, float) or math.isfinite(value) else _number_name(value)
    if hint is Path:
        return str(value)
    if is_dataclass(hint):
        return _record_to_plain(value, hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        return [
            to_plain(item, own) for item, own in zip(value, _item_hints(arguments, len(value)), strict=True)
        ]
    if origin is frozenset:
        return [to_plain(item, arguments[0]) for item in sorted(value)]
    if origin is Mapping:
        return {str(key): to_plain(item, arguments[1]) for key, item in value.items()}
    if origin in (Union, types.UnionType):
        return _member_to_plain(value, arguments)
    raise TypeError(f"no plain form for {hint}")


def _record_to_plain(value: Any, hint: Any) -> dict[str, Any]:
    hints = _hints(hint)
    return {
        field.name: to_plain(own, hints[field.name])
        for field in fields(hint)
        if not _is_left_out(own := getattr(value, field.name), field)
    }


def _member_to_plain(value: Any, members: tuple[Any, ...]) -> Any:
    options = _without_none(members)
    if len(options) == 1:
        return to_plain(value, options[0])
    return {type(value).__name__: to_plain(value, type(value))}


def _any_to_plain(value: Any) -> Any:
    """JSON as it is; what JSON cannot hold becomes text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_NUMBER: _number_name(value)}
        case Mapping():
            plain = {str(key): _any_to_plain(item) for key, item in value.items()}
            return {_MAPPING: plain} if plain.keys() in ({_NUMBER}, {_MAPPING}) else plain
        case list() | tuple():
            return [_any_to_plain(item) for item in value]
        case _:
            return str(value)


def _number_name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _is_left_out(value: Any, field: Field[Any]) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    empty = value is None or (isinstance(value, tuple | Mapping) and not value)
    return empty and default is not MISSING and value == default


# --- plain -> records -----------------------------------------------------------------------------------


def from_plain(plain: Any, hint: Any, where: str) -> Any:
    """The value of the type `hint`; `where` names it in errors.

    Raises:
        NotPlain: a field is missing, unknown or of another type.
    """
    if hint is Any:
        return _any_from_plain(plain)
    if hint in _SCALARS:
        return _scalar(plain, hint, where)
    if hint is Path:
        return Path(_scalar(plain, str, where))
    if is_dataclass(hint):
        return _record(plain, hint, where)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _member(plain, arguments, where)
    if origin is Mapping:
        return {
            _key(key, arguments[0], where): from_plain(item, arguments[1], f"{where}.{key}")
            for key, item in _expect(plain, dict, where).items()
        }
    items = _expect(plain, list, where)
    hints = _item_hints(arguments, len(items))
    if len(hints) != len(items):
        raise NotPlain(f"{where}: {len(items)} items instead of {len(hints)}")
    build = tuple if origin is tuple else frozenset
    return build(
        from_plain(item, own, f"{where}[{place}]")
        for place, (item, own) in enumerate(zip(items, hints, strict=True))
    )


def _scalar(plain: Any, hint: type, where: str) -> Any:
    if hint is float and isinstance(plain, str) and plain in _NUMBERS:
        return _NUMBERS[plain]
    if not isinstance(plain, _SCALARS[hint]) or (isinstance(plain, bool) and hint is not bool):
        raise NotPlain(f"{where}: {_kind(plain)} instead of {hint.__name__}")
    return plain


def _record(plain: Any, hint: Any, where: str) -> Any:
    given = _expect(plain, dict, where)
    hints = _hints(hint)
    if unknown := given.keys() - hints.keys():
        raise NotPlain(f"{where}.{min(unknown)}: no such field")
    values = {name: from_plain(item, hints[name], f"{where}.{name}") for name, item in given.items()}
    for field in fields(hint):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in values:
            raise NotPlain(f"{where}.{field.name}: missing")
    return hint(**values)


def _member(plain: Any, members: tuple[Any, ...], where: str) -> Any:
    options = _without_none(members)
    if plain is None and len(options) < len(members):
        return None
    if len(options) == 1:
        return from_plain(plain, options[0], where)
    by_name = {option.__name__: option for option in options}
    given = _expect(plain, dict, where)
    if len(given) != 1 or not given.keys() <= by_name.keys():
        raise NotPlain(f"{where}: none of {', '.join(by_name)}")
    ((name, inner),) = given.items()
    return from_plain(inner, by_name[name], f"{where}.{name}")


def _key(text: str, hint: Any, where: str) -> Any:
    if hint is str:
        return text
    try:
        return int(text)
    except ValueError:
        raise NotPlain(f"{where}.{text}: the key is not a whole number") from None


def _any_from_plain(plain: Any) -> Any:
    match plain:
        case {"$number": str(name)} if len(plain) == 1 and name in _NUMBERS:
            return _NUMBERS[name]
        case {"$mapping": dict(inner)} if len(plain) == 1:
            return {key: _any_from_plain(item) for key, item in inner.items()}
        case dict():
            return {key: _any_from_plain(item) for key, item in plain.items()}
        case list():
            return [_any_from_plain(item) for item in plain]
        case _:
            return plain


def _expect(plain: Any, kind: type, where: str) -> Any:
    if not isinstance(plain, kind):
        raise NotPlain(f"{where}: {_kind(plain)} instead of {kind.__name__}")
    return plain


def _kind(plain: Any) -> str:
    return "null" if plain is None else type(plain).__name__


# --- hints ----------------------------------------------------------------------------------------------


@cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


def _without_none(members: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(member for member in members if member is not type(None))


def _item_hints(arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """One hint per item, of ``tuple[int, int]``, ``tuple[str, ...]`` or ``frozenset[str]``."""
    repeated = len(arguments) == 1 or arguments[-1] is Ellipsis
    return arguments[:1] * count if repeated else arguments

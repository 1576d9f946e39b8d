"""YAML files that people write: sections hand out checked values, errors name file, line and field."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import yaml

from kvwatch.blockmath.flags import Flags

T = TypeVar("T")

_BAD_VALUES = (
    yaml.YAMLError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What PyYAML lets through from the conversion of a value (``!!int ""``, a date of the year 0)."""


class ConfigError(ValueError):
    """The configuration cannot be used. The text starts with ``file:line: field:``."""


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text, from byte {error.start} on") from None


def parse_yaml(text: str, path: Path) -> Section | None:
    """The top section of a document, None where it is empty; `path` is for messages.

    Raises:
        ConfigError: it is not YAML, or not a mapping.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{line}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    return None if root is None else Section(root, path, "")


class Section:
    """A mapping of the file under reading: hands out each key once, complains about the rest."""

    def __init__(self, node: yaml.Node, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, name, "expected a mapping (key: value)")
        self._node = node
        self._values: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, name, "expected plain keys (key: value)")
            text = str(key.value)
            if text in self._values:
                raise self._error(key, self._field(text), "given twice")
            self._values[text] = value
        self._known: list[str] = []

    def _field(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def error(self, problem: str) -> ConfigError:
        """What is wrong with this mapping as a whole."""
        return self._error(self._node, self.name, problem)

    def _error(self, node: yaml.Node, name: str, problem: object) -> ConfigError:
        return ConfigError(f"{self.path}:{node.start_mark.line + 1}: {name or 'the file'}: {problem}")

    def _take(self, key: str) -> yaml.Node | None:
        self._known.append(key)
        node = self._values.pop(key, None)
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
            return None
        return node

    def value(self, key: str, convert: Callable[[object], T], default: T) -> T:
        """One plain value, converted; `convert` raises ValueError with the reason."""
        node = self._take(key)
        return default if node is None else self._convert(node, self._field(key), convert)

    def required(self, key: str, convert: Callable[[object], T]) -> T:
        """One plain value that must be there."""
        node = self._take(key)
        if node is None:
            raise self._error(self._node, self._field(key), "missing")
        return self._convert(node, self._field(key), convert)

    def _convert(self, node: yaml.Node, name: str, convert: Callable[[object], T]) -> T:
        try:
            return convert(_plain(node))
        except (TypeError, ValueError) as error:
            raise self._error(node, name, error) from None

    def values(self, key: str, convert: Callable[[object], T], default: tuple[T, ...]) -> tuple[T, ...]:
        """A list of plain values; a single value counts as a list of one."""
        node = self._take(key)
        if node is None:
            return default
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(
            self._convert(item, f"{self._field(key)}[{number}]", convert) for number, item in enumerate(items)
        )

    def section(self, key: str) -> Section | None:
        """A nested mapping, None where it is absent."""
        node = self._take(key)
        return None if node is None else Section(node, self.path, self._field(key))

    def sections(self, key: str) -> Iterator[Section]:
        """The mappings of a list."""
        node = self._take(key)
        if node is None:
            return
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, self._field(key), "expected a list")
        for number, item in enumerate(node.value):
            yield Section(item, self.path, f"{self._field(key)}[{number}]")

    def named_sections(self, key: str) -> Iterator[tuple[str, Section]]:
        """The mappings of a mapping, with their names."""
        section = self.section(key)
        if section is None:
            return
        for name in list(section._values):
            nested = section.section(name)
            if nested is None:
                raise self._error(section._node, section._field(name), "is empty")
            yield name, nested

    def items(self, convert: Callable[[object], T]) -> dict[str, T]:
        """All remaining keys, whatever they are called, with their converted values."""
        items = {}
        for key in list(self._values):
            node = self._values.pop(key)
            items[key] = self._convert(node, self._field(key), convert)
        return items

    def flags(self) -> Flags:
        """All remaining keys as vLLM flags."""
        built = Flags()
        for key in list(self._values):
            node = self._values[key]
            try:
                one = Flags.from_mapping({key: _plain(node)})
            except ValueError as error:
                self._known.extend(Flags.__dataclass_fields__)
                problem = str(error).removeprefix(f"{key}: ")
                raise self._error(node, self._field(key), problem + self._suggestion(key)) from None
            built = built.with_changes(**one.given())
            del self._values[key]
        return built

    def _suggestion(self, key: str) -> str:
        close = difflib.get_close_matches(key.replace("-", "_"), self._known, n=1)
        return f" (did you mean {close[0]}?)" if close and close[0] != key else ""

    @contextmanager
    def closing(self) -> Iterator[Section]:
        """Complain about keys that nobody asked for."""
        yield self
        for key in self._values:
            key_node = next(node for node, _ in self._node.value if node.value == key)
            problem = "unknown field" + self._suggestion(key)
            raise self._error(key_node, self._field(key), problem)


def _plain(node: yaml.Node) -> object:
    """The value of a node.

    Raises:
        ValueError: YAML has no such value.
    """
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node, deep=True)
    except _BAD_VALUES as error:
        raise ValueError(getattr(error, "problem", None) or "not a value") from None
    finally:
        constructor.dispose()


def plain_text(value: object) -> str:
    """Text that is not blank; whole numbers count as text.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{value!r} is not text")


def boolean(value: object) -> bool:
    """true or false.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def count(value: object) -> int:
    """A whole number of at least 1.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return value

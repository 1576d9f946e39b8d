"""A model's config.json with what its configuration class would fill in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.model_defaults import TABLE

TEXT_PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
    "decoder",
    "generator",
    "text_encoder",
)
"""Where multimodal configurations keep their language model, most usual first."""


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """What one configuration class assumes.

    Attributes:
        fields: defaults, as the class states them.
        aliases: other names of fields.
        text_path: the dotted place of the language model's part, where there is one.
        text_type: that part's model type unless it says otherwise.
    """

    fields: Mapping[str, Any]
    aliases: Mapping[str, str]
    text_path: str | None = None
    text_type: str | None = None


_NONE = ClassDefaults(MappingProxyType({}), MappingProxyType({}))


@cache
def _table() -> Mapping[str, str]:
    return MappingProxyType(
        {name: rest for name, _, rest in (line.partition(" ") for line in TABLE.split("\n") if line)}
    )


@cache
def class_defaults(model_type: str) -> ClassDefaults:
    """What the configuration class of a model type assumes; nothing for an unknown one."""
    text = _table().get(model_type)
    if text is None:
        return _NONE
    fields: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    path: str | None = None
    kind: str | None = None
    for part in text.split(" "):
        if part.startswith("@"):
            path, _, kind = part[1:].partition("=")
        elif ">" in part:
            alias, _, field = part.partition(">")
            aliases[alias] = field
        else:
            name, _, value = part.partition("=")
            fields[name] = json.loads(value)
    return ClassDefaults(MappingProxyType(fields), MappingProxyType(aliases), path, kind)


class Section(Mapping[str, Any]):
    """One part of a config.json: its own values first, then the class's, under any of a field's names.

    A field that is absent and one that is null are the same: ``get`` gives the default for both.
    """

    __slots__ = ("_defaults", "_known", "model_type", "own")

    def __init__(self, own: Mapping[str, Any], model_type: str) -> None:
        self.own = own
        self.model_type = model_type
        self._defaults = class_defaults(model_type)
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or the default where it is absent or null."""
        if name not in self._known:
            self._known[name] = self._find(name)
        value = self._known[name]
        return default if value is None else value

    def _find(self, name: str) -> Any:
        value = self.own.get(name)
        if value is not None:
            return value
        target = self._defaults.aliases.get(name)
        if target is not None and self.own.get(target) is not None:
            return self.own[target]
        if name in self.own:
            return None
        return self._defaults.fields.get(target or name, self._defaults.fields.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter({**self._defaults.fields, **self._defaults.aliases, **self.own})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def states(self, name: str) -> bool:
        """Whether the file itself gives a value."""
        return self.own.get(name) is not None

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            Unsupported: absent without a default, or not a whole number.
        """
        value = self.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise Unsupported("incomplete_config", f"config.json: {name} is {value!r}, not a whole number")
        return value

    def first(self, *names: str) -> Any:
        """The value of the first of these fields that has one, or None."""
        return next((value for name in names if (value := self.get(name)) is not None), None)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A config.json as the arithmetic reads it.

    Attributes:
        architecture: the first of ``architectures``, or empty.
        root: the whole file.
        text: the language model's part; the same as root for text-only models.
    """

    architecture: str
    root: Section
    text: Section

    @classmethod
    def read(cls, config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a parsed config.json.

        Args:
            config: the file's content.
            overrides: ``--hf-overrides``: fields that replace the file's, nested parts merged.

        Raises:
            Unsupported: not a model's configuration.
        """
        if overrides:
            config = _merged(config, overrides)
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise Unsupported("incomplete_config", "config.json: model_type is missing")
        architectures = config.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else ""
        root = Section(config, model_type)
        return cls(architecture, root, _text_section(root))


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    merged = dict(config)
    for name, value in overrides.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(old, value)
        else:
            merged[name] = value
    return merged


def _text_section(root: Section) -> Section:
    defaults = class_defaults(root.model_type)
    if defaults.text_path is not None:
        part: Any = root.own
        for name in defaults.text_path.split("."):
            part = part.get(name) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping):
            return Section(part, str(part.get("model_type") or defaults.text_type))
    for name in TEXT_PARTS:
        part = root.own.get(name)
        if isinstance(part, Mapping) and (
            "hidden_size" in part or "model_type" in part or "text_config" in part
        ):
            section = Section(part, str(part.get("model_type") or root.model_type))
            return _text_section(section) if name == "thinker_config" else section
    return root if defaults.text_path is None else Section({}, str(defaults.text_type))

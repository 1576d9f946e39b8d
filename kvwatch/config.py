"""kvwatch.yaml: read, checked, with errors that name the file, the line and the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvwatch.blockmath.flags import Flags

T = TypeVar("T")

NO_FLAGS = Flags()
MIB = 2**20
GIB = 2**30
DEFAULT_LISTEN_ADDRESS = ":9744"


class ConfigError(ValueError):
    """The configuration cannot be used. The text starts with ``file:line: field:``."""


@dataclass(frozen=True, slots=True)
class Web:
    """Where the page is served."""

    listen_addresses: tuple[str, ...] = (DEFAULT_LISTEN_ADDRESS,)
    config_file: Path | None = None
    max_scrapes: int = 16
    enable_reload: bool = False


@dataclass(frozen=True, slots=True)
class Poll:
    """How often the node is looked at, and how long one source may take. Seconds."""

    interval: float = 15.0
    nvml_timeout: float = 5.0
    processes_timeout: float = 5.0
    vllm_connect_timeout: float = 1.0
    vllm_timeout: float = 4.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Matches a process by program name, user or workload: shell patterns, all given ones must match."""

    program: str | None = None
    user: str | None = None
    workload: str | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    """How the processes on a card are told apart."""

    top: int = 20
    allowed: tuple[Rule, ...] = ()
    neighbours: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Restart:
    """What a coming start takes from the free memory before vLLM looks at it. Bytes per GPU."""

    cuda_context: int = 512 * MIB
    nccl: int = 2 * GIB


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server named in the configuration; it adds to what discovery found, or overrides it.

    Attributes:
        url: ``http://host:port``; matches a discovered server by this address.
        gpus: NVML indices in rank order, for a server whose processes cannot be seen.
        flags: start-up flags that override the command line's.
        token_file: bearer token for ``/v1/models``.
        model_config: path of config.json, or of the folder that holds it.
    """

    url: str
    name: str | None = None
    gpus: tuple[str, ...] | None = None
    flags: Flags = NO_FLAGS
    token_file: Path | None = None
    ca_file: Path | None = None
    insecure_skip_verify: bool = False
    model_config: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A change that is judged each cycle without being made.

    Attributes:
        server: name of the server it starts from; None applies it to every server.
        flags: only the flags that change.
    """

    name: str
    server: str | None
    flags: Flags


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of kvwatch.yaml. ``Config()`` is the configuration of an empty file."""

    web: Web = Web()
    poll: Poll = Poll()
    discovery: bool = True
    holders: Holders = Holders()
    restart: Restart = Restart()
    servers: tuple[ServerConfig, ...] = ()
    plans: tuple[Plan, ...] = ()
    source: Path | None = field(default=None, compare=False)


def load(path: Path) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: it cannot be read, is not YAML, or a field is unknown or has a wrong value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return parse(text, path)


def parse(text: str, path: Path) -> Config:
    """Check the text of a configuration file; `path` is for messages and relative file names."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{line}: {problem}") from None
    if root is None:
        return Config(source=path)
    return _config(_Section(root, path, ""))


class _Section:
    """A mapping of the file under reading: hands out each key once, complains about the rest."""

    def __init__(self, node: yaml.Node, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, name, "expected a mapping (key: value)")
        self._node = node
        self._values: dict[str, yaml.Node] = {}
        for key, value in node.value:
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

    def section(self, key: str) -> _Section | None:
        """A nested mapping, None where it is absent."""
        node = self._take(key)
        return None if node is None else _Section(node, self.path, self._field(key))

    def sections(self, key: str) -> Iterator[_Section]:
        """The mappings of a list."""
        node = self._take(key)
        if node is None:
            return
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, self._field(key), "expected a list")
        for number, item in enumerate(node.value):
            yield _Section(item, self.path, f"{self._field(key)}[{number}]")

    def named_sections(self, key: str) -> Iterator[tuple[str, _Section]]:
        """The mappings of a mapping, with their names."""
        section = self.section(key)
        if section is None:
            return
        for name in list(section._values):
            nested = section.section(name)
            if nested is None:
                raise self._error(section._node, section._field(name), "is empty")
            yield name, nested

    def flags(self) -> Flags:
        """All remaining keys as vLLM flags."""
        built = NO_FLAGS
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
    def closing(self) -> Iterator[_Section]:
        """Complain about keys that nobody asked for."""
        yield self
        for key in self._values:
            key_node = next(node for node, _ in self._node.value if node.value == key)
            problem = "unknown field" + self._suggestion(key)
            raise self._error(key_node, self._field(key), problem)


def _plain(node: yaml.Node) -> object:
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node, deep=True)
    finally:
        constructor.dispose()


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def duration(value: object) -> float:
    """Seconds out of ``15``, ``1.5``, ``500ms``, ``15s``, ``5m``, ``2h`` or ``1d``; more than zero.

    Raises:
        ValueError: it is none of these.
    """
    match = None if isinstance(value, bool) else _DURATION.fullmatch(str(value).strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{value!r} is not a duration (15s, 500ms, 5m)")
    return seconds


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])iB|([kMGT]?)B)?")


def size(value: object) -> int:
    """Bytes out of ``1048576``, ``512MiB``, ``2GiB`` or ``2GB``.

    Raises:
        ValueError: it is none of these.
    """
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size (1048576, 512MiB, 2GiB)")
    number, binary, decimal = match.groups()
    factor = 1024 ** ("KMGT".index(binary) + 1) if binary else 1000 ** " kMGT".index(decimal or " ")
    return int(float(number) * factor)


def _text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{value!r} is not text")


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return value


def _url(value: object) -> str:
    text = _text(value).rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise ValueError(f"{value!r} is not an http:// or https:// address")
    return text


def _config(top: _Section) -> Config:
    base = top.path.parent

    def file(value: object) -> Path:
        return base / Path(_text(value)).expanduser()

    with top.closing():
        return Config(
            web=_web(top.section("web"), file),
            poll=_poll(top.section("poll")),
            discovery=top.value("discovery", _boolean, default=True),
            holders=_holders(top.section("holders")),
            restart=_restart(top.section("restart")),
            servers=tuple(_server(section, file) for section in top.sections("servers")),
            plans=tuple(_plan(name, section) for name, section in top.named_sections("plans")),
            source=top.path,
        )


def _web(section: _Section | None, file: Callable[[object], Path]) -> Web:
    default = Web()
    if section is None:
        return default
    with section.closing():
        return Web(
            listen_addresses=section.values("listen_address", _text, default.listen_addresses),
            config_file=section.value("config_file", file, default.config_file),
            max_scrapes=section.value("max_scrapes", _count, default.max_scrapes),
            enable_reload=section.value("enable_reload", _boolean, default=default.enable_reload),
        )


def _poll(section: _Section | None) -> Poll:
    default = Poll()
    if section is None:
        return default
    with section.closing():
        return Poll(
            interval=section.value("interval", duration, default.interval),
            nvml_timeout=section.value("nvml_timeout", duration, default.nvml_timeout),
            processes_timeout=section.value("processes_timeout", duration, default.processes_timeout),
            vllm_connect_timeout=section.value(
                "vllm_connect_timeout", duration, default.vllm_connect_timeout
            ),
            vllm_timeout=section.value("vllm_timeout", duration, default.vllm_timeout),
        )


def _rule(section: _Section) -> Rule:
    with section.closing():
        rule = Rule(
            program=section.value("program", _text, None),
            user=section.value("user", _text, None),
            workload=section.value("workload", _text, None),
        )
    if rule == Rule():
        raise section.error("needs program, user or workload")
    return rule


def _holders(section: _Section | None) -> Holders:
    default = Holders()
    if section is None:
        return default
    with section.closing():
        return Holders(
            top=section.value("top", _count, default.top),
            allowed=tuple(_rule(rule) for rule in section.sections("allowed")),
            neighbours=tuple(_rule(rule) for rule in section.sections("neighbours")),
        )


def _restart(section: _Section | None) -> Restart:
    default = Restart()
    if section is None:
        return default
    with section.closing():
        return Restart(
            cuda_context=section.value("cuda_context", size, default.cuda_context),
            nccl=section.value("nccl", size, default.nccl),
        )


def _server(section: _Section, file: Callable[[object], Path]) -> ServerConfig:
    with section.closing():
        flags = section.section("flags")
        return ServerConfig(
            url=section.required("url", _url),
            name=section.value("name", _text, None),
            gpus=section.values("gpus", _text, ()) or None,
            flags=flags.flags() if flags else NO_FLAGS,
            token_file=section.value("token_file", file, None),
            ca_file=section.value("ca_file", file, None),
            insecure_skip_verify=section.value("insecure_skip_verify", _boolean, default=False),
            model_config=section.value("model_config", file, None),
        )


def _plan(name: str, section: _Section) -> Plan:
    with section.closing():
        server = section.value("server", _text, None)
        plan = Plan(name=name, server=server, flags=section.flags())
    if plan.flags == NO_FLAGS:
        raise section.error("changes no flag")
    return plan


def as_mapping(config: Config) -> Mapping[str, Any]:
    """The configuration as plain values, for capture files and `check-config`."""
    return {
        "web": {
            "listen_address": list(config.web.listen_addresses),
            "config_file": str(config.web.config_file) if config.web.config_file else None,
            "max_scrapes": config.web.max_scrapes,
            "enable_reload": config.web.enable_reload,
        },
        "poll": {name: getattr(config.poll, name) for name in Poll.__dataclass_fields__},
        "discovery": config.discovery,
        "holders": {
            "top": config.holders.top,
            "allowed": [_rule_mapping(rule) for rule in config.holders.allowed],
            "neighbours": [_rule_mapping(rule) for rule in config.holders.neighbours],
        },
        "restart": {"cuda_context": config.restart.cuda_context, "nccl": config.restart.nccl},
        "servers": [
            {
                "url": server.url,
                "name": server.name,
                "gpus": list(server.gpus) if server.gpus else None,
                "flags": server.flags.given(),
            }
            for server in config.servers
        ],
        "plans": {plan.name: {"server": plan.server, **plan.flags.given()} for plan in config.plans},
    }


def _rule_mapping(rule: Rule) -> dict[str, str]:
    return {name: value for name in Rule.__dataclass_fields__ if (value := getattr(rule, name)) is not None}

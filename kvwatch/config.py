"""kvwatch.yaml: read, checked, with errors that name the file, the line and the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvwatch.blockmath.flags import Flags
from kvwatch.yamlfile import ConfigError as ConfigError
from kvwatch.yamlfile import Section, boolean, count, parse_yaml, plain_text, read_text

T = TypeVar("T")

NO_FLAGS = Flags()
MIB = 2**20
GIB = 2**30
DEFAULT_LISTEN_ADDRESS = ":9744"


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
    """Matches a process by shell patterns, of which all given ones must match.

    Attributes:
        workload: unit, pod or job that the process runs in, else its container's short id.
        container: container id in full, or an LXC container's name.
    """

    program: str | None = None
    user: str | None = None
    workload: str | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    """How the processes on a card are told apart.

    Attributes:
        release_grace: seconds for which memory of a process that has ended counts as on its way back.
    """

    top: int = 20
    release_grace: float = 60.0
    allowed: tuple[Rule, ...] = ()
    neighbours: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Restart:
    """What a coming start takes from the free memory before vLLM looks at it. Bytes per GPU."""

    cuda_context: int = 512 * MIB
    nccl: int = 2 * GIB


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """The file that starts a server: systemd unit, compose file, Kubernetes manifest or shell script.

    Attributes:
        files: in order; further ones are compose override files, drop-ins or manifests.
        service: of a compose file, or the name of a Kubernetes workload; None where only one serves.
        container: of a Kubernetes pod; None where only one serves.
    """

    files: tuple[Path, ...]
    service: str | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server named in the configuration; it adds to what discovery found, or overrides it.

    Attributes:
        url: ``http://host:port``; matches a discovered server by this address.
        gpus: NVML indices in rank order, for a server whose processes cannot be seen.
        flags: start-up flags that override the command line's.
        token_file: bearer token for ``/v1/models``.
        model_config: path of config.json, or of the folder that holds it.
        launch: what starts it, where kvwatch cannot find that out.
    """

    url: str
    name: str | None = None
    gpus: tuple[str, ...] | None = None
    flags: Flags = NO_FLAGS
    token_file: Path | None = None
    ca_file: Path | None = None
    insecure_skip_verify: bool = False
    model_config: Path | None = None
    launch: LaunchFile | None = None


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
    return parse(read_text(path), path)


def parse(text: str, path: Path) -> Config:
    """Check the text of a configuration file; `path` is for messages and relative file names."""
    root = parse_yaml(text, path)
    return Config(source=path) if root is None else _config(root)


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


UNIX = "unix:"
_LISTEN_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of ``host:port``, ``[v6]:port`` or ``:port``, whose host is empty.

    Raises:
        ValueError: it is none of these.
    """
    match = _LISTEN_ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 0xFFFF:
        raise ValueError(
            f"{address!r} is not an address to listen on (host:port, [v6]:port, :port, unix:/path)"
        )
    return match["v6"] or match["host"], int(match["port"])


def _listen_address(value: object) -> str:
    text = plain_text(value)
    if not text.startswith(UNIX):
        host_and_port(text)
    return text


def web_address(value: object) -> str:
    """``http://host:port`` or ``https://host/path``, without a slash at the end.

    Raises:
        ValueError: it is none of these.
    """
    text = plain_text(value).rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise ValueError(f"{value!r} is not an http:// or https:// address")
    return text


def _config(top: Section) -> Config:
    base = top.path.parent

    def file(value: object) -> Path:
        return base / Path(plain_text(value)).expanduser()

    with top.closing():
        return Config(
            web=_web(top.section("web"), file),
            poll=_poll(top.section("poll")),
            discovery=top.value("discovery", boolean, default=True),
            holders=_holders(top.section("holders")),
            restart=_restart(top.section("restart")),
            servers=tuple(_server(section, file) for section in top.sections("servers")),
            plans=tuple(_plan(name, section) for name, section in top.named_sections("plans")),
            source=top.path,
        )


def _web(section: Section | None, file: Callable[[object], Path]) -> Web:
    default = Web()
    if section is None:
        return default
    with section.closing():
        return Web(
            listen_addresses=section.values("listen_address", _listen_address, default.listen_addresses),
            config_file=section.value("config_file", file, default.config_file),
            max_scrapes=section.value("max_scrapes", count, default.max_scrapes),
            enable_reload=section.value("enable_reload", boolean, default=default.enable_reload),
        )


def _poll(section: Section | None) -> Poll:
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


def _rule(section: Section) -> Rule:
    with section.closing():
        rule = Rule(
            program=section.value("program", plain_text, None),
            user=section.value("user", plain_text, None),
            workload=section.value("workload", plain_text, None),
            container=section.value("container", plain_text, None),
        )
    if rule == Rule():
        raise section.error("needs program, user, workload or container")
    return rule


def _holders(section: Section | None) -> Holders:
    default = Holders()
    if section is None:
        return default
    with section.closing():
        return Holders(
            top=section.value("top", count, default.top),
            release_grace=section.value("release_grace", duration, default.release_grace),
            allowed=tuple(_rule(rule) for rule in section.sections("allowed")),
            neighbours=tuple(_rule(rule) for rule in section.sections("neighbours")),
        )


def _restart(section: Section | None) -> Restart:
    default = Restart()
    if section is None:
        return default
    with section.closing():
        return Restart(
            cuda_context=section.value("cuda_context", size, default.cuda_context),
            nccl=section.value("nccl", size, default.nccl),
        )


def _server(section: Section, file: Callable[[object], Path]) -> ServerConfig:
    with section.closing():
        flags = section.section("flags")
        return ServerConfig(
            url=section.required("url", web_address),
            name=section.value("name", plain_text, None),
            gpus=section.values("gpus", plain_text, ()) or None,
            flags=flags.flags() if flags else NO_FLAGS,
            token_file=section.value("token_file", file, None),
            ca_file=section.value("ca_file", file, None),
            insecure_skip_verify=section.value("insecure_skip_verify", boolean, default=False),
            model_config=section.value("model_config", file, None),
            launch=section.value("launch", partial(_launch, file), None),
        )


_LAUNCH_FIELDS = frozenset({"file", "service", "container"})


def _launch(file: Callable[[object], Path], value: object) -> LaunchFile:
    """A path, or a mapping with ``file`` (one path or several), ``service`` and ``container``."""
    given = value if isinstance(value, dict) else {"file": value}
    if unknown := given.keys() - _LAUNCH_FIELDS:
        raise ValueError(f"unknown field {min(map(str, unknown))} (file, service, container)")
    named = given.get("file")
    paths = named if isinstance(named, list) else [named]
    if not paths or named is None:
        raise ValueError("names no file")
    texts = {key: plain_text(given[key]) for key in ("service", "container") if given.get(key) is not None}
    return LaunchFile(tuple(file(path) for path in paths), **texts)


def _plan(name: str, section: Section) -> Plan:
    with section.closing():
        server = section.value("server", plain_text, None)
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
            "release_grace": config.holders.release_grace,
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
                "launch": _launch_mapping(server.launch),
            }
            for server in config.servers
        ],
        "plans": {plan.name: {"server": plan.server, **plan.flags.given()} for plan in config.plans},
    }


def _rule_mapping(rule: Rule) -> dict[str, str]:
    return {name: value for name in Rule.__dataclass_fields__ if (value := getattr(rule, name)) is not None}


def _launch_mapping(launch: LaunchFile | None) -> dict[str, Any] | None:
    if launch is None:
        return None
    return {
        "file": [str(path) for path in launch.files],
        "service": launch.service,
        "container": launch.container,
    }

"""vLLM's command line, read as vLLM reads it.

The rules are those of its parser in release 0.32.0, which is argparse with additions: underscores count as
hyphens, ``--config FILE`` puts a YAML file's entries before the other flags, ``--flag.key.key value`` builds
a JSON object, a flag may be shortened, and the last of several wins. Values of flags that kvwatch has no use
for are never kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvwatch.blockmath.flags import Flags, human_readable_int
from kvwatch.observe.processes import python_arguments
from kvwatch.observe.procfs import basename
from kvwatch.observe.records import Failure
from kvwatch.observe.safeyaml import load_document
from kvwatch.observe.serve_flags import MOVE_MEMORY, RETIRED, Arity, arity, resolve, resolve_short

DEFAULT_PORT = 8000
MAX_ARGUMENTS = 1000
"""Any user can start a process that looks like a server; no real one has as many arguments."""

_MAX_DEPTH = 20
_MAX_JSON = 64 * 1024

_SERVE = "serve"
_SERVE_SCRIPTS = frozenset({"vllm"})
_CLI_MODULES = frozenset({"vllm.entrypoints.cli.main", "vllm.scripts"})
_API_SERVER_MODULES = frozenset(
    {"vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry"}
)
_NUMBER = re.compile(r"^-(?:\d+|\d*\.\d+)$")
_FLAG_NAME = re.compile(r"^--?[A-Za-z][\w.-]{0,62}$")
_FIELDS = tuple(entry.name for entry in fields(Flags))
_OBJECTS = frozenset({"hf_overrides", "speculative_config", "attention_config"})
_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_KEPT = frozenset(
    {
        *_FIELDS,
        *_OBJECTS,
        *_SPECULATIVE,
        "served_model_name",
        "host",
        "port",
        "uds",
        "ssl_keyfile",
        "ssl_certfile",
        "device_ids",
        "headless",
        "api_server_count",
        "data_parallel_backend",
        "data_parallel_multi_port_external_lb",
        "distributed_executor_backend",
        "revision",
        "download_dir",
        "hf_config_path",
    }
)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What one command line says.

    Attributes:
        flags: those that bear on start-up.
        served_names: of ``--served-model-name``, else the model.
        host, port, uds: where the server listens, as written; host is None where not given.
        tls: a certificate was given.
        headless: engines without an HTTP server.
        ports_per_rank: each data-parallel rank answers on a port of its own, from ``port`` up.
        ray: its workers, or its data-parallel engines, are Ray actors.
        device_ids: of ``--device-ids``, as written.
        config_file: of ``--config``, as written.
        beside: by name, as written, the flags that move memory beside the KV cache and are none of ``flags``.
        unknown_flags: names that this release does not have, or that kvwatch cannot honour, without values.
        failures: flags and files that could not be read, each naming its flag.
    """

    flags: Flags
    served_names: tuple[str, ...] = ()
    host: str | None = None
    port: int | None = DEFAULT_PORT
    uds: str | None = None
    tls: bool = False
    headless: bool = False
    ports_per_rank: bool = False
    ray: bool = False
    device_ids: tuple[str, ...] | None = None
    config_file: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    hf_config_path: str | None = None
    beside: Mapping[str, str] = field(default_factory=dict)
    unknown_flags: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()


def server_arguments(argv: Sequence[str]) -> tuple[str, ...] | None:
    """The arguments of a vLLM server as its parser gets them, or None where the command line is not one's.

    They begin with ``serve`` where the server was started by that subcommand.
    ``vllm serve`` under any Python and path, its module forms, and the older
    ``vllm.entrypoints.openai.api_server`` count. A shell or another program that starts a server does not:
    the server is its child.
    """
    if not argv:
        return None
    if basename(argv[0]) in _SERVE_SCRIPTS:
        return _if_serve(argv[1:])
    python = python_arguments(argv)
    if python is None:
        return None
    kind, program, arguments = python
    if kind == "script":
        if basename(program) in _SERVE_SCRIPTS:
            return _if_serve(arguments)
        kind, program = "module", _module_of(program)
    if kind != "module":
        return None
    if program in _CLI_MODULES:
        return _if_serve(arguments)
    return tuple(arguments) if program in _API_SERVER_MODULES else None


def is_preload(argv: Sequence[str]) -> bool:
    """Whether this is ``vllm preload``, which holds weights for servers to share."""
    python = python_arguments(argv)
    words = argv if python is None else (python[1], *python[2])
    return len(words) > 1 and basename(words[0]) in _SERVE_SCRIPTS and words[1] == "preload"


def _if_serve(arguments: Sequence[str]) -> tuple[str, ...] | None:
    return tuple(arguments) if arguments and arguments[0] == _SERVE else None


def _module_of(path: str) -> str:
    """``/x/vllm/entrypoints/cli/main.py`` as ``vllm.entrypoints.cli.main``."""
    _, package, rest = path.removesuffix(".py").rpartition("/vllm/")
    return f"{package}{rest}".strip("/").replace("/", ".")


def parse_command_line(
    arguments: Sequence[str], *, read_file: Callable[[str], str] | None = None
) -> CommandLine:
    """Read the arguments of a server.

    Args:
        arguments: as of `server_arguments`.
        read_file: returns the text of the ``--config`` file; raises OSError where it cannot.

    Returns:
        What could be read. What could not is named in ``failures``; the rest is kept.
    """
    failures: list[Failure] = []
    if len(arguments) > MAX_ARGUMENTS:
        failures.append(Failure("launch", "too_many_arguments", f"only {MAX_ARGUMENTS} arguments were read"))
        arguments = arguments[:MAX_ARGUMENTS]
    serve = bool(arguments) and arguments[0] == _SERVE
    config = _ConfigFile(read_file, negatable=not serve)
    config_file, merged = _merge_config(arguments[serve:], config, failures)
    scan = _Scan()
    scan.run(merged)
    values = scan.values
    model = scan.positional or values.get("model")
    flags = _flags({**values, "model": model}, failures)
    return CommandLine(
        flags=flags,
        served_names=_served_names(values.get("served_model_name"), flags.model),
        host=_text(values.get("host")),
        port=_port(values.get("port"), failures),
        uds=_text(values.get("uds")),
        tls=bool(_text(values.get("ssl_keyfile")) or _text(values.get("ssl_certfile"))),
        headless=values.get("headless") is True or values.get("api_server_count") == "0",
        ports_per_rank=values.get("data_parallel_multi_port_external_lb") is True,
        ray="ray" in (values.get("distributed_executor_backend"), values.get("data_parallel_backend")),
        device_ids=_device_ids(_text(values.get("device_ids"))),
        config_file=config_file,
        revision=_text(values.get("revision")),
        download_dir=_text(values.get("download_dir")),
        hf_config_path=_text(values.get("hf_config_path")),
        beside=scan.beside,
        unknown_flags=tuple(dict.fromkeys(scan.unknown)),
        failures=tuple(failures),
    )


# --- --config -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """How to read ``--config``.

    Attributes:
        negatable: whether ``flag: false`` turns a flag off. Under ``vllm serve`` it is ignored, because the
        parser
            looks for ``--no-flag`` among the options of the program, not of the subcommand.
    """

    read: Callable[[str], str] | None
    negatable: bool


def _merge_config(
    arguments: Sequence[str], config: _ConfigFile, failures: list[Failure]
) -> tuple[str | None, list[str]]:
    """Put the file's entries where vLLM puts them: after a leading model, before all flags.

    Only ``--config FILE`` counts; vLLM does not read the file of ``--config=FILE``.
    """
    words = list(arguments)
    if "--config" not in words:
        return None, words
    at = words.index("--config")
    if at + 1 >= len(words):
        failures.append(Failure("launch", "bad_flag", "--config names no file"))
        return None, words[:at]
    file = words[at + 1]
    rest = words[:at] + words[at + 2 :]
    lead = 1 if rest and not rest[0].startswith("-") and at > 0 else 0
    return file, rest[:lead] + _config_words(file, config, failures) + rest[lead:]


def _config_words(file: str, config: _ConfigFile, failures: list[Failure]) -> list[str]:
    if config.read is None:
        failures.append(Failure("launch", "config_unread", f"--config {file} was not read"))
        return []
    try:
        entries = load_document(config.read(file))
        if not isinstance(entries, Mapping):
            raise ValueError("not a mapping of flags")
        return [
            word
            for key, value in entries.items()
            for word in _entry_words(str(key), value, negatable=config.negatable)
        ]
    except OSError as error:
        detail = f"--config {file} cannot be read: {error.strerror or error}"
        failures.append(Failure("launch", "config_unreadable", detail))
    except (ValueError, RecursionError) as error:
        failures.append(Failure("launch", "config_broken", f"--config {file} cannot be read: {error}"))
    return []


def _entry_words(key: str, value: object, *, negatable: bool) -> list[str]:
    match value:
        case True:
            return [f"--{key}"]
        case False:
            negated = f"no-{key.replace('_', '-')}"
            return [f"--{negated}"] if negatable and resolve(negated) == negated else []
        case list():
            return [f"--{key}", *map(_word, value)] if value else []
        case _:
            return [f"--{key}", _word(value)]


def _word(value: object) -> str:
    """A YAML value as a word. Aliases can make a small file a huge value, so an end is put to it."""
    if not isinstance(value, list | dict):
        return str(value)
    parts: list[str] = []
    size = 0
    for part in json.JSONEncoder(default=str).iterencode(value):
        parts.append(part)
        size += len(part)
        if size > _MAX_JSON:
            raise ValueError(f"a value is longer than {_MAX_JSON} characters")
    return "".join(parts)


# --- words ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Scan:
    """One pass over the words. Values by flag name, with underscores.

    Attributes:
        dotted: by spelling, the flag and the object built. Objects of two spellings (``-sc.a``, and
            ``--speculative-config.b``) are not merged: that of the spelling that came up last wins.
    """

    values: dict[str, Any] = field(default_factory=dict)
    dotted: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    positional: str | None = None

    def run(self, words: Sequence[str]) -> None:
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if word == "--":
                self._take_positionals(words[position:])
                break
            if _is_argument(word):
                self._take_positionals([word])
            elif word.startswith("-O"):
                position += self._optimization(word, words[position:])
            else:
                position += self._flag(word, words[position:])
        self.values.update(self.dotted.values())

    def _optimization(self, word: str, rest: Sequence[str]) -> int:
        """``-O3``, ``-O=3`` and ``-O 3``; earlier releases took ``-O.level=3`` too."""
        self.beside["optimization_level"] = word[2:].removeprefix("=") or "".join(rest[:1])
        return int(word == "-O")

    def _take_positionals(self, words: Iterable[str]) -> None:
        for word in words:
            self.positional = self.positional or word

    def _flag(self, word: str, rest: Sequence[str]) -> int:
        """Take one flag and its arguments; returns how many of ``rest`` it used."""
        written, equals, attached = word.partition("=")
        given = attached if equals else None
        if "." in written:
            return self._dotted(written, given, rest)
        name, attached_short = _resolve(written)
        if name is None:
            self._note_unknown(written)
            return 0 if given is not None else len(_arguments(rest, most=len(rest)))
        given = attached_short if attached_short is not None else given
        return self._store(name, given, rest)

    def _store(self, name: str, given: str | None, rest: Sequence[str]) -> int:
        kind = arity(name)
        if kind is Arity.SWITCH:
            return self._switch(name, given, rest)
        if given is not None:
            self._keep(name, (given,) if kind is Arity.LIST else given)
            return 0
        taken = _arguments(rest, most=len(rest) if kind is Arity.LIST else 1)
        if taken:
            self._keep(name, tuple(taken) if kind is Arity.LIST else taken[0])
        return len(taken)

    def _switch(self, name: str, given: str | None, rest: Sequence[str]) -> int:
        """Earlier releases took ``--enable-chunked-prefill false`` and ``=false``."""
        truth = {"true": True, "false": False}
        used = 0
        if given is None and rest and rest[0].lower() in truth:
            given, used = rest[0], 1
        value = truth.get((given or "true").lower(), True)
        negated = name.startswith("no-")
        self._keep(name.removeprefix("no-") if negated else name, value != negated)
        return used

    def _dotted(self, written: str, given: str | None, rest: Sequence[str]) -> int:
        used = 0
        if given is None:
            given, used = (rest[0], 1) if rest else ("", 0)
        written, listed = written.removesuffix("+"), written.endswith("+")
        head, *keys = written.split(".")
        name, _ = _resolve(head)
        if name is None or len(keys) > _MAX_DEPTH:
            self._note_unknown(head)
        elif _key(name) in _OBJECTS:
            value: Any = given.split(",") if listed else _json_or_text(given)
            for key in reversed(keys):
                value = {key: value}
            _, built = self.dotted.setdefault(_key(head), (_key(name), {}))
            _merge(built, value)
        elif name in MOVE_MEMORY:
            self.beside[".".join([_key(name), *keys])] = given
        return used

    def _keep(self, name: str, value: str | bool | tuple[str, ...]) -> None:
        if _key(name) in _KEPT:
            self.values[_key(name)] = value
            return
        if name in MOVE_MEMORY:
            self.beside[_key(name)] = _as_text(value)
        if name in RETIRED:
            self._note_unknown(f"--{name}")

    def _note_unknown(self, written: str) -> None:
        if _FLAG_NAME.match(written):
            self.unknown.append(written)


def _as_text(value: str | bool | tuple[str, ...]) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return " ".join(value)
        case _:
            return value


def _key(name: str) -> str:
    return name.replace("-", "_")


def _is_argument(word: str) -> bool:
    """Whether a word is a value rather than a flag, by argparse's rules."""
    if not word.startswith("-") or word == "-" or _NUMBER.match(word):
        return True
    written = word.partition("=")[0]
    return " " in word and "." not in written and _resolve(written)[0] is None


def _arguments(rest: Sequence[str], *, most: int) -> list[str]:
    taken: list[str] = []
    for word in rest[:most]:
        if word == "--" or not _is_argument(word):
            break
        taken.append(word)
    return taken


def _resolve(written: str) -> tuple[str | None, str | None]:
    """The full name of a flag as written, and the value that a short form carries with it (``-qfp8``)."""
    if written.startswith("--"):
        return resolve(written[2:].replace("_", "-")), None
    name = resolve_short(written)
    if name is None and (name := resolve_short(written[:2])) and written[:2] in ("-q", "-n", "-r"):
        return name, written[2:]
    return name, None


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return human_readable_int(text)
    except ValueError:
        return text


def _merge(into: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        present = into.get(key)
        if isinstance(value, Mapping) and isinstance(present, dict):
            _merge(present, value)
        elif isinstance(value, list) and isinstance(present, list):
            present.extend(value)
        else:
            into[key] = value


# --- values ---------------------------------------------------------------------------------------------


def _text(value: object) -> str | None:
    """A value as given; vLLM reads an empty one and ``None`` as not given."""
    return value if isinstance(value, str) and value not in ("", "None") else None


def _flags(values: Mapping[str, Any], failures: list[Failure]) -> Flags:
    wanted = {name: values.get(name) for name in (*_FIELDS, "attention_config")}
    wanted["speculative_config"] = _speculative_config(values, failures)
    wanted["hf_overrides"] = _object(wanted["hf_overrides"], "hf_overrides", failures)
    attention = _object(wanted.pop("attention_config"), "attention_config", failures) or {}
    wanted["attention_backend"] = _text(wanted["attention_backend"]) or attention.get("backend")
    good: dict[str, object] = {}
    for name, value in wanted.items():
        if value in (None, "", "None"):
            continue
        try:
            Flags.from_mapping({name: value})
        except ValueError as error:
            failures.append(_bad_flag(name, str(error).removeprefix(f"{name}: ")))
        else:
            good[name] = value
    return Flags.from_mapping(good)


def _speculative_config(values: Mapping[str, Any], failures: list[Failure]) -> Mapping[str, Any] | None:
    config = dict(_object(values.get("speculative_config"), "speculative_config", failures) or {})
    for flag, key in _SPECULATIVE.items():
        if (value := _text(values.get(flag))) is not None:
            config[key] = _json_or_text(value) if flag == "spec_tokens" else value
    return {_key(name): value for name, value in config.items()} or None


def _object(value: object, name: str, failures: list[Failure]) -> Mapping[str, Any] | None:
    if isinstance(value, Mapping):
        return value
    text = _text(value)
    if text is None:
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        failures.append(_bad_flag(name, f"not JSON: {error}"))
        return None
    if not isinstance(parsed, dict):
        failures.append(_bad_flag(name, "not a JSON object"))
        return None
    return parsed


def _served_names(value: object, model: str | None) -> tuple[str, ...]:
    if isinstance(value, tuple):
        names = tuple(name for name in value if _text(name))
        if names:
            return names
    return (model,) if model else ()


def _port(value: object, failures: list[Failure]) -> int | None:
    if value is None:
        return DEFAULT_PORT
    if isinstance(value, str) and value.isdigit() and int(value) <= 65535:
        return int(value)
    failures.append(_bad_flag("port", f"{value!r} is not a port"))
    return None


def _device_ids(value: str | None) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in value.split(",")) if value else None


def _bad_flag(name: str, problem: str) -> Failure:
    return Failure("launch", "bad_flag", f"--{name.replace('_', '-')}: {problem}")

"""What the next start of a server would use, read from whatever starts it as that stands on disk now."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pwd import getpwuid

from kvwatch.blockmath.errors import Unsupported
from kvwatch.config import LaunchFile, ServerConfig
from kvwatch.filestamp import Stamp
from kvwatch.observe.command_line import CommandLine, parse_command_line, server_arguments
from kvwatch.observe.launch import ENVIRONMENT, visible_devices
from kvwatch.observe.models import ModelSource, placed
from kvwatch.observe.nextstart_command import StartCommand, sole_server
from kvwatch.observe.nextstart_files import TrackedFiles, unchanged
from kvwatch.observe.nextstart_systemd import SYSTEM_PATHS, Manager, command_of, unit_command
from kvwatch.observe.nextstart_version import installed_version, names_its_environment
from kvwatch.observe.procfs import PROC, process_root
from kvwatch.observe.records import Failure, Launch, ModelConfig, NextStart, Process
from kvwatch.observe.safeyaml import NotYaml, load_documents

_USER_MANAGER = re.compile(r"/user@(\d+)\.service/")
_UNIT_TEXT = re.compile(r"^\[(?:Unit|Service|Install)\]\s*$", re.MULTILINE)
_YAML_SUFFIXES = frozenset({".yaml", ".yml", ".json"})


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a command line came from."""

    kind: str
    command: StartCommand


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer, and the files that it rests on.

    Attributes:
        told: the next start as a launch, for the model to be found by.
    """

    asked: object
    seen: tuple[Mapping[str, Stamp | None], ...]
    answer: NextStart | Failure
    told: Launch


class NextStartSource:
    """Reads one server's next start; unchanged files are not read again. For use by one thread."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._proc = proc_root
        self._running, self._next = ModelSource(proc_root), ModelSource(proc_root)
        self._kept: _Kept | None = None
        self._first: tuple[object, ModelConfig] | None = None

    def read(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None = None,
        settings: ServerConfig | None = None,
    ) -> NextStart | Failure:
        """What the server would be told if it started again now.

        Args:
            launch: what the running one was told, with the configuration laid over it.
            process: the server's; None where it cannot be seen.
            served_root: ``root`` of ``/v1/models``.
            settings: its entry in kvwatch.yaml.
        """
        first = self._first_model(launch, process, served_root, settings)
        kept = self._read(launch, process, settings)
        if isinstance(kept.answer, Failure):
            return kept.answer
        root = None if kept.told.model else served_root
        model = self._next.read(placed(kept.told, settings), root, process)
        return replace(kept.answer, model=model, first_model=first)

    def _read(self, launch: Launch, process: Process | None, settings: ServerConfig | None) -> _Kept:
        asked = (launch, process and (process.argv, process.cgroup), settings)
        kept = self._kept
        if kept is None or kept.asked != asked or not all(map(unchanged, kept.seen)):
            contained = process is not None and process.container is not None
            own = TrackedFiles()
            theirs = TrackedFiles(process_root(self._proc, launch.pid, contained=contained))
            answer, told = _Reader(launch, process, settings, own, theirs, self._proc).read()
            kept = self._kept = _Kept(asked, (own.seen, theirs.seen), answer, told)
        return kept

    def _first_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | None:
        identity = (launch.base_url, launch.pid, launch.start_time)
        if self._first is None or self._first[0] != identity:
            model = self._running.read(placed(launch, settings), served_root, process)
            self._first = (identity, model) if isinstance(model, ModelConfig) else None
        return self._first[1] if self._first else None


@dataclass(frozen=True, slots=True)
class _Reader:
    """One reading. ``own`` sees files as kvwatch does, ``theirs`` as the server does."""

    launch: Launch
    process: Process | None
    settings: ServerConfig | None
    own: TrackedFiles
    theirs: TrackedFiles
    proc_root: Path

    def read(self) -> tuple[NextStart | Failure, Launch]:
        try:
            source = self._source()
            return self._next_start(source)
        except Unsupported as unsupported:
            return Failure("launch", unsupported.reason, str(unsupported)), self.launch
        except RecursionError:
            return Failure("launch", "too_deep", "the launch file is nested too deep"), self.launch

    def _source(self) -> _Source:
        configured = self.settings.launch if self.settings is not None else None
        if configured is not None:
            return self._configured(configured)
        if (command := self._unit()) is not None:
            return _Source("systemd", command)
        if self.process is None:
            raise Unsupported(
                "no_launch_source", "its process cannot be seen and no launch file is configured"
            )
        return _Source("command_line", StartCommand(self.process.argv, self.launch.environment))

    def _unit(self) -> StartCommand | None:
        """The server of the systemd unit that the process runs in, None where it runs in no such unit."""
        process = self.process
        if process is None or process.container or not (process.unit or "").endswith(".service"):
            return None
        return unit_command(process.unit or "", _manager(process), self.theirs)

    def _configured(self, configured: LaunchFile) -> _Source:
        paths = [str(path.absolute()) for path in configured.files]
        texts = [self.own.required(path) for path in paths]
        name = configured.service or configured.files[0].name
        if _UNIT_TEXT.search(texts[0]):
            return _Source("systemd", _found(self._configured_unit(name, paths, texts), paths[0]))
        if configured.files[0].suffix in _YAML_SUFFIXES:
            return self._from_yaml(configured, paths, texts)
        return _Source("script", sole_server(texts[0], StartCommand(()), self.own.text))

    def _from_yaml(self, configured: LaunchFile, paths: Sequence[str], texts: Sequence[str]) -> _Source:
        # Most nodes have neither, and a command that looks once need not wait: see daemon.LATE_MODULES.
        from kvwatch.observe.nextstart_compose import compose_command
        from kvwatch.observe.nextstart_kubernetes import manifest_command

        try:
            documents = [document for text in texts for document in load_documents(text)]
        except NotYaml as error:
            raise Unsupported("not_yaml", f"{', '.join(paths)}: {error}") from None
        first = documents[0] if documents and isinstance(documents[0], Mapping) else {}
        if "services" in first:
            folder = str(Path(paths[0]).parent)
            command = compose_command(documents, configured.service, self.own.text, folder)
            return _Source("compose", command)
        command = manifest_command(documents, configured.service, configured.container, self.theirs.text)
        return _Source("kubernetes", command)

    def _configured_unit(self, name: str, paths: Sequence[str], texts: Sequence[str]) -> StartCommand | None:
        manager = Manager((str(Path(paths[0]).parent), *SYSTEM_PATHS))
        if len(texts) > 1:
            return command_of(name, texts, manager, self.own)
        return unit_command(name, manager, self.own)

    def _next_start(self, source: _Source) -> tuple[NextStart, Launch]:
        command = source.command
        cwd = command.cwd or self.launch.cwd
        line = self._command_line(command, cwd)
        flags = line.flags
        if self.settings is not None:
            flags = flags.with_changes(**self.settings.flags.given())
        files = tuple(dict.fromkeys([*self.own.texts, *self.theirs.texts]))
        environment = {name: text for name, text in command.environment.items() if name in ENVIRONMENT}
        everything = {**self.launch.environment, **environment}
        contained = self.process is not None and self.process.container is not None
        found = NextStart(
            source=source.kind,
            files=files,
            flags=flags,
            environment=environment,
            whole_environment=command.whole_environment,
            visible_devices=visible_devices(
                line, environment if command.whole_environment else everything, contained=contained
            ),
            version=self._version(command, cwd),
            beside=line.beside,
            unknown_flags=line.unknown_flags,
            failures=line.failures,
        )
        told = replace(
            self.launch,
            flags=flags,
            model=flags.model,
            cwd=cwd,
            revision=line.revision,
            download_dir=line.download_dir,
            hf_config_path=line.hf_config_path,
            environment=everything,
        )
        return found, told

    def _command_line(self, command: StartCommand, cwd: str | None) -> CommandLine:
        def read_config(path: str) -> str:
            if not path.startswith("/") and cwd is None:
                raise FileNotFoundError(2, "the working directory of the server is unknown")
            return self.theirs.text(path if path.startswith("/") else f"{cwd}/{path}")

        return parse_command_line(server_arguments(command.argv) or (), read_file=read_config)

    def _version(self, command: StartCommand, cwd: str | None) -> str | None:
        if command.image is not None:
            return command.image_version
        running = self.process.argv if self.process is not None else ()
        argv = command.argv if names_its_environment(command.argv) else running
        executable = self._executable() if argv[:2] == running[:2] else None
        return installed_version(argv, cwd, executable, self.theirs)

    def _executable(self) -> str | None:
        """The program file of the running process, as the process itself names it."""
        try:
            return str((self.proc_root / str(self.launch.pid) / "exe").readlink())
        except OSError:
            return None


def _found(command: StartCommand | None, path: str) -> StartCommand:
    if command is None:
        raise Unsupported("no_server_command", f"{path} starts no vLLM server that kvwatch can read")
    return command


def _manager(process: Process) -> Manager:
    """The systemd instance whose unit the process's cgroup names."""
    match = _USER_MANAGER.search(process.cgroup or "")
    if match is None:
        return Manager()
    uid = int(match[1])
    try:
        entry = getpwuid(uid)
    except KeyError:
        return Manager.of_user(uid, None, None)
    return Manager.of_user(uid, entry.pw_name, entry.pw_dir)

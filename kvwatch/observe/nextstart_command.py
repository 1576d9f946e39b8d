"""The vLLM server that a command starts: by itself, or behind ``env``, ``numactl``, a shell, a container."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvwatch.blockmath.errors import Unsupported
from kvwatch.observe.command_line import server_arguments
from kvwatch.observe.nextstart_script import ShellCommand, script_commands, unknown_part
from kvwatch.observe.procfs import basename

ReadText = Callable[[str], str]
"""The text of a file by its path; raises OSError or Unsupported."""

_WRAPPERS = frozenset(
    {
        *("chrt", "ionice", "nice", "numactl", "schedtool", "taskset"),
        *("command", "dumb-init", "exec", "nohup", "nsys", "setsid", "stdbuf", "sudo", "systemd-cat"),
        *("systemd-inhibit", "systemd-run", "time", "timeout", "tini", "unbuffer"),
        *("catatonit", "chpst", "docker-init", "gosu", "runuser", "setpriv", "srun", "su-exec"),
        *("conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry", "rye", "uv", "uvx"),
        *("screen", "su", "tmux"),
    }
)
_TAKE_SCRIPTS = frozenset({"runuser", "screen", "su", "tmux"})
"""Wrappers whose last argument may be a shell's text."""
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_CONTAINER_ENGINES = frozenset({"docker", "podman", "nerdctl"})
_SHEBANG = re.compile(r"#!\s*\S*?(?:/env\s+(?:-S\s+)?)?(?:ba|da|a|k|z)?sh\b")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SERVER_IMAGE = re.compile(r"(?:^|/)vllm-openai[\w.-]*(?=[:@]|$)")
"""vLLM's own image and those made from it under its name: their entry point is the server."""
_OFFICIAL_IMAGE = re.compile(r"(?:^|/)vllm/vllm-openai(?=[:@]|$)")
_TAG = re.compile(r":v?(\d+\.\d+\.\d+(?:\.?(?:post|rc|a|b)\d+)?)(?:[-+@]|$)")
_TELLING = frozenset({"--gpu-memory-utilization", "--max-model-len", "--served-model-name"})
"""Flags that no other program has."""

_MAX_LEVELS = 4


@dataclass(frozen=True, slots=True)
class StartCommand:
    """One command line as a launch source has it. What it holds is never published.

    Attributes:
        environment: variables that the source sets, all of them.
        whole_environment: the program gets no others that bear on start-up.
        cwd: None where the source does not tell.
        image: of the container that it runs in, None outside of containers.
    """

    argv: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    whole_environment: bool = False
    cwd: str | None = None
    image: str | None = None

    @property
    def image_version(self) -> str | None:
        """The release that the tag of vLLM's own image names."""
        if self.image is None or not _OFFICIAL_IMAGE.search(self.image):
            return None
        tag = _TAG.search(self.image.rpartition("/")[2])
        return tag[1] if tag else None


def serving_command(command: StartCommand, read: ReadText) -> StartCommand | None:
    """The server among what a command starts, None where there is none.

    Raises:
        Unsupported: there is one, but its arguments cannot be told without running the command; or several.
    """
    found = _unwrapped(command, read, _MAX_LEVELS)
    return None if found is None else _fully_known(found)


def _fully_known(command: StartCommand) -> StartCommand:
    if (name := unknown_part(command.argv)) is not None:
        detail = f"the server's arguments depend on {name}, which only a run can tell"
        raise Unsupported("dynamic_script", detail)
    return command


def _unwrapped(command: StartCommand, read: ReadText, levels: int) -> StartCommand | None:
    argv = command.argv
    if not argv or not levels:
        return None
    if server_arguments(argv) is not None:
        return command
    program = basename(argv[0])
    if program == "env":
        return _unwrapped(_without_env(command), read, levels - 1)
    if program in _WRAPPERS:
        return _behind_wrapper(command, read, levels)
    if program in _CONTAINER_ENGINES:
        contained = _in_container(command)
        return None if contained is None else _unwrapped(contained, read, levels - 1)
    text = _shell_text(argv, read)
    return None if text is None else _in_script(text, command, read, levels - 1)


def _without_env(command: StartCommand) -> StartCommand:
    words = list(command.argv[1:])
    environment = dict(command.environment)
    whole = command.whole_environment
    while words and (words[0].startswith("-") or _ASSIGNMENT.fullmatch(words[0])):
        word = words.pop(0)
        if match := _ASSIGNMENT.fullmatch(word):
            environment[match[1]] = match[2]
        elif word in ("-i", "--ignore-environment"):
            environment, whole = {}, True
        elif word in ("-u", "-C") and words:
            environment.pop(words.pop(0), None)
    return replace(command, argv=tuple(words), environment=environment, whole_environment=whole)


def _behind_wrapper(command: StartCommand, read: ReadText, levels: int) -> StartCommand | None:
    """A wrapper's options are not known; the server begins where a server's command line does."""
    argv = command.argv
    for start in range(1, len(argv)):
        program = basename(argv[start])
        known = program in _SHELLS | _WRAPPERS | {"env"}
        if known or server_arguments(argv[start:]) is not None:
            return _unwrapped(replace(command, argv=argv[start:]), read, levels - 1)
    if basename(argv[0]) in _TAKE_SCRIPTS:
        return _in_script(argv[-1], command, read, levels - 1)
    return None


def _in_container(command: StartCommand) -> StartCommand | None:
    """``docker run … IMAGE ARGUMENTS``: vLLM's own image has the server as its entry point."""
    argv = command.argv
    at = next((place for place, word in enumerate(argv) if _SERVER_IMAGE.search(word)), None)
    if at is None:
        # Which word names another image only the options tell, unless a server follows it.
        servers = (place for place in range(2, len(argv)) if server_arguments(argv[place:]) is not None)
        at = next(servers, 0) - 1
    if at < 0 or not {"run", "create"} & set(argv[:at]):
        return None
    options = argv[:at]
    environment = _container_environment(options, command.environment)
    given = list(_values_of(options, "--entrypoint"))
    entrypoint = [word for word in given[-1:] if word] if given else None  # An empty one is none at all.
    return container_command(argv[at], entrypoint, argv[at + 1 :], environment)


def container_command(
    image: str | None,
    entrypoint: Sequence[str] | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: str | None = None,
) -> StartCommand:
    """What a container runs.

    Args:
        entrypoint: None for the image's own.

    Raises:
        Unsupported: vLLM's arguments are given to the entry point of an image that is not vLLM's.
    """
    words = [*(entrypoint or ()), *arguments]
    if entrypoint is None and server_arguments(words) is None:
        if image is not None and _SERVER_IMAGE.search(image):
            words = ["vllm", "serve", *words]
        elif _TELLING & {word.partition("=")[0] for word in words}:
            raise Unsupported("image_entrypoint", f"what the image {image} starts by itself is not known")
    return StartCommand(tuple(words), environment, cwd=cwd, image=image or "")


def _container_environment(options: Sequence[str], outer: Mapping[str, str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for text in _values_of(options, "-e", "--env"):
        variable, equals, value = text.partition("=")
        if equals or variable in outer:
            given[variable] = value if equals else outer[variable]
    return given


def _values_of(options: Sequence[str], *names: str) -> Iterator[str]:
    """``--name VALUE`` and ``--name=VALUE``."""
    for option, following in zip(options, (*options[1:], ""), strict=True):
        name, equals, attached = option.partition("=")
        if option in names:
            yield following
        elif equals and name in names:
            yield attached


# --- shells --------------------------------------------------------------------------------------------


def _shell_text(argv: Sequence[str], read: ReadText) -> str | None:
    """The script that a shell, or a file made for one, would run."""
    if basename(argv[0]) in _SHELLS:
        words = list(argv[1:])
        while words and words[0].startswith(("-", "+")):
            option = words.pop(0)
            if option == "-o" and words:
                words.pop(0)
            elif not option.startswith("--") and "c" in option:
                return words[0] if words else None
        return _readable(words[0], read) if words else None
    if "/" not in argv[0]:
        return None
    text = _readable(argv[0], read)
    return text if text is not None and (_SHEBANG.match(text) or argv[0].endswith(".sh")) else None


def _readable(path: str, read: ReadText) -> str | None:
    """A script's text; None for a binary, and for what cannot be read unless it claims to be a script."""
    try:
        return read(path)
    except Unsupported:
        return None
    except OSError as error:
        if path.endswith(".sh"):
            raise Unsupported("script_unreadable", f"{path} cannot be read: {error.strerror}") from None
        return None


def _in_script(text: str, command: StartCommand, read: ReadText, levels: int) -> StartCommand | None:
    found = [
        server
        for each in script_commands(text, command.environment, command.cwd)
        if (server := _unwrapped(_from_shell(each, command), read, levels)) is not None
    ]
    if not found:
        return None
    if any(one.argv != found[0].argv for one in found):
        raise Unsupported("several_servers", f"the script has {len(found)} lines that start a server")
    return found[0]


def _from_shell(found: ShellCommand, outer: StartCommand) -> StartCommand:
    known = {name: value for name, value in found.environment.items() if unknown_part((value,)) is None}
    return replace(
        outer,
        argv=found.words,
        environment=known,
        whole_environment=(
            outer.whole_environment and found.whole_environment and len(known) == len(found.environment)
        ),
        cwd=found.cwd,
    )


def sole_server(text: str, command: StartCommand, read: ReadText) -> StartCommand:
    """The server that a shell script starts.

    Raises:
        Unsupported: it starts none that can be read, or several.
    """
    found = _in_script(text, command, read, _MAX_LEVELS)
    if found is None:
        raise Unsupported("no_server_command", "no line that kvwatch can read starts a vLLM server")
    return _fully_known(found)


def sole(
    named: Iterable[tuple[str, Mapping[str, Any]]],
    command: Callable[[Mapping[str, Any]], StartCommand | None],
) -> StartCommand:
    """The server among services or containers, of which several may have the same name.

    Raises:
        Unsupported: none of them is one, several are, or the only one cannot be told.
    """
    found: list[tuple[str, StartCommand]] = []
    problem: Unsupported | None = None
    for name, given in named:
        try:
            if (server := command(given)) is not None:
                found.append((name, server))
        except Unsupported as unsupported:
            problem = problem or unsupported
    if len(found) == 1:
        return found[0][1]
    if found:
        names = ", ".join(name for name, _ in found)
        raise Unsupported("several_servers", f"{names} are vLLM servers: name one in kvwatch.yaml")
    raise problem or Unsupported("no_server_command", "nothing in it starts a vLLM server")

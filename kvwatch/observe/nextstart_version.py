"""The vLLM release installed in the Python environment that a command line runs in, from its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvwatch.blockmath.errors import Unsupported
from kvwatch.observe.nextstart_files import TrackedFiles
from kvwatch.observe.procfs import basename

_LIBRARIES = ("lib", "lib64")
_PACKAGES = ("site-packages", "dist-packages")
_PYTHON_FOLDER = re.compile(r"python3(?:\.\d+t?)?")
_WRITTEN = re.compile(r"^(?:__version__\s*=\s*)?version\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_DIST_INFO = re.compile(r"vllm-(\d[\w.]*?)(?:\+[\w.]+)?\.dist-info")


def installed_version(
    argv: Sequence[str], cwd: str | None, executable: str | None, files: TrackedFiles
) -> str | None:
    """The release that this command line would run, None where it is not to be found.

    Args:
        argv: of a vLLM server; its program or script tells the environment.
        executable: of the running process, which tells a system-wide Python.
        files: the file system of the server.
    """
    for prefix in dict.fromkeys(_prefixes(argv, cwd, executable)):
        for packages in _package_folders(prefix, files):
            if (version := _version_in(packages, files)) is not None:
                return version
    return None


def names_its_environment(argv: Sequence[str]) -> bool:
    """Whether the command line says by a path which Python environment it runs in."""
    return any("/" in word for word in _programs(argv))


def _programs(argv: Sequence[str]) -> Sequence[str]:
    """The words that may be paths of the interpreter and of the script."""
    return argv[: 2 if len(argv) > 1 and basename(argv[0]).startswith(("python", "pypy")) else 1]


def _prefixes(argv: Sequence[str], cwd: str | None, executable: str | None) -> Iterator[str]:
    for word in reversed(_programs(argv)):
        if "/" in word and (word.startswith("/") or cwd is not None):
            yield _two_up(word if word.startswith("/") else f"{cwd}/{word}")
    if executable is not None:
        yield _two_up(executable)
        yield "/usr/local"


def _two_up(path: str) -> str:
    """``/opt/venv`` of ``/opt/venv/bin/vllm``; ``/`` for what has no such folder."""
    return path.rpartition("/")[0].rpartition("/")[0] or "/"


def _package_folders(prefix: str, files: TrackedFiles) -> Iterator[str]:
    for library in _LIBRARIES:
        for python in files.names(f"{prefix}/{library}"):
            if _PYTHON_FOLDER.fullmatch(python):
                yield from (f"{prefix}/{library}/{python}/{packages}" for packages in _PACKAGES)


def _version_in(packages: str, files: TrackedFiles) -> str | None:
    """As vLLM's own module has it (that is what ``/version`` answers), else as the installer noted it."""
    try:
        found = _WRITTEN.search(files.text(f"{packages}/vllm/_version.py"))
    except (OSError, Unsupported):
        found = None
    if found is not None:
        return found[1]
    noted = [match[1] for name in files.names(packages) if (match := _DIST_INFO.fullmatch(name))]
    return noted[0] if len(noted) == 1 else None

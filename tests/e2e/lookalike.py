"""A process tree that looks like a vLLM server's, in namespaces of its own, for tests that need no model.

The parent has vLLM's command line and answers HTTP; its child has the title ``VLLM::EngineCore``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.waiting import wait_until

STARTED_SECONDS = 30.0
TITLE = "VLLM::EngineCore"

# A name in /proc/PID/comm has 15 characters; the whole title is the first argument.
_ENGINE = f"""
import ctypes, time
ctypes.CDLL(None).prctl(15, b"{TITLE}"[:15], 0, 0, 0)
print(flush=True)
time.sleep(600)
"""
_PARENT = """
import http.server, json, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    ANSWERS = {
        "/metrics": b'vllm:num_requests_running{engine="0",model_name="m"} 0.0\\n',
        "/version": b'{"version": "0.32.0"}',
        "/v1/models": json.dumps({"data": [{"id": "m", "root": "m", "max_model_len": 1024}]}).encode(),
    }

    def do_GET(self):
        answer = self.ANSWERS.get(self.path)
        self.send_response(200 if answer else 404)
        self.send_header("Content-Length", str(len(answer or b"")))
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, *arguments):
        pass

engine = subprocess.Popen([TITLE, "-c", ENGINE], executable=sys.executable, stdout=subprocess.PIPE)
engine.stdout.readline()
http.server.HTTPServer(("0.0.0.0", int(sys.argv[-1])), Handler).serve_forever()
"""
# The first process of a PID namespace takes orphans over, and its end would end all others.
_FIRST = '"$@" & wait; while :; do sleep 60; done'


@dataclass(frozen=True, slots=True)
class Lookalike:
    """Pids as seen from outside of the namespaces.

    Attributes:
        first: pid 1 within.
    """

    first: int
    parent: int
    engine: int


class Namespaces:
    """New PID, mount and network namespaces with a look-alike in them, gone when the block is left."""

    def __init__(self, directory: Path, *, port: int) -> None:
        program = directory / "vllm"
        program.write_text(f"TITLE, ENGINE = {TITLE!r}, {_ENGINE!r}\n{_PARENT}", encoding="utf-8")
        serve = (sys.executable, str(program), "serve", "org/model", "--port", str(port))
        self._unshare = subprocess.Popen(
            [*unshare_command(), "sh", "-c", _FIRST, "sh", *serve],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._unshare.kill()
        self._unshare.wait()

    def wait_started(self) -> Lookalike:
        """Wait until the engine has its title."""
        found = wait_until(self._find, STARTED_SECONDS)
        assert found is not None
        return found

    def _find(self) -> Lookalike | None:
        children = psutil.Process(self._unshare.pid).children(recursive=True)
        by_word = {word: child.pid for child in children for word in child.cmdline()[:3]}
        if TITLE not in by_word or "serve" not in by_word:
            return None
        if not Path(f"/proc/{by_word[TITLE]}/comm").read_text(encoding="ascii").startswith(TITLE[:15]):
            return None
        return Lookalike(children[0].pid, by_word["serve"], by_word[TITLE])


def unshare_command() -> tuple[str, ...]:
    """Starts a program in namespaces of its own; without root it gets a user namespace as well."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ("unshare", *user, "--pid", "--fork", "--mount-proc", "--net", "--kill-child")


def may_unshare() -> bool:
    """Whether this machine lets us make namespaces; a container without CAP_SYS_ADMIN does not."""
    attempt = subprocess.run([*unshare_command(), "true"], capture_output=True, check=False)
    return attempt.returncode == 0

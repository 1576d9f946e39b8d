"""`kvwatch doctor`: what kvwatch can and cannot see here."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kvwatch.cli.common import add_config_argument, read_config
from kvwatch.config import Config
from kvwatch.doctor import Check, Seen, State, examine, exit_code
from kvwatch.export.listeners import Listener
from kvwatch.export.textfile import check_replaceable
from kvwatch.export.webconfig import load_web_config
from kvwatch.observe.cycle import Observation, Observer
from kvwatch.observe.host import Access, read_access, read_host
from kvwatch.observe.local import LocalSources
from kvwatch.units import counted
from kvwatch.yamlfile import ConfigError

SCHEMA = 1
COLUMNS = 100
_NO_START = "kvwatch run does not start"


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "doctor",
        description="Checks what kvwatch needs on this node: permissions, libraries, endpoints, model files,"
        " configuration, clock and addresses. Says what each missing thing costs and how to grant it. Run it"
        " as the user that kvwatch runs as.",
        epilog="exit code: 0 nothing is missing, 1 something is, 2 kvwatch cannot work here",
    )
    add_config_argument(parser)
    parser.add_argument(
        "--textfile", metavar="PATH", type=Path, help="check also that kvwatch run could write this file"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, judge and print."""
    checks = examine(_look(args))
    code = exit_code(checks)
    if args.json:
        document = {"schema": SCHEMA, "exit": code, "checks": [asdict(check) for check in checks]}
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(line for check in checks for line in _lines(check)))
    return code


def _lines(check: Check) -> Iterator[str]:
    mark = check.state.upper() if check.state in (State.MISSING, State.FATAL) else check.state
    yield _wrapped(f"{mark:8} {check.subject}: {check.found}")
    for name in ("costs", "grant"):
        if text := getattr(check, name):
            yield _wrapped(f"{'':8} {name}: {text}")


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False
    )


# --- looking --------------------------------------------------------------------------------------------


def _look(args: argparse.Namespace) -> Seen:
    host = read_host()
    try:
        config = read_config(args.config)
    except ConfigError as error:
        grant = f"correct it; then: kvwatch check-config {args.config or 'FILE'}"
        broken = Check("configuration", State.FATAL, str(error), _NO_START, grant)
        return Seen(Config(), host, None, setup=(broken,))
    servers, plans = counted(len(config.servers), "server"), counted(len(config.plans), "plan")
    found = f"{config.source}: {servers}, {plans}"
    setup = [
        Check("configuration", State.OK, found if config.source else "none: the defaults"),
        *_files(config),
        *_web(config),
        *_textfile(args.textfile),
    ]
    observer = Observer(LocalSources(config.poll), config)
    observation = observer.observe()
    observer.close()
    return Seen(config, host, observation, _access(observation), tuple(setup))


def _access(observation: Observation) -> dict[int, Access]:
    return {
        server.launch.pid: read_access(server.launch.pid)
        for server in observation.servers
        if server.launch.pid is not None
    }


def _files(config: Config) -> Iterator[Check]:
    """The files that the configuration names."""
    for server in config.servers:
        launch = server.launch.files if server.launch else ()
        for path in (server.token_file, server.ca_file, server.model_config, *launch):
            if path is not None and (reason := _unreadable(path)):
                yield Check(
                    f"file {path.absolute()}",
                    State.MISSING,
                    reason,
                    f"what kvwatch.yaml wants of it for {server.name or server.url}",
                    f"sudo setfacl -m u:{read_host().user}:r {path.absolute()}",
                )


def _unreadable(path: Path) -> str | None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _web(config: Config) -> Iterator[Check]:
    web = config.web
    tls = False
    if web.config_file is not None:
        try:
            tls = load_web_config(web.config_file).tls is not None
        except ConfigError as error:
            yield Check("web configuration", State.FATAL, str(error), _NO_START, "correct what it names")
        else:
            yield Check("web configuration", State.OK, str(web.config_file))
    for address in web.listen_addresses:
        yield _address(address, tls=tls)


def _address(address: str, *, tls: bool) -> Check:
    try:
        listener = Listener(address)
    except (OSError, ValueError) as error:
        if not tls and _is_kvwatch(address):
            return Check("address", State.OK, f"kvwatch serves {address} already")
        port = address.rpartition(":")[2]
        grant = f"free it (sudo ss -ltnp 'sport = :{port}'), or choose another with web.listen_address"
        return Check("address", State.FATAL, str(error), _NO_START, grant)
    listener.close()
    return Check("address", State.OK, f"{address} is free")


def _is_kvwatch(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    connection = HTTPConnection(host.strip("[]") or "localhost", int(port), timeout=2)
    try:
        connection.request("GET", "/-/healthy")
        return connection.getresponse().read(64) == b"healthy\n"
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _textfile(path: Path | None) -> Sequence[Check]:
    if path is None:
        return ()
    costs = f"{path}; the page over HTTP is not touched by it"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        grant = f"sudo install -d -o {read_host().user} {path.parent}"
        return (
            Check("textfile", State.MISSING, f"{path.parent} is not there or not writable", costs, grant),
        )
    try:
        check_replaceable(path)
    except OSError as error:
        grant = "name a file that kvwatch may replace, such as kvwatch.prom"
        return (Check("textfile", State.MISSING, f"{path}: {error.strerror}", costs, grant),)
    return (Check("textfile", State.OK, f"{path.parent} can be written to"),)

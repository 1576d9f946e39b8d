"""`kvwatch run`: the daemon."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvwatch.cli.common import (
    EXIT_USAGE,
    add_config_argument,
    add_log_arguments,
    complain,
)
from kvwatch.cli.watched import Watched, add_replay_argument, watched_or_complain
from kvwatch.config import Config
from kvwatch.daemon import Daemon
from kvwatch.export.content import render
from kvwatch.export.server import DEFAULT_LIMITS, ExporterServer
from kvwatch.export.textfile import write_textfile
from kvwatch.export.webconfig import WebConfig
from kvwatch.logs import log_event, start_logging
from kvwatch.monitor import Monitor
from kvwatch.privileges import DAC_OVERRIDE, NEEDED, drop_privileges, is_root
from kvwatch.sdnotify import Notifier

EXIT_CRASHED = 1


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "run",
        description="Watches this node and serves the page for Prometheus.",
        epilog="exit code: 0 it was told to stop, 1 it crashed or --once could not write the --textfile, 2"
        " wrong configuration or address",
    )
    add_config_argument(parser)
    add_replay_argument(parser)
    parser.add_argument("--once", action="store_true", help="look once, print the page and end")
    parser.add_argument(
        "--textfile",
        metavar="PATH",
        type=Path,
        help="also write the page to this file (with --once: instead of printing it)",
    )
    parser.add_argument(
        "--web.listen-address",
        dest="listen_addresses",
        metavar="ADDRESS",
        action="append",
        help="address to serve on, repeatable (default: :9744); overrides web.listen_address",
    )
    parser.add_argument(
        "--web.config.file",
        dest="web_config",
        metavar="FILE",
        type=Path,
        help="TLS, passwords and headers, in exporter-toolkit's format; overrides web.config_file",
    )
    add_log_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until told to stop. Exit code 0; 2 when the configuration or an address cannot be used."""
    adjust = partial(_with_overrides, args=args)
    watched = watched_or_complain(args, adjust=adjust)
    if watched is None:
        return EXIT_USAGE
    start_logging(args.log_level, args.log_format)
    if args.once:
        return _once(watched, args.textfile)
    monitor = watched.monitor
    daemon = Daemon(
        monitor,
        config_path=monitor.config.source,
        adjust=adjust,
        textfile=args.textfile,
        notifier=Notifier(),
    )
    keep = NEEDED if args.textfile is None else (*NEEDED, DAC_OVERRIDE)
    return serve(monitor, daemon, keep=keep)


def _with_overrides(config: Config, args: argparse.Namespace) -> Config:
    web = config.web
    if args.listen_addresses:
        web = replace(web, listen_addresses=tuple(args.listen_addresses))
    if args.web_config:
        web = replace(web, config_file=args.web_config)
    return replace(config, web=web)


def _once(watched: Watched, textfile: Path | None) -> int:
    content = render(watched.look(), watched.monitor.config)
    if textfile is None:
        sys.stdout.buffer.write(content.metrics)
        return 0
    try:
        write_textfile(textfile, content.metrics)
    except OSError as error:
        complain(f"{textfile}: {error.strerror or error}")
        return 1
    return 0


def serve(
    monitor: Monitor,
    daemon: Daemon,
    *,
    announce: Callable[[str], None] | None = None,
    keep: Collection[int] = NEEDED,
) -> int:
    """Serve a daemon's cycles until SIGTERM or SIGINT.

    Args:
        announce: gets each address that is listened on.
        keep: capabilities that are not given up once the addresses are bound.
    """
    web = monitor.config.web
    try:
        server = ExporterServer(
            web.listen_addresses,
            web_config=WebConfig(web.config_file) if web.config_file else None,
            reload=daemon.reload if web.enable_reload else None,
            limits=replace(DEFAULT_LIMITS, scrapes=web.max_scrapes),
        )
    except (OSError, ValueError) as error:
        complain(f"cannot serve: {error}")
        return EXIT_USAGE
    _drop_privileges(keep)
    daemon.handle_signals()
    server.start()
    for address in server.addresses:
        log_event(logging.INFO, "serving", address=address)
        if announce is not None:
            announce(address)
    try:
        daemon.run(server.publish)
    finally:
        server.close()
    return EXIT_CRASHED if daemon.crashed else 0


def _drop_privileges(keep: Collection[int]) -> None:
    if is_root():
        log_event(logging.WARNING, "running_as_root", detail="a plain user would do: see kvwatch doctor")
    try:
        drop_privileges(keep)
    except OSError as error:
        log_event(logging.WARNING, "privileges_kept", detail=error.strerror or error)

"""`kvwatch demo`: the whole of kvwatch on an embedded node."""

from __future__ import annotations

import argparse
import threading
from dataclasses import replace
from typing import Any

from kvwatch.cli.common import add_log_arguments, positive_number
from kvwatch.cli.run import serve
from kvwatch.config import Config
from kvwatch.daemon import Daemon
from kvwatch.demo.node import DemoNode
from kvwatch.demo.scenario import load_scenario
from kvwatch.export.cycle import Cycle
from kvwatch.export.text import status_text
from kvwatch.logs import start_logging
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "demo",
        description="Serves the page of an embedded node on which a notebook and a leftover worker take VRAM"
        " until a restart becomes infeasible, then are killed. A round takes a simulated hour.",
    )
    parser.add_argument(
        "--web.listen-address",
        dest="listen_address",
        metavar="ADDRESS",
        default="127.0.0.1:9744",
        help="address to serve on (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        metavar="FACTOR",
        type=positive_number,
        default=120.0,
        help="simulated seconds per second (default: %(default)g: a round takes 30 s)",
    )
    parser.add_argument(
        "--duration", metavar="SECONDS", type=positive_number, help="end after so many real seconds"
    )
    add_log_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the demo until interrupted; prints the status whenever the verdict changes."""
    start_logging(args.log_level, args.log_format)
    config = Config()
    config = replace(config, web=replace(config.web, listen_addresses=(args.listen_address,)))
    with DemoNode(load_scenario(), speed=args.speed) as node:
        observer = Observer(node, config, now=node.now)
        monitor = Monitor(observer, config, now=node.now, simulated=True)
        daemon = Daemon(monitor, speed=args.speed, on_cycle=_Announcer(node))
        if args.duration:
            timer = threading.Timer(args.duration, daemon.stop)
            timer.daemon = True
            timer.start()
        return serve(monitor, daemon, announce=_announce)


def _announce(address: str) -> None:
    print(f"page: http://{address}/  metrics: http://{address}/metrics", flush=True)


class _Announcer:
    """Prints the whole status when a verdict, or the check that blocks, differs from the last one."""

    def __init__(self, node: DemoNode) -> None:
        self._node = node
        self._last: dict[str, tuple[bool | None, str | None]] | None = None

    def __call__(self, cycle: Cycle) -> None:
        verdicts = {
            name: (forecast.feasible, forecast.blocking_check)
            for name, forecast in cycle.forecasts.restart.items()
        }
        if verdicts != self._last:
            self._last = verdicts
            print(f"\n--- simulated minute {self._node.minute:.1f} ---\n{status_text(cycle)}", flush=True)

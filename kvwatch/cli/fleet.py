"""`kvwatch fleet`: headroom and verdicts of every node, out of Prometheus."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvwatch.cli.common import EXIT_USAGE, argument, complain, positive_number
from kvwatch.config import web_address
from kvwatch.fleet.api import Access, ApiError, PrometheusApi
from kvwatch.fleet.survey import Fleet, survey
from kvwatch.fleet.text import fleet_json, fleet_text

EXIT_FEASIBLE = 0
EXIT_INFEASIBLE = 1
EXIT_UNKNOWN = 2


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "fleet",
        description="Asks Prometheus, Thanos, Mimir or VictoriaMetrics about every node that runs kvwatch:"
        " where a restart would fail, where there is room, and how each plan would do.",
        epilog="exit code: 0 every server would start again, 1 some would not, 2 unknown or error",
    )
    parser.add_argument(
        "--prometheus",
        required=True,
        metavar="URL",
        type=argument(web_address),
        help="the API without /api/v1, such as http://prometheus:9090 or https://mimir/prometheus",
    )
    parser.add_argument("--match", default="", metavar="MATCHERS", help="only these nodes: 'cluster=\"eu\"'")
    parser.add_argument(
        "--node-label", default="instance", metavar="LABEL", help="what names a node (default: %(default)s)"
    )
    parser.add_argument("--plan", metavar="NAME", help="show this plan only")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="certificate authorities to trust")
    parser.add_argument("--insecure-skip-verify", action="store_true", help="trust any certificate")
    parser.add_argument(
        "--header",
        action="append",
        type=argument(_header),
        default=[],
        metavar="NAME:VALUE",
        help="sent with every query, repeatable: 'X-Scope-OrgID: team'",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=30.0,
        metavar="SECONDS",
        help="for one query (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the survey; the exit code is the verdict."""
    access = Access(
        args.prometheus,
        token_file=args.token_file,
        ca_file=args.ca_file,
        insecure_skip_verify=args.insecure_skip_verify,
        headers=dict(args.header),
        timeout=args.timeout,
    )
    try:
        with PrometheusApi(access) as api:
            fleet = survey(api.query, match=args.match, node_label=args.node_label)
    except ApiError as error:
        complain(str(error))
        return EXIT_USAGE
    for warning in api.warnings:
        complain(f"{args.prometheus} warns: {warning}")
    print(fleet_json(fleet) if args.json else fleet_text(fleet, plan=args.plan))
    return exit_code(fleet)


def exit_code(fleet: Fleet) -> int:
    """0 where every server would start again, 1 where some would not, 2 where it is not known."""
    if any(node.infeasible for node in fleet.nodes):
        return EXIT_INFEASIBLE
    known = all(node.up and not node.unknown for node in fleet.nodes)
    return EXIT_FEASIBLE if fleet.servers and known else EXIT_UNKNOWN


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ValueError(f"{text!r} is not NAME:VALUE")
    return name.strip(), value.strip()

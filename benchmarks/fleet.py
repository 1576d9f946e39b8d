"""What a large fleet costs Prometheus: one process serves the pages of many nodes, a real one scrapes them.

    python -m benchmarks.fleet [--nodes 1000] [--minutes 4]

The pages are the embedded node's with 8 GPUs and one server over all of them; on one node in a hundred a
restart would fail. The delivered rules are evaluated; at the end the queries of the fleet's dashboard and
`kvwatch fleet` are asked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dashboards.boards import fleet
from deploy.prometheus.build import rule_groups
from kvwatch.config import Config
from kvwatch.demo.node import DemoNode
from kvwatch.demo.scenario import load_scenario
from kvwatch.export.page import build_page
from kvwatch.fleet.api import Access, PrometheusApi
from kvwatch.fleet.survey import survey
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from tests.e2e.prometheus import tool
from tests.e2e.waiting import free_port

SCRAPE_SECONDS = 15
GPUS = 8
FAILING_ONE_IN = 100


def node_page(*, failing: bool) -> bytes:
    """The page of one node of the fleet."""
    demo = load_scenario()
    scenario = replace(
        demo, gpu_count=GPUS, server=replace(demo.server, tensor_parallel_size=GPUS), round_minutes=1e9
    )
    last = max(demo.holders, key=lambda holder: holder.end)
    minute = (last.start if failing else last.end) + 1
    config = Config()
    with DemoNode(scenario, speed=1) as node:
        began = node.now()
        monitor = Monitor(Observer(node, config, now=node.now), config, now=node.now, simulated=True)
        node.now = lambda: began + 60 * minute  # type: ignore[method-assign]
        return build_page(monitor.cycle(), top=20).text()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A Prometheus that has ended leaves its connections without a word."""


@contextmanager
def pages(usual: bytes, failing: bytes) -> Iterator[str]:
    """Serve a page under each number; yields host:port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = usual if int(self.path[1:]) % FAILING_ONE_IN else failing
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Requests are not logged."""

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


@contextmanager
def prometheus(directory: Path, address: str, nodes: int) -> Iterator[str]:
    """A Prometheus that scrapes the nodes and evaluates the delivered rules; yields its URL."""
    targets = [
        {
            "targets": [address],
            "labels": {"__metrics_path__": f"/{node}", "instance": f"gpu-node-{node:05}:9744"},
        }
        for node in range(nodes)
    ]
    (directory / "targets.json").write_text(json.dumps(targets))
    (directory / "rules.yml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": "10s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "kvwatch", "file_sd_configs": [{"files": ["targets.json"]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            tool("prometheus"),
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def own_metrics(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What Prometheus says of itself."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def query_seconds(url: str) -> tuple[float, float]:
    """Median and longest time of the fleet board's queries."""
    times = []
    for panel in fleet.BOARD.panels:
        for query in panel.queries():
            expression = query.expr.replace("$job", ".+").replace("$node", ".+")
            begun = time.monotonic()
            requests.get(f"{url}/api/v1/query", params={"query": expression}, timeout=60).raise_for_status()
            times.append(time.monotonic() - begun)
    return statistics.median(times), max(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=4.0)
    args = parser.parse_args()
    page, failing = node_page(failing=False), node_page(failing=True)
    samples = sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))
    with (
        tempfile.TemporaryDirectory() as directory,
        pages(page, failing) as address,
        prometheus(Path(directory), address, args.nodes) as url,
    ):
        time.sleep(60 * args.minutes)
        own = own_metrics(url)
        median, longest = query_seconds(url)
        begun = time.monotonic()
        with PrometheusApi(Access(url, timeout=120)) as api:
            surveyed = survey(api.query)
        survey_seconds = time.monotonic() - begun
    groups = {
        labels["rule_group"].rpartition(";")[2]: seconds
        for labels, seconds in own["prometheus_rule_group_last_duration_seconds"]
    }
    up = sum(node.up for node in surveyed.nodes)
    cpu = own["process_cpu_seconds"][0][1] / (60 * args.minutes)
    failing_nodes = sum(node.infeasible for node in surveyed.nodes)
    print(f"nodes                     {up} of {args.nodes} answer, on {failing_nodes} a restart would fail")
    print(f"one page                  {samples} samples, {len(page) / 1024:.0f} KiB")
    print(f"series in memory          {own['prometheus_tsdb_head_series'][0][1]:,.0f}")
    print(f"resident memory           {own['process_resident_memory_bytes'][0][1] / 2**30:.2f} GiB")
    print(f"processor                 {cpu:.2f} cores")
    print(f"all rules, one evaluation {sum(groups.values()):.2f} s")
    for group, seconds in sorted(groups.items(), key=lambda item: -item[1]):
        print(f"  {group:23} {seconds:.3f} s")
    print(f"queries of the fleet board {median:.3f} s median, {longest:.3f} s longest")
    print(f"kvwatch fleet             {survey_seconds:.2f} s")


if __name__ == "__main__":
    main()

"""Selectors, colours and choices that the boards share."""

from __future__ import annotations

from dashboards.grafana import Value, Variable

NODE = 'job=~"$job",instance=~"$node"'
SERVER = f'{NODE},server=~"$server"'

STARTS = (Value(0, "FAILS", "red"), Value(1, "starts", "green"))
ANSWERS = (Value(0, "no answer", "red"), Value(1, "answers", "green"))
YES = (Value(0, "no", "red"), Value(1, "yes", "green"))
NONE_IS_GOOD = ((None, "green"), (1, "red"))
MARGIN = ((None, "red"), (0, "yellow"), (512 * 2**20, "green"))
USAGE = ((None, "green"), (0.8, "yellow"), (0.95, "red"))

OWNER_COLORS = {
    "server": "blue",
    "neighbour": "purple",
    "orphan": "red",
    "foreign": "orange",
    "allowed": "semi-dark-yellow",
    "releasing": "yellow",
    "unattributed": "dark-red",
    "free": "green",
}

JOBS = Variable("job", "Job", "label_values(kvwatch_up, job)")
NODES = Variable("node", "Node", 'label_values(kvwatch_up{job=~"$job"}, instance)')
SERVERS = Variable("server", "Server", f"label_values(kvwatch_server_up{{{NODE}}}, server)")

NODE_LABEL = ("instance", "Node")
SERVER_LABEL = ("server", "Server")

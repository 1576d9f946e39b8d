"""Who holds a card's memory: the class of each process that NVML names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from kvwatch.config import Holders, Rule
from kvwatch.observe.records import Process


class Owner(StrEnum):
    """Classes of holders. Each byte of VRAM has exactly one."""

    SERVER = "server"
    NEIGHBOUR = "neighbour"
    ORPHAN = "orphan"
    FOREIGN = "foreign"
    ALLOWED = "allowed"
    UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Ownership:
    """The verdict on one process: its class, and its server's name where it has one."""

    owner: Owner
    server: str = ""


_VLLM_TITLE = re.compile(
    r"[\w.-]*(?:::(?:EngineCore|DPEngineCore|Worker|APIServer|DPCoordinator)|VllmWorker)(?:[_-].*)?"
)


def is_vllm_title(name: str) -> bool:
    """Whether a process title is one that vLLM gives its children (``VLLM::EngineCore``, any prefix)."""
    return _VLLM_TITLE.fullmatch(name) is not None


def classify(process: Process | None, pid: int, members: Mapping[int, str], rules: Holders) -> Ownership:
    """The class of one holder.

    Args:
        process: what /proc told of it; None where the pid could not be resolved.
        members: pid -> server name, over all servers found on the node.
        rules: the ``holders`` section of kvwatch.yaml.
    """
    if pid in members:
        return Ownership(Owner.SERVER, members[pid])
    if process is None:
        return Ownership(Owner.UNATTRIBUTED)
    if any(_matches(rule, process) for rule in rules.allowed):
        return Ownership(Owner.ALLOWED)
    if any(_matches(rule, process) for rule in rules.neighbours):
        return Ownership(Owner.NEIGHBOUR)
    if is_vllm_title(process.name):
        return Ownership(Owner.ORPHAN)
    return Ownership(Owner.FOREIGN)


def _matches(rule: Rule, process: Process) -> bool:
    tests = (
        (rule.program, process.name),
        (rule.user, process.user or ""),
        (rule.workload, process.workload),
    )
    return all(pattern is None or fnmatchcase(text, pattern) for pattern, text in tests)

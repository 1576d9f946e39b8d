"""What one cycle leaves to the next about holders of memory: whose they were, and when they last lived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvwatch.lineage import Identity, Lineage


@dataclass(frozen=True, slots=True)
class Origin:
    """The server that a process belongs, or belonged, to; `server` is the identity of its parent process."""

    name: str
    server: Identity


@dataclass(frozen=True, slots=True)
class Remembered:
    """A process that held memory.

    Attributes:
        held: bytes by card, as last seen; cards on which its share is not known are left out.
        alive: Unix time at which it was last seen alive, or first seen where it never was.
    """

    origin: Origin | None
    held: Mapping[str, int]
    alive: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory of the node between cycles. Immutable.

    An entry lives as long as its process, and for the configured grace after that.

    Attributes:
        unattributed: by card, bytes in use without a named process that nothing is known to release.
    """

    holders: Mapping[Identity, Remembered] = field(default_factory=dict)
    unattributed: Mapping[str, int] = field(default_factory=dict)

    def of_pid(self, pid: int) -> Remembered | None:
        """The last process that had this pid."""
        return max(
            (entry for (other, _), entry in self.holders.items() if other == pid),
            key=lambda entry: entry.alive,
            default=None,
        )

    def released(self, card: str, listed: Iterable[int], lineage: Lineage, since: float) -> int:
        """Bytes that processes held on a card which ended after `since` and are listed there no more."""
        named = set(listed)
        return sum(
            entry.held[card]
            for who, entry in self.holders.items()
            if card in entry.held and who[0] not in named and entry.alive >= since and not lineage.alive(who)
        )

    def turned(
        self,
        lineage: Lineage,
        holders: Mapping[Identity, Remembered],
        unattributed: Mapping[str, int],
        *,
        now: float,
        grace: float,
    ) -> Ledger:
        """The ledger after a cycle that saw these holders."""
        if not lineage.known:
            return Ledger(self.holders, unattributed)
        kept: dict[Identity, Remembered] = {}
        for who, entry in holders.items():
            before = self.holders.get(who)
            kept[who] = entry if before is None or lineage.alive(who) else before
        for who, entry in self.holders.items():
            if who in kept:
                continue
            if lineage.alive(who):
                kept[who] = Remembered(entry.origin, {}, now)
            elif lineage.has(who) or now - entry.alive <= grace:
                kept[who] = entry
        return Ledger(kept, unattributed)


EMPTY = Ledger()

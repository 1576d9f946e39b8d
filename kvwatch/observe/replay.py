"""Plays captures in place of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvwatch.config import Config, ServerConfig, Web
from kvwatch.observe.capture import Capture
from kvwatch.observe.cycle import Observation, ObservedServer, overlaid, same_address


def captured_config(captures: Sequence[Capture]) -> Config:
    """The configuration of the last capture, but for where its page was served."""
    return replace(captures[-1].config, web=Web(), source=None)


class ReplayObserver:
    """One capture per cycle, in order; the last one stays. Implements `kvwatch.observe.cycle.NodeObserver`.

    What the configuration says of a captured server is laid over it. Servers that only the configuration
    knows were not captured, and do not appear.

    Args:
        captures: at least one.
    """

    def __init__(self, captures: Sequence[Capture], config: Config) -> None:
        self._observations = [capture.observation for capture in captures]
        self._next = 0
        self.reconfigure(config)

    @property
    def cycles(self) -> int:
        """How many captures there are."""
        return len(self._observations)

    def now(self) -> float:
        """The clock: when the capture that was last observed was taken, Unix time."""
        return self._observations[max(self._next - 1, 0)].time

    def observe(self) -> Observation:
        """The next capture."""
        self._next = min(self._next + 1, len(self._observations))
        seen = self._observations[self._next - 1]
        return replace(seen, servers=tuple(map(self._configured, seen.servers)))

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from the next cycle on."""
        self._settings: dict[str, ServerConfig] = {same_address(one.url): one for one in config.servers}

    def close(self) -> None:
        """Nothing is held open."""

    def _configured(self, server: ObservedServer) -> ObservedServer:
        settings = self._settings.get(same_address(server.launch.base_url or ""))
        return replace(server, launch=overlaid(server.launch, settings), settings=settings)

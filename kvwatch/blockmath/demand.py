"""What the check for one request adds up, and the longest length that passes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from operator import le, mul

from kvwatch.blockmath.specs import Growth


@dataclass(frozen=True, slots=True)
class Demand:
    """For each pipeline stage, the bytes that one block of each kind of growth stands for.

    Attributes:
        growths: the distinct ways in which blocks grow with the length.
        weights: bytes per stage and growth.
        step: tokens per block of what grows without bound; 0 where several such sizes mix, or nothing does.
        saturation: the length from which on bounded growths stay as they are.
        saturated: bytes per stage that do not grow any more from there on.
        slope: bytes per stage of one step.
    """

    growths: tuple[Growth, ...]
    weights: tuple[tuple[int, ...], ...]
    step: int
    saturation: int
    saturated: tuple[int, ...]
    slope: tuple[int, ...]

    @classmethod
    def of(cls, rows: Mapping[Growth, Sequence[int]], stages: int) -> Demand:
        """Sum up.

        Args:
            rows: for each growth, bytes per stage.
            stages: pipeline stages.
        """
        growths = tuple(rows)
        weights = tuple(tuple(row[stage] for row in rows.values()) for stage in range(stages))
        bounded = [growth for growth in growths if growth.limit is not None]
        steps = {growth.block_size * growth.shards for growth in growths if growth.limit is None}
        saturation = max(((growth.limit or 0) * growth.shards for growth in bounded), default=0)
        # At length 0 an unbounded growth has only its constant; a bounded one is taken where it saturates.
        base = [growth.blocks(saturation if growth.limit is not None else 0) for growth in growths]
        return cls(
            growths=growths,
            weights=weights,
            step=steps.pop() if len(steps) == 1 else 0,
            saturation=saturation,
            saturated=tuple(sum(map(mul, row, base)) for row in weights),
            slope=tuple(
                sum(weight for weight, growth in zip(row, growths, strict=True) if growth.limit is None)
                for row in weights
            ),
        )

    def bytes(self, length: int) -> tuple[int, ...]:
        """Bytes per stage at a length."""
        blocks = [growth.blocks(length) for growth in self.growths]
        return tuple(sum(map(mul, row, blocks)) for row in self.weights)

    def fits(self, length: int, room: Sequence[int]) -> bool:
        """Whether every stage has room."""
        blocks = [growth.blocks(length) for growth in self.growths]
        needs = [sum(map(mul, row, blocks)) for row in self.weights]
        return all(map(le, needs, room))

    def longest(self, room: Sequence[int], top: int) -> int:
        """The largest length up to ``top`` for which every stage has room; 0 where there is none."""
        if top < 1 or not self.fits(1, room):
            return 0
        if self.fits(top, room):
            return top
        steps = self._whole_steps(room)
        if steps is not None:
            return min(steps * self.step, top)
        return self._searched(room, top)

    def _whole_steps(self, room: Sequence[int]) -> int | None:
        """Blocks of unbounded growth that fit, where the answer lies beyond saturation."""
        if not self.step:
            return None
        steps = min(
            (left - base) // slope for left, base, slope in zip(room, self.saturated, self.slope, strict=True)
        )
        return steps if steps * self.step >= max(self.saturation, 1) else None

    def _searched(self, room: Sequence[int], top: int) -> int:
        # Needs change just after multiples of the block sizes only.
        unit = gcd(*(growth.block_size * growth.shards for growth in self.growths))
        low, high = 1, -(-top // unit)
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(middle * unit, room):
                low = middle
            else:
                high = middle
        return low * unit

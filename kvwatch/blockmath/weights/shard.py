"""How tensor and expert parallelism divide one layer, seen from rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.errors import Refused

VOCAB_PADDING = 64
"""vLLM pads vocabularies to a multiple of this before it divides them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share.

    Attributes:
        tp: tensor-parallel size.
        expert_tp: into how many slices each expert is cut (``tp`` times the data-parallel size); 1 with
            expert parallelism.
        expert_ranks: over how many ranks whole experts are spread; 1 without expert parallelism.
    """

    tp: int = 1
    expert_tp: int = 1
    expert_ranks: int = 1

    def of(self, size: int, what: str) -> int:
        """A dimension divided by the tensor-parallel size.

        Raises:
            Refused: it does not divide, which vLLM refuses.
        """
        if size % self.tp:
            raise Refused(
                "indivisible", f"{what} ({size}) is not divisible by tensor_parallel_size ({self.tp})"
            )
        return size // self.tp

    def kv_heads(self, total: int) -> int:
        """KV heads on this rank: divided, or replicated where there are fewer than ranks."""
        if total >= self.tp:
            return self.of(total, "number of KV heads")
        if self.tp % total:
            raise Refused(
                "indivisible", f"tensor_parallel_size ({self.tp}) is not a multiple of the KV heads ({total})"
            )
        return 1

    def vocab(self, size: int) -> int:
        """Rows of a vocabulary matrix on this rank, padding included."""
        return self.of(-(-size // VOCAB_PADDING) * VOCAB_PADDING, "padded vocabulary")

    def experts(self, total: int) -> int:
        """Whole experts on this rank; the first ranks take the remainder."""
        return -(-total // self.expert_ranks)

    def expert_width(self, width: int) -> int:
        """Intermediate width of one expert on this rank."""
        if width % self.expert_tp:
            raise Refused("indivisible", f"expert width ({width}) is not divisible by {self.expert_tp} ranks")
        return width // self.expert_tp


WHOLE = Shard()
"""The share of a block that is not divided."""

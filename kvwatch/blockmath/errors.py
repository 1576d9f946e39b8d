"""The two ways in which the arithmetic ends without an answer."""

from __future__ import annotations


class Refused(ValueError):
    """vLLM itself would refuse this configuration before it plans any block.

    Attributes:
        kind: short name of the refusal, for example ``indivisible_heads`` or ``max_model_len_gt_derived``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Unsupported(ValueError):
    """The core cannot say, and does not guess.

    Attributes:
        reason: short name fit for a label, for example ``unknown_architecture``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

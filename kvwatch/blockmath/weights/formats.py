"""How quantized matrices are stored: bits per weight, scales, zero points, padding."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.weights.parts import Linear


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Format:
    """One way of storing a matrix.

    Attributes:
        bits: per weight.
        group: weights along the inputs that share a scale; 0 = one scale per merged projection.
        block: rows that share a scale as well (two-dimensional blocks); 1 = each row has its own.
        scale: bytes of one scale; 0 = the model's dtype.
        zero_bits: bits of one zero point per scale.
        floats: further float32 scalars per merged projection (global scales).
        inner, outer: multiples to which expert widths and model widths are padded.
    """

    bits: int
    group: int = 0
    block: int = 1
    scale: int = 4
    zero_bits: int = 0
    floats: int = 0
    inner: int = 1
    outer: int = 1

    def stored_bytes(self, part: Linear, itemsize: int) -> int:
        """Bytes of a matrix with its scales and bias."""
        inputs, rows, bias = self._padded(part)
        scale = self.scale or itemsize
        scales = -(-inputs // self.group) * -(-rows // self.block) if self.group else part.pieces
        weights = inputs * rows * self.bits // 8
        one = weights + scales * scale + scales * self.zero_bits // 8 + part.pieces * self.floats * 4
        return one * part.copies + bias * itemsize

    def _padded(self, part: Linear) -> tuple[int, int, int]:
        if part.kind != "experts" or (self.inner == 1 and self.outer == 1):
            return part.inputs, part.outputs, part.bias
        if part.name.endswith("w2"):
            inputs, rows = _up(part.inputs, self.inner), _up(part.outputs, self.outer)
        else:
            rows = _up(part.outputs // part.pieces, self.inner) * part.pieces
            inputs = _up(part.inputs, self.outer)
        return inputs, rows, part.copies * rows if part.bias else 0


CHANNEL = 1 << 40
"""A group longer than any row: one scale per output channel."""

FP8_TENSOR = Format(8)
FP8_STATIC = Format(8, floats=1)
FP8_CHANNEL = Format(8, group=CHANNEL)
INT8_CHANNEL = Format(8, group=CHANNEL)
MXFP4 = Format(4, group=32, scale=1, inner=128, outer=256)
MXFP8 = Format(8, group=32, scale=1)
NVFP4 = Format(4, group=16, scale=1, floats=2)
NVFP4_WEIGHTS = Format(4, group=16, scale=1, floats=1)
NF4 = Format(4, group=64)
BNB_INT8 = Format(8, group=CHANNEL)


def fp8_block(rows: int, inputs: int, scale: int = 4) -> Format:
    """FP8 with one scale per block: float32, or one byte."""
    return Format(8, group=inputs, block=rows, scale=scale)


def packed_int(bits: int, group: int, *, zeros: bool = True) -> Format:
    """Integers packed into 32-bit words, with a scale in the model's dtype per group."""
    return Format(bits, group=group if group > 0 else CHANNEL, scale=0, zero_bits=bits if zeros else 0)

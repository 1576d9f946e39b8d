"""Parameter bytes of a model, per rank, from config.json and flags."""

from kvwatch.blockmath.weights.count import Weights, quantized, weight_bytes

__all__ = ["Weights", "quantized", "weight_bytes"]

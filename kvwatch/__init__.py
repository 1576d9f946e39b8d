"""Prometheus exporter that predicts whether the vLLM servers of a node would start again."""

__version__ = "0.1.0"

"""Snapshot and verdicts as a Prometheus page, as JSON and over HTTP."""

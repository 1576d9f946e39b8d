"""vLLM's start-up arithmetic: pure functions of config.json, flags, release and card.

No I/O, no clock, no logging, and no import from the rest of kvwatch.
"""

"""The status page for people."""

from __future__ import annotations

from html import escape

from kvwatch.export.cycle import Cycle
from kvwatch.export.text import status_text

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem;max-width:70rem;color:#1b1f23;background:#fff}"
    "pre{font:14px/1.45 ui-monospace,monospace;overflow-x:auto;padding:1rem;border-radius:6px}"
    "pre{background:#f4f5f7}"
    "@media(prefers-color-scheme:dark)"
    "{body{color:#e6e8eb;background:#16181c}pre{background:#22252b}a{color:#8ab4f8}}"
)


def status_page(cycle: Cycle) -> bytes:
    """One self-contained page: the text of `kvwatch status` and where the rest is."""
    simulated = " (simulated node)" if cycle.own.simulated else ""
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="15">
<title>kvwatch</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>kvwatch{simulated}</h1>
<pre>{escape(status_text(cycle))}</pre>
<p><a href="/metrics">metrics</a> · <a href="/api/v1/snapshot">snapshot (JSON)</a></p>
</main>
</body>
</html>
"""
    return page.encode()

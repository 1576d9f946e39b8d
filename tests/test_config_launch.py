"""``servers[].launch`` in kvwatch.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch.config import LaunchFile, as_mapping, parse
from kvwatch.yamlfile import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start.sh", LaunchFile((Path("/etc/kvwatch/start.sh"),))),
        ("/srv/chat.service", LaunchFile((Path("/srv/chat.service"),))),
        ("{file: c.yaml, service: chat}", LaunchFile((Path("/etc/kvwatch/c.yaml"),), service="chat")),
        ("{file: /p.yaml, container: vllm}", LaunchFile((Path("/p.yaml"),), container="vllm")),
        ("[/a.yaml, /b.yaml]", LaunchFile((Path("/a.yaml"), Path("/b.yaml")))),
        ("{file: [/a.yaml, /b.yaml]}", LaunchFile((Path("/a.yaml"), Path("/b.yaml")))),
    ],
)
def test_what_starts_a_server(text: str, expected: LaunchFile) -> None:
    config = parse(f"servers: [{{url: 'http://a:1', launch: {text}}}]", Path("/etc/kvwatch/k.yaml"))
    assert config.servers[0].launch == expected
    listed = as_mapping(config)["servers"][0]["launch"]
    assert listed["file"] == [str(path) for path in expected.files]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{service: chat}", "names no file"),
        ("{file: []}", "names no file"),
        ("{file: a, unit: b}", "unknown field unit (file, service, container)"),
        ("{file: a, service: true}", "True is not text"),
    ],
)
def test_a_launch_file_that_makes_no_sense(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(f"servers: [{{url: 'http://a:1', launch: {text}}}]", Path("k.yaml"))
    assert str(raised.value) == f"k.yaml:1: servers[0].launch: {problem}"

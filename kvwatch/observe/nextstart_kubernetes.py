"""The server that Kubernetes manifests start: any object that has a pod's containers somewhere within it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvwatch.blockmath.errors import Unsupported
from kvwatch.observe.nextstart_command import (
    ReadText,
    StartCommand,
    container_command,
    serving_command,
    sole,
)

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
_MAX_DEPTH = 30


def manifest_command(
    documents: Sequence[Any], workload: str | None, container: str | None, read: ReadText
) -> StartCommand:
    """The server of one or more manifests.

    Args:
        workload: ``metadata.name`` of the object, None for any.
        container: name of the container, None where only one is a server.
        read: for scripts that the container's command names.

    Raises:
        Unsupported: none or several serve, or the command depends on what the manifest does not say.
    """
    found = [
        (f"{name}/{one.get('name')}", one)
        for name, one in _containers(documents)
        if workload in (None, name) and container in (None, one.get("name"))
    ]
    if not found:
        raise Unsupported("no_such_container", "the manifest has no such workload or container")
    return sole(found, lambda one: serving_command(_command(one), read))


def _containers(documents: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All containers with the name of their object; items of a List are objects of their own."""
    for document in documents:
        if not isinstance(document, Mapping):
            continue
        items = document.get("items")
        if str(document.get("kind", "")).endswith("List") and isinstance(items, list):
            yield from ((name, one) for item in items for name, one in _of_object(item))
        else:
            yield from _of_object(document)


def _of_object(item: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(item, Mapping):
        metadata = item.get("metadata")
        name = str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
        yield from ((name, one) for one in _within(item, set(), _MAX_DEPTH))


def _within(value: object, seen: set[int], depth: int) -> Iterator[Mapping[str, Any]]:
    """Members of every ``containers`` list, at any depth; each object once, as aliases may make circles."""
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        listed = value.get("containers")
        if isinstance(listed, list):
            yield from (one for one in listed if isinstance(one, Mapping))
        for inner in value.values():
            yield from _within(inner, seen, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _within(inner, seen, depth - 1)


def _command(container: Mapping[str, Any]) -> StartCommand:
    environment, hidden = _environment(container.get("env"))
    if container.get("envFrom"):
        hidden = None
    image, cwd, command = (container.get(name) for name in ("image", "workingDir", "command"))
    return container_command(
        image=str(image) if image else None,
        entrypoint=_words(command, environment, hidden) if command else None,
        arguments=_words(container.get("args"), environment, hidden),
        environment=environment,
        cwd=str(cwd) if cwd else None,
    )


def _environment(entries: object) -> tuple[dict[str, str], set[str] | None]:
    """Literal variables, references among them resolved in order, and the names of those that are not."""
    found: dict[str, str] = {}
    hidden: set[str] = set()
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping):
            continue
        name = str(entry.get("name", ""))
        if entry.get("valueFrom"):
            found.pop(name, None)
            hidden.add(name)
        else:
            text = str(entry.get("value") or "")
            if hidden & {match[1] for match in _REFERENCE.finditer(text)}:
                hidden.add(name)
            else:
                found[name] = _substituted(text, found, hidden)
    return found, hidden


def _words(value: object, environment: Mapping[str, str], hidden: set[str] | None) -> list[str]:
    words = value if isinstance(value, list) else []
    return [_substituted(str(word), environment, hidden) for word in words]


def _substituted(text: str, environment: Mapping[str, str], hidden: set[str] | None) -> str:
    """``$(NAME)`` of a known variable; an undefined one stays as written, ``$$`` is a dollar."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "$"
        if name in environment:
            return environment[name]
        if hidden is None or name in hidden:
            raise Unsupported("dynamic_variable", f"$({name}) comes from outside of the manifest")
        return found[0]

    return _REFERENCE.sub(value, text)

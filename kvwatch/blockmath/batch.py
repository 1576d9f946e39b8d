"""One row of a planning table in, the planner's numbers out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.gpus import capability_of
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release

GIB: Final = 1 << 30

_GPU = re.compile(
    r"(?:NVIDIA[ _-]*)?(?P<name>.*?)[ _-]+(?P<gib>\d+(?:\.\d+)?)\s*(?:GB|GiB|G)?", re.IGNORECASE
)


def device_named(label: str) -> Device:
    """The card that a label such as ``H100-80GB`` names; ``cpu`` for the host.

    Raises:
        Unsupported: the card or its size is not known.
    """
    if label.strip().lower().startswith("cpu"):
        return Device("cpu", 0, None, "cpu")
    match = _GPU.fullmatch(label.strip())
    if match is None:
        raise Unsupported("unknown_gpu", f"{label!r} does not name a card and its memory, such as H100-80GB")
    name = match["name"]
    return Device(name, int(float(match["gib"]) * GIB), capability_of(name))


def plan_row(row: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Plan one row.

    Args:
        row: ``gpu``, ``vllm_version``, ``flags`` and ``cases`` with ``available_bytes``; ``name`` is passed
            on and everything else ignored. A flag that is absent or ``auto`` was not given.
        config: the parsed config.json.

    Returns:
        ``name``, ``bytes_per_block``, ``needed_bytes_for_max_model_len`` (lists over stages where there are
        several), ``blocks_per_max_len_request_by_group`` and per case ``num_blocks``,
        ``kv_cache_size_tokens``, ``max_concurrency``, ``estimated_max_model_len``, ``autofit_max_model_len``
        or ``raises`` with a kind; or ``refused`` with the kind and ``message``, or ``unsupported`` with the
        reason and ``message``.
    """
    result: dict[str, Any] = {"name": row.get("name")}
    try:
        pool = _plan(row, config)
    except Refused as refusal:
        return result | {"refused": refusal.kind, "message": str(refusal)}
    except Unsupported as unknown:
        return result | {"unsupported": unknown.reason, "message": str(unknown)}
    needed = pool.need_bytes(pool.settings.max_model_len)
    return result | {
        "layout": pool.layout,
        "basis": pool.basis,
        "bytes_per_block": _list_or_one(pool.bytes_per_block),
        "needed_bytes_for_max_model_len": _list_or_one(needed),
        "blocks_per_max_len_request_by_group": list(pool.blocks_per_request(pool.settings.max_model_len)),
        "cases": [_case(pool, case["available_bytes"]) for case in row.get("cases") or ()],
    }


def _plan(row: Mapping[str, Any], config: Mapping[str, Any]) -> Pool:
    given = {
        name: value
        for name, value in (row.get("flags") or {}).items()
        if value != "auto" or name == "max_model_len"
    }
    return plan_pool(
        config,
        Flags.from_mapping(given),
        device=device_named(str(row.get("gpu") or "")),
        release=Release.parse(str(row.get("vllm_version") or Release.LATEST.text)),
    )


def _list_or_one(values: tuple[int, ...]) -> list[int] | int:
    return values[0] if len(values) == 1 else list(values)


def _case(pool: Pool, available: int | list[int]) -> dict[str, Any]:
    result: dict[str, Any] = {"available_bytes": available}
    if not pool.groups:
        return result | {"num_blocks": pool.num_blocks(available)}
    longest = pool.longest_length(available)
    if pool.settings.auto_length:
        if not longest:
            return result | {"estimated_max_model_len": 0, "raises": "auto_fit_failed"}
        if longest < pool.settings.max_model_len:
            result["autofit_max_model_len"] = longest
        pool = replace(pool, settings=replace(pool.settings, max_model_len=longest))
    if pool.blocks_override is None:
        result["estimated_max_model_len"] = longest
    if min(pool.check_bytes(available)) <= 0:
        return result | {"raises": "no_available_memory_for_blocks"}
    if longest < pool.settings.max_model_len:
        return result | {"raises": "kv_needed_gt_available"}
    num_blocks = pool.num_blocks(available)
    return result | {
        "num_blocks": num_blocks,
        "kv_cache_size_tokens": pool.capacity_tokens(num_blocks),
        "max_concurrency": pool.max_concurrency(num_blocks),
    }

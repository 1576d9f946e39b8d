"""`kvwatch plan`: would a model start on some cards, and what would its KV cache hold? No GPU needed."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.gpus import GPUS, Gpu, find_gpu
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.weights import weight_bytes
from kvwatch.cli import plan_batch, plan_document, plan_text
from kvwatch.cli.common import EXIT_USAGE, complain, positive_count, release
from kvwatch.cli.plan_flags import add_flag_options, flags_of
from kvwatch.cli.plan_sweep import parse_axes
from kvwatch.forecast.roofline import DecodeEstimate, decode_estimates, largest_batch
from kvwatch.forecast.sizing import Scenario, Sizing, size_up
from kvwatch.forecast.whatif import changes, fits, remedies, sweep
from kvwatch.observe.models import CONFIG_LIMIT, ModelSource
from kvwatch.observe.records import Failure, Launch

EXIT_STARTS = 0
EXIT_FAILS = 1

BATCHES = (1, 8, 32, 128)
CONTEXT = 4096
"""Tokens that each request has in the decoding estimate, where the maximum length allows it."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)

DESCRIPTION = """\
Works out, with no GPU and no network, whether vLLM would start a model on some
cards: weights, KV cache, capacity, the longest request, what each change would
buy. What is estimated is marked so, with its bound.
"""
EPILOG = """\
examples:
  kvwatch plan ./config.json --gpu H100
  kvwatch plan Qwen/Qwen3-32B --gpu A100-80GB -tp 2 --max-model-len 32k
  kvwatch plan ./config.json --gpu L40S --sweep max-model-len=8k,32k kv-cache-dtype
  kvwatch plan ./config.json --max-model-len 32768 --fit
  kvwatch plan ./config.json --weights -tp 4
  kvwatch plan --batch plans.jsonl --configs DIR

exit code: 0 it starts (of a table: at least one row does), 1 it does not,
2 wrong input, or too close to call
"""


class InputError(ValueError):
    """Something on the command line, or in a file that it names, cannot be used."""


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "plan",
        usage="kvwatch plan [MODEL] [--gpu CARD] [options] [vLLM's flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a config.json, a model directory, or a hub id that is in this machine's cache",
    )
    card = parser.add_argument_group("the cards")
    card.add_argument("--gpu", metavar="CARD", help="such as H100, A100-80GB, L40S; see --gpus")
    card.add_argument(
        "--gpu-memory", metavar="SIZE", help="what CUDA reports as total, such as 79.2GiB, if known better"
    )
    card.add_argument(
        "--count", metavar="N", type=positive_count, help="cards (default: as many as the flags ask)"
    )
    card.add_argument("--gpus", action="store_true", help="list the cards with the sources of their figures")
    known = parser.add_argument_group("what is known better than from config.json")
    known.add_argument(
        "--vllm-version",
        metavar="X.Y.Z",
        type=release,
        default=Release.LATEST.text,
        help="the release that would start (default: %(default)s)",
    )
    known.add_argument("--weight-memory", metavar="SIZE", help="weights on each GPU, as a log tells them")
    known.add_argument(
        "--non-kv-memory",
        metavar="SIZE",
        help="all but the KV cache on each GPU, graphs included, from a log",
    )
    what = parser.add_argument_group("what to work out")
    what.add_argument("--fit", action="store_true", help="the fewest cards of each kind that are enough")
    what.add_argument(
        "--sweep",
        metavar="FLAG[=V,V…]",
        nargs="+",
        help="a table over flags, such as max-model-len=8k,32k tensor-parallel-size=1,2",
    )
    what.add_argument("--weights", action="store_true", help="only the weights on each GPU")
    what.add_argument(
        "--context",
        metavar="N",
        type=positive_count,
        help=f"tokens of each request in the decoding estimate (default: {CONTEXT})",
    )
    what.add_argument(
        "--batch", metavar="FILE", help="plans as JSON lines (.gz too, - standard input), one answer each"
    )
    what.add_argument(
        "--configs", metavar="DIR", type=Path, help="where the config.json files of --batch are"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    add_flag_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Work it out and print it; the exit code is the verdict."""
    try:
        if args.gpus:
            print(plan_text.gpu_table(GPUS))
            return EXIT_STARTS
        if args.batch is not None:
            return plan_batch.run(args.batch, args.configs, weights=args.weights)
        return _run(args)
    except Refused as refusal:
        complain(f"vLLM refuses this: {refusal}")
        return EXIT_FAILS
    except (Unsupported, EOFError, ValueError) as error:
        complain(_with_file(str(error), args.model))
        return EXIT_USAGE


def _with_file(text: str, model: str | None) -> str:
    """The arithmetic calls every file of a model config.json; the user may have named another."""
    if model is None or not text.startswith("config.json: ") or not Path(model).expanduser().is_file():
        return text
    return f"{model}{text.removeprefix('config.json')}"


def _run(args: argparse.Namespace) -> int:
    if args.model is None:
        raise InputError("say which model: a config.json, a directory or a hub id")
    model = read_model(args.model)
    flags = _with_count(flags_of(args), args.count)
    if args.weights:
        return _weights(model, flags, as_json=args.json)
    gpu = find_gpu(args.gpu) if args.gpu else None
    if args.fit:
        return _fit(args, model, flags, gpu)
    scenario = _scenario(args, model, flags, _device(args, gpu))
    if args.sweep:
        return _sweep(args, scenario)
    return _plan(args, model, gpu, size_up(scenario))


def _plan(args: argparse.Namespace, model: Model, gpu: Gpu | None, sizing: Sizing) -> int:
    context = min(args.context or CONTEXT, max(sizing.length, 1))
    decode: tuple[DecodeEstimate, ...] = ()
    if gpu is not None and sizing.num_blocks and sizing.pool.groups:
        batches = _batches(largest_batch(sizing, context))
        decode = decode_estimates(sizing, gpu.bandwidth_gb_s * 1e9, context=context, batches=batches)
    answer = plan_document.Answer(
        model=model.name,
        gpu=gpu,
        count=args.count or sizing.world_size,
        sizing=sizing,
        remedies=remedies(sizing),
        changes=changes(sizing, gpu) if sizing.pool.groups else (),
        decode=decode,
    )
    print(json.dumps(plan_document.as_json(answer), indent=2) if args.json else plan_text.as_text(answer))
    return _exit_code(sizing.feasible)


def _batches(largest: int) -> tuple[int, ...]:
    usual = [batch for batch in BATCHES if batch < largest]
    return (*usual, largest) if largest else ()


def _exit_code(feasible: bool | None) -> int:
    return {True: EXIT_STARTS, False: EXIT_FAILS, None: EXIT_USAGE}[feasible]


def _sweep(args: argparse.Namespace, scenario: Scenario) -> int:
    rows = sweep(scenario, parse_axes(args.sweep))
    print(json.dumps(plan_document.sweep_json(rows), indent=2) if args.json else plan_text.sweep_table(rows))
    return _any_code(row.result.feasible for row in rows if isinstance(row.result, Sizing))


def _fit(args: argparse.Namespace, model: Model, flags: Flags, gpu: Gpu | None) -> int:
    cards = GPUS if gpu is None else (gpu,)
    scenario = _scenario(args, model, flags, cards[0].device())
    found = fits(scenario, cards)
    print(json.dumps(plan_document.fit_json(found), indent=2) if args.json else plan_text.fit_table(found))
    return EXIT_STARTS if any(fit.sizing for fit in found) else EXIT_FAILS


def _any_code(verdicts: Any) -> int:
    seen = set(verdicts)
    return EXIT_STARTS if True in seen else EXIT_USAGE if None in seen or not seen else EXIT_FAILS


def _weights(model: Model, flags: Flags, *, as_json: bool) -> int:
    weights = weight_bytes(model.config, flags)
    print(
        json.dumps(plan_document.weights_json(weights))
        if as_json
        else plan_text.weights_text(model.name, flags, weights)
    )
    return EXIT_STARTS


# --- inputs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """A model found on this machine.

    Attributes:
        name: for people.
        config: the parsed config.json.
        checkpoint_bytes: total size of its weight files; None where there are none.
    """

    name: str
    config: Mapping[str, Any]
    checkpoint_bytes: int | None = None


def read_model(name: str) -> Model:
    """The model that a path or a hub id names; only this machine's disks are looked at.

    Raises:
        InputError: there is none, or its config.json cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return Model(path.parent.name if path.name == "config.json" else path.stem, _read_config(path))
    launch = Launch(
        pid=None,
        start_time=None,
        flags=Flags(),
        model=name,
        served_names=(name,),
        base_url=None,
        cwd=str(Path.cwd()),
        environment=dict(os.environ),
    )
    found = ModelSource().read(launch)
    if isinstance(found, Failure):
        hint = ""
        if found.reason == "not_cached":
            hint = f"; nothing is downloaded: give its config.json, or run `hf download {name} config.json`"
        raise InputError(f"{found.detail}{hint}")
    return Model(name.rstrip("/"), found.config, found.weight_bytes)


def _read_config(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > CONFIG_LIMIT:
        raise InputError(f"{path}: larger than {CONFIG_LIMIT} bytes")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: holds no JSON object")
    return config


def _device(args: argparse.Namespace, gpu: Gpu | None) -> Device:
    total = _size(args.gpu_memory, "--gpu-memory") if args.gpu_memory else None
    if gpu is not None:
        return gpu.device(total)
    if total is None:
        raise InputError("say which card: --gpu NAME (--gpus lists them), or --gpu-memory SIZE")
    return Device("unnamed card", total)


def _scenario(args: argparse.Namespace, model: Model, flags: Flags, device: Device) -> Scenario:
    return Scenario(
        config=model.config,
        flags=flags,
        device=device,
        release=Release.parse(args.vllm_version),
        weight_bytes=_size(args.weight_memory, "--weight-memory") if args.weight_memory else None,
        non_kv_bytes=_size(args.non_kv_memory, "--non-kv-memory") if args.non_kv_memory else None,
        checkpoint_bytes=model.checkpoint_bytes,
    )


def _with_count(flags: Flags, count: int | None) -> Flags:
    """Cards without any parallel flag are taken for tensor parallelism."""
    if count is None:
        return flags
    sizes = (flags.tensor_parallel_size, flags.pipeline_parallel_size, flags.data_parallel_size)
    if sizes == (None, None, None):
        return flags.with_changes(tensor_parallel_size=count)
    world = flags.tp * flags.pp * flags.dp
    if world > count:
        raise InputError(f"--count {count}: the flags ask for {world} GPUs")
    return flags


def _size(text: str, option: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InputError(f"{option} {text}: not a size such as 79.2GiB")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower() or " ")
    if power == 0 and float(number) < 1 << 20:
        raise InputError(f"{option} {text}: say the unit, such as {number}GiB")
    size = int(float(number) * (1024 if binary else 1000) ** power)
    if not size:
        raise InputError(f"{option} {text}: not a size above 0")
    return size

"""`pdserve checkpoint`: replace the weights of a model while it is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.cli.options import add_command, add_seconds, add_service_options, channel_to, say
from pdserve.config import refuse
from pdserve.errors import InvalidRequest
from pdserve.types import QuiesceMode
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers

# Longest load of weights, as router.weights.commit_timeout_s has it by default.
_LOAD_S = 1800.0
_SHOW_S = 10.0


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "checkpoint",
        _run,
        "replace the weights of a model while it is served",
        "Load the weights in a directory on all workers of a model, or on none. The directory is "
        "on the workers' machines, below router.weights.directories and "
        "worker.weights_directories. `pause` ends open answers and lets new requests wait until "
        "`resume`. `delta` writes a small file with the values of DIR that --base does not have, "
        "for a later update. Without an action, show the served weights.",
    )
    actions = ("show", "update", "pause", "resume", "delta")
    parser.add_argument("action", nargs="?", default="show", choices=actions)
    text = "for `update` and `delta`"
    parser.add_argument("directory", nargs="?", default="", metavar="DIR", help=text)
    text = "`delta`: checkpoint that workers have, whole or a difference"
    parser.add_argument("--base", type=Path, metavar="DIR", help=text)
    parser.add_argument("--output", type=Path, metavar="DIR", help="`delta`: where to write it")
    parser.add_argument("--model", default="", help="the served model, if there are several")
    parser.add_argument("--version", default="", help="name of the weights in receipts")
    text = "what happens to open answers; default: router.weights.mode"
    parser.add_argument("--mode", choices=[x.value for x in QuiesceMode], default="", help=text)
    add_seconds(parser, "--timeout", 60.0, "for open answers to end with --mode wait")
    add_service_options(parser, as_json="print the served weights as JSON")


async def _run(args: argparse.Namespace) -> int:
    if (args.action in {"update", "delta"}) is not bool(args.directory):
        refuse("DIR", "is required with update and delta, and with no other action")
    if args.action == "delta":
        return await asyncio.to_thread(_write_delta, args)
    model, mode, timeout_s = args.model, args.mode, args.timeout
    async with channel_to(args) as (channel, metadata):
        stub = AdminStub(channel)
        match args.action:
            case "update":
                update = a.UpdateCheckpointRequest(
                    model=model,
                    path=args.directory,
                    version=args.version,
                    mode=mode,
                    timeout_s=timeout_s,
                )
                status = await stub.UpdateCheckpoint(
                    update, timeout=timeout_s + _LOAD_S, metadata=metadata
                )
            case "pause":
                pause = a.PauseModelRequest(model=model, mode=mode, timeout_s=timeout_s)
                status = await stub.PauseModel(
                    pause, timeout=timeout_s + _LOAD_S, metadata=metadata
                )
            case "resume":
                resume = a.ResumeModelRequest(model=model)
                status = await stub.ResumeModel(resume, timeout=_SHOW_S, metadata=metadata)
            case _:
                show = a.GetCheckpointRequest(model=model)
                status = await stub.GetCheckpoint(show, timeout=_SHOW_S, metadata=metadata)
    if args.json:
        say(json.dumps(wire.json_object(status)))
        return 0
    for line in _lines(status):
        say(line)
    return 0


def _write_delta(args: argparse.Namespace) -> int:
    if args.base is None or args.output is None:
        refuse("--base" if args.base is None else "--output", "is required with delta")
    from pdserve.model.weight_deltas import write_delta

    try:
        made = write_delta(args.base, Path(args.directory), args.output)
    except InvalidRequest as error:
        refuse(error.field or "DIR", error.message)
    except OSError as error:
        refuse("--output", str(error))
    if args.json:
        say(json.dumps(made._asdict()))
    else:
        share, size = made.values / max(made.of, 1), made.size / max(made.whole, 1)
        text = f"{made.values} values of {made.tensors} tensors changed ({share:.2%})"
        say(f"{text}; {made.size} bytes, {size:.1%} of the whole")
    return 0


def _lines(status: a.CheckpointStatus) -> list[str]:
    weights = status.weights
    version = f"{weights.version} from {weights.path}" if weights.sequence else "those of its start"
    lines = [f"model {status.model} has the weights {version}"]
    if status.phase:
        lines.append(f"a change is in the phase {status.phase} since {status.phase_s:.1f} s")
    lines += [f"worker {name}: {what}" for name, what in sorted(status.updating.items())]
    lines += [
        f"worker {name} has older weights and serves nothing: {why}"
        for name, why in sorted(status.laggards.items())
    ]
    return lines

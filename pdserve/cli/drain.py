"""`pdserve drain`: take a worker out of service, or back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from pdserve.cli.options import (
    add_dial_options,
    add_grpc_option,
    channel_to,
    dialer_from,
    formatter,
    plain,
    say,
)

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers
    from pdserve.v1.admin_pb2 import DrainProgress

_REST_S = 90.0  # longest drain beyond the time that streams may take to end
_UNDO_S = 15.0


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drain",
        help="take a worker out of service without losing a request",
        description="Give a worker no new work, let its streams end or move to other workers, and "
        "wait until its KV was fetched. Exit code 0 if nothing is left on it, else 1. Ctrl-C "
        "leaves it draining. It gets no work until `--undo`, or until it is restarted.",
        formatter_class=formatter,
    )
    parser.add_argument("worker", metavar="WORKER", help="the worker's id")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="then move its streams to other workers (default: %(default)g)",
    )
    parser.add_argument("--stop", action="store_true", help="end its process once it is drained")
    parser.add_argument(
        "--force", action="store_true", help="also if its model cannot be served without it"
    )
    parser.add_argument("--undo", action="store_true", help="give a drained worker work again")
    parser.add_argument("--json", action="store_true", help="print progress as JSON lines")
    add_grpc_option(parser)
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    return asyncio.run(_undo(args) if args.undo else _drain(args))


async def _undo(args: argparse.Namespace) -> int:
    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1.admin_pb2_grpc import AdminStub

    request = a.UndrainWorkerRequest(worker_id=args.worker)
    async with channel_to(dialer_from(args), args.grpc) as (channel, metadata):
        await AdminStub(channel).UndrainWorker(request, timeout=_UNDO_S, metadata=metadata)
    say(f"worker {args.worker} gets work again")
    return 0


async def _drain(args: argparse.Namespace) -> int:
    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1.admin_pb2_grpc import AdminStub

    request = a.DrainWorkerRequest(
        worker_id=args.worker, timeout_s=args.timeout, force=args.force, stop=args.stop
    )
    is_drained, shown = False, ""
    async with channel_to(dialer_from(args), args.grpc) as (channel, metadata):
        timeout_s = args.timeout + _REST_S
        stub = AdminStub(channel)
        async for progress in stub.DrainWorker(request, timeout=timeout_s, metadata=metadata):
            is_drained = progress.drained
            line = (
                json.dumps({"worker": args.worker, **plain(progress)})
                if args.json
                else _line(args.worker, progress)
            )
            if line != shown:
                shown = line
                say(line)
    return 0 if is_drained else 1


def _line(worker: str, progress: DrainProgress) -> str:
    left = f"{progress.open_streams} streams and {progress.pinned_blocks} blocks left"
    if not progress.done:
        return f"worker {worker} is draining: {left}"
    if not progress.drained:
        return f"worker {worker} is not drained after {progress.seconds:.2f} s: {left}"
    moved = f" ({progress.moved_streams} streams moved)" if progress.moved_streams else ""
    return f"worker {worker} is drained after {progress.seconds:.2f} s{moved}"

"""`pdserve drain` and `pdserve undrain`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

from pdserve.commands.options import DEFAULT_GRPC, add_dial_options, dialer_from

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers
    from pdserve.rpc import Dialer
    from pdserve.v1.admin_pb2 import DrainProgress

# What a drain takes at most beyond the time that streams may take to end.
_REST_S = 90.0
_UNDRAIN_S = 15.0


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add both commands."""
    drain = _add(
        commands,
        "drain",
        "take a worker out of service without losing a request",
        "Give a worker no new work, let its streams end or go on elsewhere, and wait until its KV "
        "has been taken. Exit code 0 when nothing is left on it, 1 where something is, or where "
        "it was given work again meanwhile. Ctrl-C leaves it draining. It takes no work until "
        "`pdserve undrain`, or until it is started again.",
    )
    drain.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="streams that have not ended by then go on elsewhere (default: %(default)g)",
    )
    drain.add_argument(
        "--stop", action="store_true", help="end the worker's process once it is drained"
    )
    drain.add_argument(
        "--force",
        action="store_true",
        help="even where its model cannot be served without it",
    )
    drain.add_argument(
        "--json", action="store_true", help="print progress as JSON, an object a line"
    )
    drain.set_defaults(handler=_run_drain)
    undrain = _add(
        commands,
        "undrain",
        "give a drained worker work again",
        "Give a worker work again that `pdserve drain` has taken out of service.",
    )
    undrain.set_defaults(handler=_run_undrain)


def _add(
    commands: Subparsers[argparse.ArgumentParser], name: str, short: str, description: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=short, description=description)
    parser.add_argument("worker", metavar="WORKER", help="the worker's id, as status shows it")
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT",
        help="the gRPC address of a router, any one (default: %(default)s)",
    )
    add_dial_options(parser)
    return parser


def _run_drain(args: argparse.Namespace) -> int:
    return asyncio.run(_drain(args))


async def _drain(args: argparse.Namespace) -> int:
    import grpc.aio

    from pdserve import rpc
    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1.admin_pb2_grpc import AdminStub

    request = a.DrainWorkerRequest(
        worker_id=args.worker, timeout_s=args.timeout, force=args.force, stop=args.stop
    )
    show = _Shown(args.worker, as_json=args.json)
    dialer = dialer_from(args)
    async with dialer.open_channel(args.grpc) as channel:
        try:
            async for progress in AdminStub(channel).DrainWorker(
                request, timeout=args.timeout + _REST_S, metadata=dialer.metadata
            ):
                show.step(progress)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
    return 0 if show.drained else 1


class _Shown:
    """State: what was said last, so that nothing is said twice."""

    def __init__(self, worker: str, *, as_json: bool) -> None:
        self.drained = False
        self._worker = worker
        self._as_json = as_json
        self._said = ""

    def step(self, progress: DrainProgress) -> None:
        self.drained = progress.drained
        if self._as_json:
            from google.protobuf.json_format import MessageToDict

            found = MessageToDict(
                progress,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            self._say(json.dumps({"worker": self._worker, **found}))
        elif progress.done:
            self._say(self._outcome(progress))
        else:
            self._say(
                f"worker {self._worker} drains: {progress.open_streams} streams, "
                f"{progress.pinned_blocks} blocks"
            )

    def _outcome(self, progress: DrainProgress) -> str:
        left = f"{progress.open_streams} streams and {progress.pinned_blocks} blocks are left"
        if not progress.drained:
            return f"worker {self._worker} is not drained after {progress.seconds:.2f} s: {left}"
        moved = f" ({progress.moved_streams} streams were to move)"
        return (
            f"worker {self._worker} is drained after {progress.seconds:.2f} s"
            f"{moved if progress.moved_streams else ''}"
        )

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def _run_undrain(args: argparse.Namespace) -> int:
    asyncio.run(_undrain(dialer_from(args), args.grpc, args.worker))
    sys.stdout.write(f"worker {args.worker} is given work again\n")
    return 0


async def _undrain(dialer: Dialer, address: str, worker_id: str) -> None:
    import grpc.aio

    from pdserve import rpc
    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1.admin_pb2_grpc import AdminStub

    async with dialer.open_channel(address) as channel:
        try:
            await AdminStub(channel).UndrainWorker(
                a.UndrainWorkerRequest(worker_id=worker_id),
                timeout=_UNDRAIN_S,
                metadata=dialer.metadata,
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error

"""`pdserve flip`."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from pdserve.commands.options import DEFAULT_GRPC, add_dial_options, dialer_from

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers
    from pdserve.rpc import Dialer
    from pdserve.v1.admin_pb2 import ChangeRoleResponse

# What a flip takes at most beside its drain.
_REST_S = 120.0


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "flip",
        help="move a worker from prefill to decode or back, while the service runs",
        description="Drain a worker, change its role, prove it by a request whose answer is "
        "checked, and give it work again. Where the proof fails, it has its former role again, "
        "and the exit code is 1.",
    )
    parser.add_argument("worker", metavar="WORKER", help="the worker's id, as status shows it")
    parser.add_argument("--to", required=True, choices=("prefill", "decode"), help="the new role")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="streams that have not ended by then go on elsewhere (default: %(default)g)",
    )
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT",
        help="the router's gRPC address (default: %(default)s)",
    )
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    dialer = dialer_from(args)
    reply = asyncio.run(_flip(dialer, args.grpc, args.worker, args.to, args.drain_timeout))
    if reply.failure:
        sys.stderr.write(f"pdserve: worker {args.worker} is what it was: {reply.failure}\n")
        return 1
    sys.stdout.write(
        f"worker {args.worker} is a {args.to} worker after {reply.total_s:.2f} s: "
        f"{reply.drain_s:.2f} s to drain ({reply.moved_streams} streams moved), "
        f"{reply.probe_s:.2f} s to prove\n"
    )
    return 0


async def _flip(
    dialer: Dialer, address: str, worker_id: str, role: str, drain_timeout_s: float
) -> ChangeRoleResponse:
    import grpc.aio

    from pdserve import rpc, wire
    from pdserve.types import Role
    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1.admin_pb2_grpc import AdminStub

    request = a.ChangeRoleRequest(
        worker_id=worker_id, role=wire.role_to_pb(Role(role)), drain_timeout_s=drain_timeout_s
    )
    async with dialer.open_channel(address) as channel:
        try:
            return await AdminStub(channel).ChangeRole(
                request, timeout=drain_timeout_s + _REST_S, metadata=dialer.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error

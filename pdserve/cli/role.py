"""`pdserve role`: change a worker's role while the service runs."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

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

_REST_S = 120.0  # longest role change beyond its drain


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "role",
        help="change a worker's role between prefill and decode",
        description="Drain a worker, change its role, probe it with a request whose answer is "
        "known, and give it work again. If the probe fails, the worker gets its old role back and "
        "the exit code is 1.",
        formatter_class=formatter,
    )
    parser.add_argument("worker", metavar="WORKER", help="the worker's id")
    parser.add_argument("role", choices=("prefill", "decode"), help="the new role")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="then move its streams to other workers (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    add_grpc_option(parser)
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    reply = asyncio.run(_change(args))
    if args.json:
        say(json.dumps({"worker": args.worker, "role": args.role, **reply}))
    elif reply["failure"]:
        sys.stderr.write(f"pdserve: worker {args.worker} kept its role: {reply['failure']}\n")
    else:
        say(
            f"worker {args.worker} is a {args.role} worker after {reply['total_s']:.2f} s: "
            f"{reply['drain_s']:.2f} s to drain ({reply['moved_streams']} streams moved), "
            f"{reply['probe_s']:.2f} s to probe"
        )
    return 1 if reply["failure"] else 0


async def _change(args: argparse.Namespace) -> dict[str, Any]:
    from pdserve import wire
    from pdserve.types import Role
    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1.admin_pb2_grpc import AdminStub

    request = a.ChangeRoleRequest(
        worker_id=args.worker,
        role=wire.role_to_pb(Role(args.role)),
        drain_timeout_s=args.drain_timeout,
    )
    async with channel_to(dialer_from(args), args.grpc) as (channel, metadata):
        timeout_s = args.drain_timeout + _REST_S
        stub = AdminStub(channel)
        return plain(await stub.ChangeRole(request, timeout=timeout_s, metadata=metadata))

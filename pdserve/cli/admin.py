"""`pdserve drain` and `pdserve role`: change what a worker does while the service runs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.cli.options import (
    add_command,
    add_seconds,
    add_service_options,
    channel_to,
    plain,
    say,
)
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers

# Longest drain and role change beyond the time that streams may take to end.
_DRAIN_REST_S, _ROLE_REST_S = 90.0, 120.0
_UNDO_S = 15.0


def register(commands: Subparsers) -> None:
    drain = add_command(
        *(commands, "drain", _drain, "take a worker out of service without losing a request"),
        "Give a worker no new work, let its streams end or move to other workers, and wait until "
        "its KV was fetched. Exit code 0 if nothing is left on it, else 1. Ctrl-C leaves it "
        "draining. It gets no work until `--undo`, or until it is restarted.",
    )
    role = add_command(
        *(commands, "role", _role, "change a worker's role between prefill and decode"),
        "Drain a worker, change its role, probe it with a request whose answer is known, and give "
        "it work again. If the probe fails, the worker gets its old role back and the exit code is "
        "1.",
    )
    for parser, flag in ((drain, "--timeout"), (role, "--drain-timeout")):
        parser.add_argument("worker", metavar="WORKER", help="the worker's id")
        add_seconds(parser, flag, 30.0, "then move its streams to other workers", or_none=True)
    role.add_argument("role", choices=("prefill", "decode"), help="the new role")
    for flag, text in (
        ("--stop", "end its process once it is drained"),
        ("--force", "also if its model cannot be served without it"),
        ("--undo", "give a drained worker work again"),
    ):
        drain.add_argument(flag, action="store_true", help=text)
    add_service_options(drain, as_json="print progress as JSON lines")
    add_service_options(role, as_json="print the outcome as JSON")


async def _drain(args: argparse.Namespace) -> int:
    is_drained, shown = False, ""
    async with channel_to(args) as (channel, metadata):
        stub, timeout_s = AdminStub(channel), args.timeout + _DRAIN_REST_S
        if args.undo:
            undo = a.UndrainWorkerRequest(worker_id=args.worker)
            await stub.UndrainWorker(undo, timeout=_UNDO_S, metadata=metadata)
            say(f"worker {args.worker} gets work again")
            return 0
        request = a.DrainWorkerRequest(
            worker_id=args.worker, timeout_s=args.timeout, force=args.force, stop=args.stop
        )
        async for progress in stub.DrainWorker(request, timeout=timeout_s, metadata=metadata):
            is_drained = progress.drained
            line = _line(args.worker, progress)
            if args.json:
                line = json.dumps({"worker": args.worker, **plain(progress)})
            if line != shown:
                shown = line
                say(line)
    return 0 if is_drained else 1


def _line(worker: str, progress: a.DrainProgress) -> str:
    left = f"{progress.open_streams} streams and {progress.pinned_blocks} blocks left"
    if not progress.done:
        return f"worker {worker} is draining: {left}"
    if not progress.drained:
        return f"worker {worker} is not drained after {progress.seconds:.2f} s: {left}"
    moved = f" ({progress.moved_streams} streams moved)" if progress.moved_streams else ""
    return f"worker {worker} is drained after {progress.seconds:.2f} s{moved}"


async def _role(args: argparse.Namespace) -> int:
    role, drain_s = wire.role_to_pb(Role(args.role)), args.drain_timeout
    request = a.ChangeRoleRequest(worker_id=args.worker, role=role, drain_timeout_s=drain_s)
    async with channel_to(args) as (channel, metadata):
        reply = await AdminStub(channel).ChangeRole(
            request, timeout=drain_s + _ROLE_REST_S, metadata=metadata
        )
    if args.json:
        say(json.dumps({"worker": args.worker, "role": args.role, **plain(reply)}))
    elif reply.failure:
        sys.stderr.write(f"pdserve: worker {args.worker} kept its role: {reply.failure}\n")
    else:
        say(
            f"worker {args.worker} is a {args.role} worker after {reply.total_s:.2f} s: "
            f"{reply.drain_s:.2f} s to drain ({reply.moved_streams} streams moved), "
            f"{reply.probe_s:.2f} s to probe"
        )
    return 1 if reply.failure else 0

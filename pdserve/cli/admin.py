"""`pdserve drain`, `role` and `weights`: change what workers do while the service runs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from pdserve import wire
from pdserve.cli.options import (
    add_command,
    add_seconds,
    add_service_options,
    admin_dialer_from,
    channel_to,
    percent,
    say,
    table_of,
)
from pdserve.config import refuse
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall

    from pdserve.cli.options import Subparsers

# Longest drain and role change beyond the time that streams may take to end.
_DRAIN_REST_S, _ROLE_REST_S = 90.0, 120.0
_UNDO_S = 15.0


def register(commands: Subparsers) -> None:
    drain = add_command(
        commands,
        "drain",
        _drain,
        "take a worker, or a router, out of service without losing a request",
        "Give a worker no new work, let its streams end or move to other workers, and wait until "
        "its KV was fetched. Exit code 0 if nothing is left on it, else 1. Ctrl-C leaves it "
        "draining. It gets no work until `--undo`, or until it is restarted. With --router, have "
        "new requests served in other regions (router.peers) and wait until the open ones have "
        "ended; do so at each router of the region.",
    )
    role = add_command(
        commands,
        "role",
        _role,
        "change a worker's role between prefill and decode",
        "Drain a worker, change its role, probe it with a request whose answer is known, and give "
        "it work again. If the probe fails, the worker gets its old role back and the exit code is "
        "1.",
    )
    for parser, flag in ((drain, "--timeout"), (role, "--drain-timeout")):
        many = "?" if parser is drain else None
        parser.add_argument("worker", metavar="WORKER", nargs=many, help="the worker's id")
        add_seconds(parser, flag, 30.0, "then move its streams to other workers", or_none=True)
    role.add_argument("role", choices=("prefill", "decode"), help="the new role")
    for flag, text in (
        ("--stop", "end its process once it is drained"),
        ("--force", "also if its model cannot be served without it"),
        ("--undo", "give a drained worker or router work again"),
        ("--router", "drain the router at --grpc instead of a worker"),
    ):
        drain.add_argument(flag, action="store_true", help=text)
    add_service_options(drain, as_json="print progress as JSON lines")
    add_service_options(role, as_json="print the outcome as JSON")

    weights = add_command(
        commands,
        "weights",
        _weights,
        "split new requests over revisions of a model's workers",
        "Split new requests of a model by weight over the revisions of its workers "
        "(`worker.revision`), and show the results of each revision. Without weights and --clear, "
        "only show these. Each router keeps its weights until it ends, so name all routers, or "
        "dns:NAME:PORT for each address of a name.",
    )
    weights.add_argument("model", metavar="MODEL", help="the served model")
    text = "such as r1=95 r2=5; other revisions get no new requests"
    weights.add_argument("weights", type=_weight, nargs="*", metavar="REVISION=WEIGHT", help=text)
    text = "make all workers of the model one pool again"
    weights.add_argument("--clear", action="store_true", help=text)
    add_service_options(weights, several=True, as_json="print the revisions as JSON")


def _weight(text: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    weight = float(number)
    if not equals or not 0 <= weight < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a revision and a number from 0, not {text!r}")
    return name, weight


async def _weights(args: argparse.Namespace) -> int:
    from msgspec import json as to_json

    from pdserve.cli.console import open_console
    from pdserve.deploy.scaling.weights import RouterWeights
    from pdserve.net.discovery import Discovery

    if (args.weights and args.clear) or len(dict(args.weights)) < len(args.weights):
        refuse("REVISION=WEIGHT", "must name a revision once, and none with --clear")
    routers = RouterWeights(Discovery(tuple(args.grpc.split(","))), admin_dialer_from(args))
    if args.weights or args.clear:
        found = await routers.set_weights(args.model, dict(args.weights))
    else:
        found = await routers.revisions(args.model)
    if args.json:
        say(to_json.encode(found).decode())
        return 0
    slos = ("ttft", "tpot")
    rows = [
        (
            name or "(none)",
            " ".join(f"{n} {role}" for role, n in sorted(x.ready.items())) or "no ready worker",
            "/".join(sorted({"pool" if y is None else percent(y) for y in x.shares})),
            *(x.counts[result] for result in ("ended", "failed", "retried")),
            *(percent(x.counts[f"{y}_met"] / n) if (n := x.counts[y]) else None for y in slos),
        )
        for name, x in sorted(found.items())
    ]
    numbers = ("share", "ended", "failed", "retried", "TTFT met", "TPOT met")
    caption = "of the requests since the revision got a weight; retried: attempts that failed"
    title = f"revisions of {args.model}"
    open_console().print(table_of(title, ("revision", "ready"), numbers, rows, caption=caption))
    return 0


async def _drain(args: argparse.Namespace) -> int:
    if bool(args.worker) == args.router or (args.router and args.stop):
        refuse("WORKER", "is required without --router, and neither it nor --stop is used with it")
    is_drained, shown = False, ""
    name = f"router {args.grpc}" if args.router else f"worker {args.worker}"
    async with channel_to(args) as (channel, metadata):
        stub, timeout_s = AdminStub(channel), args.timeout + _DRAIN_REST_S
        if args.undo:
            if args.router:
                await stub.UndrainRouter(
                    a.UndrainRouterRequest(), timeout=_UNDO_S, metadata=metadata
                )
            else:
                undo = a.UndrainWorkerRequest(worker_id=args.worker)
                await stub.UndrainWorker(undo, timeout=_UNDO_S, metadata=metadata)
            say(f"{name} gets work again")
            return 0
        steps: UnaryStreamCall[Any, a.DrainProgress]
        if args.router:
            router = a.DrainRouterRequest(timeout_s=args.timeout, force=args.force)
            steps = stub.DrainRouter(router, timeout=timeout_s, metadata=metadata)
        else:
            request = a.DrainWorkerRequest(
                worker_id=args.worker, timeout_s=args.timeout, force=args.force, stop=args.stop
            )
            steps = stub.DrainWorker(request, timeout=timeout_s, metadata=metadata)
        async for progress in steps:
            is_drained = progress.drained
            line = _line(name, progress)
            if args.json:
                line = json.dumps({"worker": args.worker, **wire.json_object(progress)})
            if line != shown:
                shown = line
                say(line)
    return 0 if is_drained else 1


def _line(name: str, progress: a.DrainProgress) -> str:
    left = f"{progress.open_streams} streams and {progress.pinned_blocks} blocks left"
    if not progress.done:
        return f"{name} is draining: {left}"
    if not progress.drained:
        return f"{name} is not drained after {progress.seconds:.2f} s: {left}"
    moved = f" ({progress.moved_streams} streams moved)" if progress.moved_streams else ""
    return f"{name} is drained after {progress.seconds:.2f} s{moved}"


async def _role(args: argparse.Namespace) -> int:
    role, drain_s = wire.role_to_pb(Role(args.role)), args.drain_timeout
    request = a.ChangeRoleRequest(worker_id=args.worker, role=role, drain_timeout_s=drain_s)
    async with channel_to(args) as (channel, metadata):
        reply = await AdminStub(channel).ChangeRole(
            request, timeout=drain_s + _ROLE_REST_S, metadata=metadata
        )
    if args.json:
        say(json.dumps({"worker": args.worker, "role": args.role, **wire.json_object(reply)}))
    elif reply.failure:
        sys.stderr.write(f"pdserve: worker {args.worker} kept its role: {reply.failure}\n")
    else:
        say(
            f"worker {args.worker} is a {args.role} worker after {reply.total_s:.2f} s: "
            f"{reply.drain_s:.2f} s to drain ({reply.moved_streams} streams moved), "
            f"{reply.probe_s:.2f} s to probe"
        )
    return 1 if reply.failure else 0

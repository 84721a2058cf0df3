"""`pdserve status`: workers, load, KV plane, and who cannot exchange KV with whom."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdserve.commands.options import DEFAULT_GRPC, add_dial_options, dialer_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from google.protobuf.message import Message

    from pdserve.commands.options import Subparsers
    from pdserve.rpc import Dialer
    from pdserve.v1.worker_pb2 import Role, WorkerEntry, WorkerStatus


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="show the workers, their load and the KV blocks they hold for transfers",
        description="Ask the router for its workers and each worker for its load and its KV "
        "plane, and say which workers cannot exchange KV, and why. Exit code 1 if the router "
        "cannot be reached.",
    )
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT",
        help="the router's gRPC address (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="deadline for each question (default: %(default)g)",
    )
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    found = asyncio.run(collect(dialer_from(args), args.grpc, args.timeout))
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    from pdserve.commands.status_view import show

    show(args.grpc, found)
    return 0


async def collect(dialer: Dialer, address: str, timeout_s: float) -> dict[str, Any]:
    """`workers`, a row each; `unpaired`, a row for each two that cannot exchange KV;
    `costs`, one for each model (whether P/D helps now, and how far predictions were off);
    `roles`, one for each model whose roles the router moves (which split it wants, and why);
    `ejected_pairs`, one for each two that the router keeps apart because KV came damaged; and one
    of `canaries`, how its own requests over pairs went. Raises PdserveError where the router does
    not answer."""
    import grpc.aio

    from pdserve.errors import Unavailable
    from pdserve.rpc import error_from_rpc
    from pdserve.v1 import worker_pb2, worker_pb2_grpc

    async with dialer.open_channel(address) as channel:
        stub = worker_pb2_grpc.RegistryStub(channel)
        try:
            listed = await stub.ListWorkers(
                worker_pb2.ListWorkersRequest(), timeout=timeout_s, metadata=dialer.metadata
            )
        except grpc.aio.AioRpcError as error:
            reason = error_from_rpc(error).message
            raise Unavailable(f"no router answers at {address}: {reason}") from error
    asked = [_ask(dialer, entry.info.address, timeout_s) for entry in listed.workers]
    answers = await asyncio.gather(*asked)
    rows = [_row(entry, answer) for entry, answer in zip(listed.workers, answers, strict=True)]
    return {
        "workers": sorted(rows, key=lambda row: str(row["worker_id"])),
        "unpaired": _unpaired(listed.workers),
        "ejected_pairs": [_plain(pair) for pair in listed.ejected_pairs],
        "canaries": [{"whole": listed.probes_passed, "failed": listed.probes_failed}],
        "costs": [_plain(costs) for costs in listed.costs],
        "roles": [_plain(roles) for roles in listed.roles],
    }


def _unpaired(entries: Iterable[WorkerEntry]) -> list[dict[str, Any]]:
    from pdserve import wire
    from pdserve.kv_pairs import unpaired

    infos = [wire.worker_from_pb(entry.info) for entry in entries if entry.state != "lost"]
    return [
        {
            "model": pair.prefill.model.name,
            "prefill": pair.prefill.worker_id,
            "decode": pair.decode.worker_id,
            "differences": [asdict(difference) for difference in pair.differences],
            "reason": pair.reason,
        }
        for pair in unpaired(infos)
    ]


async def _ask(dialer: Dialer, address: str, timeout_s: float) -> WorkerStatus | None:
    """The worker's own word, or None where it does not answer."""
    import grpc.aio

    from pdserve.v1 import worker_pb2, worker_pb2_grpc

    async with dialer.open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            return await stub.GetStatus(
                worker_pb2.GetStatusRequest(), timeout=timeout_s, metadata=dialer.metadata
            )
        except grpc.aio.AioRpcError:
            return None


def _row(entry: WorkerEntry, answer: WorkerStatus | None) -> dict[str, Any]:
    info = entry.info
    row: dict[str, Any] = {
        "worker_id": info.worker_id,
        "role": _role(info.role),
        "state": entry.state,
        "answers": answer is not None,
        "instance_id": info.instance_id,
        "address": info.address,
        "debug_address": info.debug_address or None,
        "pid": info.pid,
        "engine": info.engine,
        "model": info.model.name,
        "compatibility": info.kv.compatibility if info.HasField("kv") else None,
        "transports": list(info.kv.transports),
        "total_blocks": info.total_blocks,
        "max_num_seqs": info.max_num_seqs,
        "outstanding_requests": entry.outstanding_requests,
        "outstanding_tokens": entry.outstanding_tokens,
        "lease_remaining_s": round(entry.lease_remaining_s, 3),
        "breaker": _plain(entry.breaker) if entry.HasField("breaker") else None,
        "unhealthy": entry.unhealthy,
        "steps": _plain(entry.steps) if entry.HasField("steps") else None,
        "load": None,
        "ledger": None,
        "open_streams": None,
        "kv": None,
        "uptime_s": None,
        "gpus": [],
    }
    if answer is not None:
        row["ledger"] = _plain(answer.ledger)
        row["open_streams"] = answer.open_streams
        if entry.state == "draining" and not (answer.open_streams or any(row["ledger"].values())):
            row["state"] = "drained"
        row["uptime_s"] = round(answer.uptime_s, 3)
        if answer.HasField("kv"):
            row["kv"] = _plain(answer.kv)
        row["gpus"] = [_plain(gpu) for gpu in answer.gpus]
        if answer.HasField("load"):
            row["load"] = _plain(answer.load)
    return row


def _plain(message: Message) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _role(number: Role) -> str:
    from pdserve.v1 import worker_pb2

    return worker_pb2.Role.Name(number).removeprefix("ROLE_").lower()

"""`pdserve status`: workers, their load, their KV blocks, and what is wrong."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve import wire
from pdserve.cli import cluster
from pdserve.cli.options import (
    add_command,
    add_seconds,
    add_service_options,
    admin_dialer_from,
    channel_to,
    percent,
    place_of,
    say,
    table_of,
)
from pdserve.kv_compatibility import unpaired
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine, Iterable, Sequence

    from rich.table import Table

    from pdserve.cli.options import Subparsers
    from pdserve.net.rpc import Dialer

    Row = dict[str, Any]

ROUTER_TIMEOUT_S = 5.0
CRASH_LOOPING = "crash-looping"


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "status",
        _run,
        "show workers, their load and their KV blocks",
        "Show the workers of a router, their load, the KV blocks pinned for transfers, workers "
        "that get no work, and pairs that cannot exchange KV. Exit code 1 if the router does not "
        "answer.",
    )
    cluster.add_on_option(parser)
    add_seconds(parser, "--timeout", 1.0, "how long each worker has to answer")
    add_service_options(parser, as_json="print JSON instead of tables")


def _run(args: argparse.Namespace) -> int | Coroutine[Any, Any, int]:
    return cluster.show_status(args) if args.on else _show_router(args)


async def _show_router(args: argparse.Namespace) -> int:
    found = await collect(args, args.timeout)
    if args.json:
        say(json.dumps(found, indent=2))
    else:
        _show(args.grpc, found)
    return 0


async def collect(args: argparse.Namespace, timeout_s: float) -> dict[str, Any]:
    """Return what `pdserve status --json` prints. Raises PdserveError if the router does not
    answer. A worker that does not answer within `timeout_s` has `"answers": false` and
    `failure`."""
    async with channel_to(args) as (channel, metadata):
        listed = await RegistryStub(channel).ListWorkers(
            w.ListWorkersRequest(), timeout=max(timeout_s, ROUTER_TIMEOUT_S), metadata=metadata
        )
    present = [entry for entry in listed.workers if entry.state != "left"]
    workers = sorted(present, key=lambda entry: entry.info.worker_id)
    dialer = admin_dialer_from(args)
    calls = [_ask(dialer, entry, timeout_s) for entry in workers]
    answers = await asyncio.gather(*calls)
    rows = [_row(*pair) for pair in zip(workers, answers, strict=True)]
    return {
        "workers": rows,
        "topology": dict(listed.topology),
        "draining": listed.draining,
        "peers": [wire.json_object(peer) for peer in listed.peers],
        "unpaired": _unpaired(workers),
        "slower_kv": _slower_kv(rows),
        "ejected_pairs": [wire.json_object(pair) for pair in listed.ejected_pairs],
        "roles": [wire.json_object(roles) for roles in listed.roles],
        "disaggregation": [wire.json_object(model) for model in listed.disaggregation],
        "on_demand": [wire.json_object(model) for model in listed.on_demand],
        "audits": [wire.json_object(model) for model in listed.audits],
        "tools": [wire.json_object(model) for model in listed.tools],
    }


async def _ask(dialer: Dialer, entry: w.WorkerEntry, timeout_s: float) -> w.WorkerStatus | str:
    """Return a worker's answer, or why there is none."""
    if entry.state == CRASH_LOOPING:
        return entry.reason
    async with dialer.open_channel(entry.info.address) as channel:
        try:
            return await WorkerStub(channel).GetStatus(
                w.GetStatusRequest(), timeout=timeout_s, metadata=dialer.metadata
            )
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"


def _unpaired(entries: Iterable[w.WorkerEntry]) -> list[Row]:
    """Return the prefill and decode workers whose KV caches are not compatible."""
    away = ("lost", CRASH_LOOPING)
    infos = [wire.worker_from_pb(entry.info) for entry in entries if entry.state not in away]
    return [
        {
            "model": pair.prefill.model.name,
            "prefill": pair.prefill.worker_id,
            "decode": pair.decode.worker_id,
            "reason": pair.reason,
        }
        for pair in unpaired(infos)
    ]


def _slower_kv(rows: Sequence[Row]) -> list[Row]:
    """Return the pairs whose KV takes a slower transport than it should."""
    names = {row["instance_id"]: row["worker_id"] for row in rows}
    return [
        {"prefill": names.get(peer, peer), "decode": row["worker_id"], "reason": reason}
        for row in rows
        if row["kv"]
        for peer, reason in sorted(row["kv"]["downgrades"].items())
    ]


def _row(entry: w.WorkerEntry, found: w.WorkerStatus | str) -> Row:
    info, failure = wire.json_object(entry.info), found if isinstance(found, str) else ""
    answer = None if isinstance(found, str) else found
    row: Row = {
        **info,
        **wire.json_object(entry),
        **(wire.json_object(answer) if answer else {}),
        "role": wire.role_from_pb(entry.info.role).value,
        "model": entry.info.model.name,
        "outstanding_tokens": entry.outstanding_tokens,  # protobuf prints uint64 as text
        "answers": not failure,
        "failure": failure,
        "info": info,
        "kv": wire.json_object(answer.kv) if answer and answer.HasField("kv") else None,
    }
    is_empty = answer is not None and not answer.open_streams and not any(row["ledger"].values())
    if entry.state == "draining" and is_empty:
        row["state"] = "drained"
    return row


def _show(address: str, found: dict[str, Any]) -> None:
    from rich.markup import escape

    from pdserve.cli.console import open_console

    console = open_console()
    workers: list[Row] = found["workers"]
    where = f" in {place}" if (place := place_of(found["topology"])) else ""
    if workers:
        console.print(load_table(f"workers of {address}{where}", workers))
    else:
        console.print(f"no worker is registered at {address}")
    if cells := [_kv_cells(row) for row in workers if row["kv"]]:
        title, caption = "KV blocks pinned for transfers", "pinned = in flight + leased"
        figures = ("pinned", "in flight", "leased", "links", "moved", "failed", "debug")
        console.print("", table_of(title, ("worker",), figures, cells, caption=caption), sep="\n")
    lists = {
        "do not answer": [
            f"{row['worker_id']} at {row['address']}: {row['failure']}"
            for row in workers
            if not row["answers"] and row["state"] != CRASH_LOOPING
        ],
        "cannot exchange KV": [
            f"{x['prefill']} and {x['decode']} ({x['model']}): {x['reason']}"
            for x in found["unpaired"]
        ],
        "get KV over a slower transport": [
            f"{x['decode']} from {x['prefill']}: {x['reason']}" for x in found["slower_kv"]
        ],
        "have settings that the model needs": [
            f"{row['worker_id']}: {row['settings']['set_for_model']}"
            for row in workers
            if row.get("settings", {}).get("set_for_model")
        ],
        "run the model on a CPU": _kinds(workers),
        "get no work": [
            f"{row['worker_id']}: {_why_idle(row)}" for row in workers if row["reason"]
        ],
        "ejected pairs": [
            f"{x['prefill_worker']} and {x['decode_worker']}: {_until(x)}"
            for x in found["ejected_pairs"]
        ],
        "roles by load": [f"{row['model']}: {row['text']}" for row in found["roles"]],
        "P/D helps here": [f"{row['model']}: {row['text']}" for row in found["disaggregation"]],
        "audits of answers": [f"{row['model']}: {row['text']}" for row in found["audits"]],
        "tools": [f"{row['model']}: {row['text']}" for row in found["tools"]],
        "other regions": [_peer(x) for x in found["peers"]],
        "drains": ["new requests go to other regions"] if found["draining"] else [],
        "started on demand": [f"{row['model']}: {row['text']}" for row in found["on_demand"]],
    }
    for title, lines in lists.items():
        if lines:
            console.print(f"\n[bold]{title}[/]")
        for line in lines:
            console.print(f"  {escape(line)}", soft_wrap=True)


def _kinds(workers: Sequence[Row]) -> list[str]:
    """Return the workers on CPUs that run compiled code, and those that do not."""
    names: dict[str, list[str]] = {}
    for row in workers:
        settings = row.get("settings", {})
        if settings.get("device") == "cpu" and "enforce_eager" in settings:
            kind = "eagerly" if settings["enforce_eager"] == "True" else "with compiled code"
            names.setdefault(kind, []).append(row["worker_id"])
    return [f"{', '.join(found)}: {kind}" for kind, found in names.items()]


def _peer(row: Row) -> str:
    takes = f"takes requests, serves {', '.join(row['models']) or 'no model'}"
    state = row["reason"] or takes
    return f"{row['region']} at {row['address']}: {state}; link {row['delay_s'] * 1e3:.1f} ms"


def _why_idle(row: Row) -> str:
    breaker = row.get("breaker")
    return _until(breaker) if breaker and breaker["reason"] == row["reason"] else row["reason"]


def _until(ejected: Row) -> str:
    left_s = ejected["remaining_s"]
    until = f"for {_duration(left_s)} more" if left_s else "the next request tries it"
    return f"{ejected['reason']}; {until}"


def load_table(title: str, workers: Sequence[Row]) -> Table:
    cells, names = [_load_cells(row) for row in workers], ["worker"]
    places = [place_of(row["topology"]) for row in workers]
    for title_of, column in (("revision", [_revision(row) for row in workers]), ("where", places)):
        if any(column):
            names.insert(1, title_of)
            pairs = zip(column, cells, strict=True)
            cells = [(name, value, *rest) for value, (name, *rest) in pairs]
    return table_of(
        title,
        (*names, "role", "state", "model"),
        ("running", "waiting", "KV", "placed", "up"),
        cells,
        caption="KV: cache in use; placed: requests and tokens that this router placed",
    )


def _revision(row: Row) -> str:
    """Return the revision and, with weights, its share of new requests."""
    share = f" {percent(row['revision_share'])}" if "revision_share" in row else ""
    return f"{row['revision']}{share}".strip()


def _load_cells(row: Row) -> tuple[object, ...]:
    load = row.get("load")
    return (
        row["worker_id"],
        row["role"],
        row["state"]
        if row["answers"] or row["state"] == CRASH_LOOPING
        else f"{row['state']}, no answer",
        row["model"],
        *((load["num_running_reqs"], load["num_waiting_reqs"]) if load else (None, None)),
        f"{load['kv_cache_usage']:.0%}" if load else None,
        f"{row['outstanding_requests']} ({row['outstanding_tokens']} tok)",
        _duration(row["uptime_s"]) if row["answers"] else None,
    )


def _kv_cells(row: Row) -> tuple[object, ...]:
    from rich.filesize import decimal

    ledger, totals = row["kv"]["ledger"], row["kv"]["totals"]
    links = ", ".join(f"{n} {name}" for name, n in sorted(row["kv"]["links"].items()))
    return (
        row["worker_id"],
        *(ledger[f"{x}_blocks"] for x in ("pinned", "in_flight", "leased")),
        links or "none",
        decimal(int(totals.get("pushed_bytes", 0) + totals.get("received_bytes", 0))),
        f"{totals.get('failures', 0):.0f}",
        f"http://{row['debug_address']}/debug/kv" if row["debug_address"] else None,
    )


def _duration(seconds: float) -> str:
    for length, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"

"""What `pdserve status` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = dict[str, Any]

_NOT_KNOWN = "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_INSTANCE_ID_SHOWN = 8
_REFUSED = ("refused_grants", "dropped_links")


def show(address: str, found: dict[str, list[Row]], console: Console | None = None) -> None:
    """What `pdserve status --json` prints, as tables."""
    console = console or Console(highlight=False)
    workers = found["workers"]
    if not workers:
        console.print(f"workers of {address}\nNo worker is registered.")
        return
    console.print(load_table(f"workers of {address}", workers))
    moving = [row for row in workers if row["kv"] is not None]
    if moving:
        console.print()
        console.print(_kv_table(moving))
        for row in moving:
            console.print(_whereabouts(row), soft_wrap=True)
    _list(
        console,
        "[bold]cannot exchange KV[/], and are never placed together:",
        [
            f"{x['prefill']} and {x['decode']} ({x['model']}): {x['reason']}"
            for x in found["unpaired"]
        ],
    )
    _list(
        console,
        "[bold]no work[/] until it is known to be well:",
        [line for row in workers for line in _kept_out(row)],
    )
    _list(
        console,
        "[bold]kept apart[/], for KV between them failed:",
        [_kept_apart(row) for row in found["ejected_pairs"]],
    )
    _list(
        console,
        "[bold]tried by canaries[/]:",
        [
            f"{x['whole']} times whole, {x['failed']} times not"
            for x in found.get("canaries", [])
            if x["whole"] or x["failed"]
        ],
    )
    _list(
        console,
        "[bold]does P/D help?[/]",
        [line for row in found.get("costs", []) for line in _costs(row)],
    )
    _list(
        console,
        "[bold]roles[/], moved by load:",
        [f"{row['model']}: {row['text']}" for row in found["roles"]],
    )


def _costs(row: Row) -> list[str]:
    """The meter's words, and how far predictions were off."""
    lines = [f"{row['model']}: {row['text']}"]
    ratios = ", ".join(
        f"{x['what']} {x['p50']:.2f} ({x['p10']:.2f} to {x['p90']:.2f})" for x in row["predictions"]
    )
    return [*lines, f"  predicted / actual, median (p10 to p90): {ratios}"] if ratios else lines


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{title}")
    for line in lines:
        console.print(f"  {escape(line)}", soft_wrap=True)


def _kept_out(row: Row) -> list[str]:
    lines = [f"{row['worker_id']}: {row['unhealthy']}"] if row["unhealthy"] else []
    breaker = row["breaker"]
    if breaker is not None:
        left_s = breaker["remaining_s"]
        then = f"for {_duration(left_s)} more" if left_s else "tried next"
        lines.append(f"{row['worker_id']}: {breaker['reason']}; {then}")
    return lines


def _kept_apart(row: Row) -> str:
    often = "once" if row["failures"] == 1 else f"{row['failures']} times"
    then = f"for {_duration(row['remaining_s'])} more" if row["remaining_s"] else "tried next"
    why = f"{row['reason']}; " if row["reason"] else ""
    return f"{row['prefill_worker']} and {row['decode_worker']}: {why}{often}; {then}"


def load_table(title: str, rows: Sequence[Row]) -> Table:
    """Who there is, and how busy."""
    table = _table(title, left=("worker", "role", "state", "model"))
    for name in ("running", "waiting", "KV", "placed", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_load_cells(row))
    table.caption = "KV: cache in use; placed: requests and tokens, by this router"
    return table


def _load_cells(row: Row) -> list[str]:
    load = row["load"]
    state = row["state"] if row["answers"] else f"{row['state']}, silent"
    return [
        row["worker_id"],
        row["role"],
        state,
        row["model"],
        *([str(load[x]) for x in ("num_running_reqs", "num_waiting_reqs")] if load else []),
        *([f"{load['kv_cache_usage']:.0%}"] if load else [_NOT_KNOWN] * 3),
        f"{row['outstanding_requests']} ({row['outstanding_tokens']} tok)",
        _NOT_KNOWN if row["uptime_s"] is None else _duration(row["uptime_s"]),
    ]


def _kv_table(rows: Sequence[Row]) -> Table:
    table = _table("KV blocks pinned for transfers", left=("worker",))
    for name in ("pinned", "in flight", "leased", "quarantined", "links"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("moved", "failed", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_kv_cells(row))
    table.caption = "pinned = in flight + leased; quarantined: links given up, not known to be idle"
    return table


def _kv_cells(row: Row) -> list[str]:
    kv = row["kv"]
    ledger, totals = kv["ledger"], kv["totals"]
    refused = sum(totals.get(x, 0) for x in _REFUSED)
    return [
        row["worker_id"],
        *(str(ledger[f"{x}_blocks"]) for x in ("pinned", "in_flight", "leased")),
        str(kv["quarantined_slots"]),
        ", ".join(f"{count} {name}" for name, count in sorted(kv["links"].items())) or "none",
        _size(totals.get("pushed_bytes", 0) + totals.get("received_bytes", 0)),
        f"{totals.get('failures', 0):.0f}",
        f"{refused:.0f}",
    ]


def _whereabouts(row: Row) -> str:
    debug = row["debug_address"]
    where = f"http://{debug}/debug/kv" if debug else "no debug face"
    return f"  {row['worker_id']} (instance id {row['instance_id'][:_INSTANCE_ID_SHOWN]}): {where}"


def _table(title: str, left: Sequence[str]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, collapse_padding=True)
    table.title_justify = table.caption_justify = "left"
    for name in left:
        table.add_column(name, overflow="fold", no_wrap=name == "worker")
    return table


def _size(count: float) -> str:
    """Bytes, to three digits."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def _duration(seconds: float) -> str:
    """Whole seconds, minutes, hours or days."""
    for length, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"

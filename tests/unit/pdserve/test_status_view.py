"""What `pdserve status` prints of rows that its JSON has."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pdserve.commands.status_view import show

LEDGER = {"pinned_blocks": 7, "in_flight_blocks": 4, "leased_blocks": 3, "transfers": 2}
KV = {
    "ledger": LEDGER,
    "quarantined_slots": 1,
    "links": {"tcp": 1, "shm": 2},
    "totals": {
        "pushed_bytes": 3 * 1024**3,
        "received_bytes": 12.0,
        "failures": 5.0,
        "refused_grants": 1.0,
        "dropped_links": 1.0,
    },
}


def row(**changes: Any) -> dict[str, Any]:
    """A worker that answers, but for what is named."""
    return {
        "worker_id": "prefill-0",
        "role": "prefill",
        "state": "ready",
        "answers": True,
        "model": "demo",
        "instance_id": "0123456789abcdef",
        "debug_address": "127.0.0.1:9",
        "outstanding_requests": 2,
        "outstanding_tokens": 64,
        "load": {"num_running_reqs": 1, "num_waiting_reqs": 0, "kv_cache_usage": 0.25},
        "kv": KV,
        "uptime_s": 7500.0,
        "breaker": None,
        "unhealthy": "",
        **changes,
    }


def printed(
    *workers: dict[str, Any],
    unpaired: tuple[dict[str, str], ...] = (),
    ejected_pairs: tuple[dict[str, Any], ...] = (),
    costs: tuple[dict[str, Any], ...] = (),
    roles: tuple[dict[str, Any], ...] = (),
    width: int = 200,
) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    found = {
        "workers": [*workers],
        "unpaired": [*unpaired],
        "ejected_pairs": [*ejected_pairs],
        "costs": [*costs],
        "roles": [*roles],
    }
    show("127.0.0.1:8001", found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def cells(lines: list[str], worker_id: str, nth: int) -> list[str]:
    """Of the worker's nth line."""
    return [line for line in lines if line.startswith(worker_id)][nth].split()


def test_load_and_kv_plane_have_a_row_a_worker() -> None:
    lines = printed(row())
    load = "prefill-0 prefill ready demo 1 0 25% 2 (64 tok) 2 h"
    assert cells(lines, "prefill-0", 0) == load.split()
    kv = "prefill-0 7 4 3 1 2 shm, 1 tcp 3 GiB 5 2"
    assert cells(lines, "prefill-0", 1) == kv.split()
    assert lines[-1] == "  prefill-0 (instance id 01234567): http://127.0.0.1:9/debug/kv"
    assert not [line for line in lines if "cannot exchange" in line]


def test_what_is_not_known_is_no_zero() -> None:
    silent = row(answers=False, load=None, kv=None, uptime_s=None)
    lines = printed(silent)
    assert cells(lines, "prefill-0", 0)[2:8] == ["ready,", "silent", "demo", "-", "-", "-"]
    assert not [line for line in lines if "pinned" in line]


def test_a_worker_without_links_or_debug_face_says_so() -> None:
    lines = printed(row(debug_address=None, kv={**KV, "links": {}, "totals": {}}))
    assert " ".join(cells(lines, "prefill-0", 1)) == "prefill-0 7 4 3 1 none 0 B 0 0"
    assert lines[-1].endswith("no debug face")


def test_two_that_cannot_exchange_kv_are_named_with_the_reason() -> None:
    pair = {"model": "demo", "prefill": "prefill-0", "decode": "decode-1", "reason": "dtype: [a]"}
    lines = printed(row(), unpaired=(pair,))
    assert lines[-1] == "  prefill-0 and decode-1 (demo): dtype: [a]"


@pytest.mark.parametrize(
    ("strikes", "remaining_s", "said"),
    [(1, 42.0, "once; for 42 s more"), (3, 0.0, "3 times; tried next")],
)
def test_two_that_are_kept_apart_are_named(strikes: int, remaining_s: float, said: str) -> None:
    pair = {"prefill_worker": "prefill-0", "decode_worker": "decode-1"}
    struck = {**pair, "failures": strikes, "remaining_s": remaining_s, "reason": "x"}
    assert printed(row(), ejected_pairs=(struck,))[-1] == f"  prefill-0 and decode-1: x; {said}"


@pytest.mark.parametrize(("seconds", "shown"), [(5.4, "5 s"), (150, "2 min"), (200_000, "2 d")])
def test_time_is_shown_in_one_unit(seconds: float, shown: str) -> None:
    assert shown.split() == cells(printed(row(uptime_s=seconds)), "prefill-0", 0)[10:12]


def test_it_fits_a_narrow_terminal() -> None:
    lines = printed(row(), row(worker_id="decode-12", role="decode"), width=80)
    assert len([line for line in lines if line.startswith(("prefill-0 ", "decode-12 "))]) == 4
    assert max(len(line) for line in lines) <= 80


def test_no_worker_is_no_error() -> None:
    assert printed() == ["workers of 127.0.0.1:8001", "No worker is registered."]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"breaker": {"reason": "it has said nothing for 2.0 s", "remaining_s": 8.0}},
            "  prefill-0: it has said nothing for 2.0 s; for 8 s more",
        ),
        ({"breaker": {"reason": "x", "remaining_s": 0.0}}, "  prefill-0: x; tried next"),
        ({"unhealthy": "GPU 0 is at 99 degrees"}, "  prefill-0: GPU 0 is at 99 degrees"),
    ],
)
def test_who_gets_no_work_is_named_with_the_reason(changes: dict[str, Any], said: str) -> None:
    lines = printed(row(**changes), row(worker_id="prefill-1"))
    assert lines[lines.index("no work until it is known to be well:") + 1] == said


def test_the_meter_speaks_in_words_and_predictions_in_quantiles() -> None:
    ratio = {"what": "ttft", "count": 9, "p10": 0.8, "p50": 1.0, "p90": 1.25}
    costs = {"model": "demo", "text": "P/D helps now [x].", "predictions": [ratio]}
    lines = printed(row(), costs=(costs,))
    assert "  demo: P/D helps now [x]." in lines
    assert lines[-1].endswith("ttft 1.00 (0.80 to 1.25)")


def test_what_is_wanted_of_the_roles_is_said_in_words() -> None:
    text = "1 prefill worker loaded 2.00; 2 and 2 are wanted"
    lines = printed(row(), roles=({"model": "demo", "text": text},))
    assert lines[-2:] == ["roles, moved by load:", f"  demo: {text}"]

"""Receipts and usage from what the legs of a request reported."""

from __future__ import annotations

import pytest

from pdserve.types import PhaseReport, Receipt, Role, TransferReport, Usage
from router.handoff import Handoff
from router.leg import Leg, LegKind
from router.receipts import build_receipt, build_usage

MOVED = TransferReport(0.02, 0.01, 4096, 3, "shm")
P = Leg(
    LegKind.PREFILL, "p", Role.PREFILL, False, PhaseReport(queue_s=1, prefill_s=2, cached_tokens=16)
)
D = Leg(LegKind.DECODE, "d", Role.DECODE, False, PhaseReport(queue_s=4, decode_s=8, transfer=MOVED))
LOST_D = Leg(LegKind.DECODE, "d", Role.DECODE, False)
LOST_P = Leg(LegKind.PREFILL, "p0", Role.PREFILL, False)
WHOLE = PhaseReport(queue_s=1, prefill_s=2, decode_s=8, cached_tokens=32)
AGGREGATED = Leg(LegKind.WHOLE, "a", Role.AGGREGATED, False, WHOLE)
RECOMPUTED = Leg(LegKind.WHOLE, "d2", Role.DECODE, False, WHOLE)
ONE_TOKEN = Leg(LegKind.WHOLE, "p", Role.PREFILL, False, WHOLE)


@pytest.mark.parametrize(
    ("legs", "first", "tokens", "expected"),
    [
        pytest.param(
            [P, D],
            P,
            3,
            # Decode waits in its engine while prefill runs, so its wait is not the client's.
            Receipt(1.5, 2, 0.02, 0.01, 8, 4096, 3, "p", "d", "shm", 16, "prefill"),
            id="a handoff",
        ),
        pytest.param(
            [P, LOST_D],
            P,
            1,
            Receipt(1.5, 2, prefill_worker="p", cached_tokens=16, first_token_source="prefill"),
            id="an end at the first token",
        ),
        pytest.param(
            [AGGREGATED],
            AGGREGATED,
            1,
            Receipt(
                1.5,
                2,
                decode_s=8,
                prefill_worker="a",
                decode_worker="a",
                cached_tokens=32,
                first_token_source="aggregated",
            ),
            id="aggregated",
        ),
        pytest.param(
            [ONE_TOKEN],
            ONE_TOKEN,
            1,
            Receipt(
                1.5,
                2,
                decode_s=8,
                prefill_worker="p",
                cached_tokens=32,
                first_token_source="prefill",
            ),
            id="one token",
        ),
        pytest.param(
            [P, LOST_D, RECOMPUTED],
            P,
            3,
            Receipt(
                2.5,
                4,
                decode_s=8,
                prefill_worker="p",
                decode_worker="d2",
                cached_tokens=16,
                first_token_source="prefill",
            ),
            id="a recompute after the first token",
        ),
        pytest.param(
            [LOST_P, LOST_D, RECOMPUTED],
            RECOMPUTED,
            3,
            Receipt(
                1.5,
                2,
                decode_s=8,
                prefill_worker="d2",
                decode_worker="d2",
                cached_tokens=32,
                first_token_source="decode",
            ),
            id="a recompute from the start",
        ),
        pytest.param([LOST_P, LOST_D], None, 0, Receipt(0.5), id="nothing came"),
    ],
)
def test_a_receipt_says_what_each_phase_cost_and_where(
    legs: list[Leg], first: Leg | None, tokens: int, expected: Receipt
) -> None:
    handoff = Handoff(8, tokens=list(range(tokens)), legs=legs, first_token_leg=first)
    assert build_receipt(handoff, admission_s=0.5) == expected
    assert build_usage(handoff, 40) == Usage(40, tokens, expected.cached_tokens)

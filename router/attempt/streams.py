"""Answers, and their streams on workers, over all attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from pdserve.types import FinishReason, ModelWeights, PhaseReport, Role, WeightsSwitch
    from router.attempt.answer import Out
    from router.attempt.handoff import Side
    from router.attempt.placer import Charge, Reservation
    from router.fleet.health import Pair
    from router.fleet.member import Member
    from router.placement.values import Prediction


class WorkerStream(Struct, eq=False):
    """One stream on one worker. StreamObserver writes its result: `report` and the deaths. `pair`:
    ids of the workers that exchange KV for it. `cause`: why the previous attempt ended, "" in the
    first attempt. `is_optional`: the attempt continues without it. `stream_id`: its id on the
    connection, None if nothing was sent. `died`: the worker or its engine died with the request in
    flight; `engine_died`: the worker reported that its engine died. `from_token`: length of the
    answer when its attempt began. `weights`: those of the worker when the request was sent.
    `switches`: its later weights, each with the length of the answer before it.
    """

    side: Side
    member: Member
    charge: Charge
    pair: Pair | None
    cause: str
    is_optional: bool = False
    stream_id: int | None = None
    is_prefilling: bool = True
    report: PhaseReport | None = None
    died: bool = False
    engine_died: bool = False
    from_token: int = 0
    weights: ModelWeights | None = None
    switches: tuple[tuple[int, WeightsSwitch], ...] = ()

    @property
    def newest(self) -> ModelWeights | None:
        """The weights that sample its next token."""
        return self.switches[-1][1].weights if self.switches else self.weights

    @property
    def worker_id(self) -> str:
        return self.member.worker_id

    @property
    def role(self) -> Role:
        return self.member.info.role


class Fetched(Struct, eq=False):
    """Cached KV copied from the worker `holder` before the prompt was computed. `tokens`, `blocks`:
    size, 0 if the copy failed."""

    holder: str
    streams: list[WorkerStream]
    seconds: float
    tokens: int = 0
    blocks: int = 0


class Answer(Struct, eq=False):
    """Tokens and streams of one answer, over all attempts.

    `tokens` starts with the tokens that the client resumes from; only attempts append to it.
    `streams` has every opened stream, in order. `kv_worker` is set only for parallel sampling; its
    result is the worker that has the prompt's KV cached. `fetched`: the last copy of KV; `copies`:
    the streams of all copies. `retries`: the retry steps taken. `revision`, `prediction`: of its
    first workers. `cut`: set by a step that ends the answer at its next token.
    """

    out: Out
    max_tokens: int
    tokens: list[int]
    index: int = 0
    kv_worker: asyncio.Future[Member] | None = None
    streams: list[WorkerStream] = []
    first_token_stream: WorkerStream | None = None
    first_token_at: float | None = None
    cause: str = ""  # why the last attempt ended before the answer was complete
    fetched: Fetched | None = None
    copies: list[WorkerStream] = []
    retries: Sequence[str] = ()
    revision: str | None = None
    prediction: Prediction | None = None
    finish_reason: str = ""
    cut: FinishReason | None = None
    embedding: bytes = b""

    @property
    def cached_tokens(self) -> int:
        first = self.first_token_stream
        return 0 if first is None or first.report is None else first.report.cached_tokens


class Moved(Struct, frozen=True, eq=False):
    """End of an attempt that leaves a healthy worker. The request continues with `reservation`. If
    `producer` is set, its KV moves too, under `transfer_id`."""

    reservation: Reservation
    producer: WorkerStream | None = None
    transfer_id: str = ""

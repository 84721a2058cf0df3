"""What `pdserve explain` prints for people."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdserve import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1.worker_pb2 import WorkerInfo

_NOT_KNOWN = "-"
MOST_SHOWN = 24
MOST_REASONS = 4


class ExplainView:
    """Prints a request's decisions as they are said. State: the workers said so far."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._workers: dict[str, WorkerInfo] = {}

    def show(self, message: a.Explained) -> None:
        """Remember a worker, or print a request."""
        if message.HasField("worker"):
            self._workers[message.worker.worker_id] = message.worker
            return
        request = message.request
        out = self._console
        out.print(f"[bold]{escape(request.request_id)}[/]")
        if request.forgotten:
            out.print(f"  {request.forgotten} earlier decisions are no longer kept")
        for number, decision in enumerate(request.decisions, 1):
            self._show_decision(number, decision)

    def _show_decision(self, number: int, decision: a.PlacementDecision) -> None:
        out = self._console
        when = datetime.fromtimestamp(decision.unix_time_s).astimezone()
        where = f"[bold]{escape(outcome(decision))}[/]"
        out.print(f"\n{number}. {when:%H:%M:%S.%f} {_policy(decision)}{where}", soft_wrap=True)
        if decision.cause:
            out.print(f"   placed again: {escape(decision.cause)}", soft_wrap=True)
        one = ", one token asked" if decision.prefill_only else ""
        out.print(
            f"   prompt {decision.prompt_tokens} tokens, KV {decision.kv_tokens} tokens{one}",
            soft_wrap=True,
        )
        if decision.avoid or decision.excluded:
            pairs = [f"{pair.prefill} with {pair.decode}" for pair in decision.excluded]
            out.print(
                f"   to be avoided: {escape(', '.join([*decision.avoid, *pairs]))}", soft_wrap=True
            )
        shown, others = _shown(decision)
        out.print(self._table(decision, shown))
        if others:
            reasons = ", ".join(f"{n} {why}" for why, n in others.most_common(MOST_REASONS))
            out.print(f"   and {others.total()} more: {escape(reasons)}", soft_wrap=True)
        if decision.not_drawn:
            out.print(
                f"   {decision.not_drawn} other workers were not looked at: of a pool this large "
                "some are drawn for each decision",
                soft_wrap=True,
            )
        for prediction in decision.predictions:
            out.print(f"   {escape(_predicted(prediction))}", soft_wrap=True)
        for line in _last_step(decision):
            out.print(f"   {escape(line)}", soft_wrap=True)

    def _table(
        self, decision: a.PlacementDecision, candidates: Sequence[a.PlacementCandidate]
    ) -> Table:
        table = Table(box=None, pad_edge=True, collapse_padding=False)
        for name in ("worker", "role"):
            table.add_column(name, no_wrap=True)
        for name in ("prompt", "blocks", "run+wait"):
            table.add_column(name, justify="right", no_wrap=True)
        if decision.asked_prefix:
            table.add_column("cached", justify="right", no_wrap=True)
        table.add_column("total", justify="right", no_wrap=True)
        table.add_column("scores, or why not", overflow="fold")
        chosen = {decision.decode, decision.prefill}
        for candidate in candidates:
            cached = [str(candidate.cached_tokens)] if decision.asked_prefix else []
            total = _total(candidate)
            table.add_row(
                escape(candidate.worker_id),
                self._role(candidate),
                str(candidate.outstanding_tokens),
                self._blocks(candidate),
                _load(candidate),
                *cached,
                _NOT_KNOWN if total is None else f"{total:.3f}",
                escape(candidate.why_not or _scores(candidate)),
                style="bold" if candidate.worker_id in chosen else None,
            )
        return table

    def _role(self, candidate: a.PlacementCandidate) -> str:
        worker = self._workers.get(candidate.worker_id)
        return _NOT_KNOWN if worker is None else wire.role_from_pb(worker.role).value

    def _blocks(self, candidate: a.PlacementCandidate) -> str:
        worker = self._workers.get(candidate.worker_id)
        total = _NOT_KNOWN if worker is None else str(worker.total_blocks)
        return f"{candidate.reserved_blocks}/{total}"


def _total(candidate: a.PlacementCandidate) -> float | None:
    """What was compared: of prefill workers, what they scored for their phase."""
    totals = candidate.totals
    return totals["total"] if "total" in totals else totals.get("prefill")


def _shown(
    decision: a.PlacementDecision,
) -> tuple[list[a.PlacementCandidate], Counter[str]]:
    """Candidates in their order; of many those chosen and those scored best, and of the others how
    many there are by reason."""
    if len(decision.candidates) <= MOST_SHOWN:
        return list(decision.candidates), Counter()
    chosen = {decision.decode, decision.prefill}
    ranked = sorted(
        decision.candidates,
        key=lambda c: (c.worker_id not in chosen, bool(c.why_not), -(_total(c) or 0.0)),
    )
    others = ranked[MOST_SHOWN:]
    return ranked[:MOST_SHOWN], Counter(c.why_not or "scored less" for c in others)


def outcome(decision: a.PlacementDecision) -> str:
    """In words."""
    if decision.refused:
        return f"refused: {decision.refused}"
    if not decision.decode:
        often = f", tried {decision.tried_before + 1} times" if decision.tried_before else ""
        return f"waits for room{often}"
    if decision.prefill:
        return f"prefill on {decision.prefill}, decode on {decision.decode}"
    return f"all on {decision.decode}"


def _policy(decision: a.PlacementDecision) -> str:
    return f"{escape(decision.policy)}, turn {decision.turn}: " if decision.policy else ""


def _load(candidate: a.PlacementCandidate) -> str:
    if not candidate.HasField("load"):
        return _NOT_KNOWN
    return f"{candidate.load.num_running_reqs}+{candidate.load.num_waiting_reqs}"


def _scores(candidate: a.PlacementCandidate) -> str:
    if not candidate.scores:
        return "all are equal"
    parts: dict[str, list[str]] = {}
    for score in candidate.scores:
        text = f"{score.weight:g}×{score.scorer} {score.score:.3f}"
        parts.setdefault(score.phase, []).append(text)
    return "; ".join(f"{phase}: {' + '.join(texts)}" for phase, texts in parts.items())


def _predicted(prediction: a.PlacementPrediction) -> str:
    where = f"{prediction.prefill} → {prediction.decode}"
    if not prediction.prefill:
        where = f"{prediction.decode} alone"
    seconds = sorted(prediction.seconds.items())
    figures = ", ".join(f"{name.removesuffix('_s')} {x * 1e3:.1f} ms" for name, x in seconds)
    return f"predicted {where}: {figures}"


def _last_step(decision: a.PlacementDecision) -> list[str]:
    """Where both ways were predicted: what they cost, and whether habit or prediction decided."""
    costs = {x.prefill: x.seconds["cost_s"] for x in decision.predictions if "cost_s" in x.seconds}
    apart = {name: cost_s for name, cost_s in costs.items() if name}
    if not decision.decode or not apart or "" not in costs:
        return []
    cost_s = apart.get(decision.prefill, min(apart.values()))
    was_apart = not any(x.is_habit and not x.prefill for x in decision.predictions)
    habit = "apart" if was_apart else "on the decode worker"
    if was_apart == bool(decision.prefill):
        verdict = "which is not beaten clearly"
    else:
        verdict = "which is beaten clearly"
    figures = f"apart {cost_s * 1e3:.1f} ms, on the decode worker {costs[''] * 1e3:.1f} ms"
    return [f"cost of prefill {figures}; requests of this size last had it {habit}, {verdict}"]

"""Views of the console: the router's state as values, and its changes.

Nothing here runs unless a console is open. All times are in seconds on the event loop's clock.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import structs

from pdserve import __version__
from pdserve.observe.explanation import chosen, details, outcome, predicted, scores, total
from pdserve.types import Role
from router.fleet.view import pair_views, worker_views
from router.placement.cost import ADVICE
from router.placement.decisions import explained

if TYPE_CHECKING:
    from pdserve.v1 import admin_pb2 as a
    from router.control.autoscaler import Verdict
    from router.control.open import WorkerControl
    from router.fleet.view import PairView, WorkerView
    from router.placement.cost import Latency
    from router.placement.decisions import DecisionLog
    from router.request_path import RequestPath
    from router.walk import RequestRecord

    Row = dict[str, Any]

# Requests in one message to a viewer: encoding more would delay tokens.
MAX_ROWS = 500
MODELS_EVERY_S = 2.0  # also sessions
MAX_SESSIONS = 100  # per message
_GPU = (
    *("index", "name", "temperature_c", "memory_used_bytes", "memory_total_bytes"),
    *("utilization_percent", "power_w", "throttled_by", "fault"),
)
# Fields of a record that are left out while they are empty.
_IF_SET = (
    *("session", "ended", "ttft_s", "outcome", "reason", "message", "trace_id"),
    "recomputed_tokens",
)

_OF_SESSION = ("used", "turns", "prompt_tokens", "cached_tokens", "recomputed_tokens")


def explain(decisions: DecisionLog, request_id: str) -> Row | None:
    """Return a request's placement decisions in words, or None if none are kept."""
    found = explained(decisions.of(request_id), decisions.chosen.of(request_id))
    if not found.decisions:
        return None
    choices = [chosen(x) for x in found.choices]
    return {"id": request_id, "choices": choices, "decisions": [*map(_decision, found.decisions)]}


class Viewer:
    """One open page. State: the values last sent to it."""

    def __init__(self, path: RequestPath, control: WorkerControl) -> None:
        self._path, self._control, self._fleet = path, control, path.workers.fleet
        self._open: dict[RequestRecord, tuple[object, ...]] = {}
        self._ended = max(0, path.log.ended_count - len(path.log.ended))
        self._workers: dict[str, Row] = {}
        self._steps_at: dict[str, float] = {}
        self._pairs: list[Row] = []
        self._models: list[Row] = []
        self._on_demand: list[Row] = []
        self._sessions: Row = {"count": 0, "rows": []}
        self._models_at = 0.0

    def hello(self, unix_time_s: float) -> Row:
        """Return the values that never change."""
        return {
            "version": __version__,
            "now": self._fleet.now(),
            "unix_time_s": unix_time_s,
            "slo": structs.asdict(self._path.costs.slo),
            "kept": self._path.log.ended.maxlen,
        }

    def changes(self) -> Row:
        """Return the values that have changed since the last call."""
        path, fleet, now = self._path, self._fleet, self._fleet.now()
        found: Row = {
            "now": now,
            "open": self._open_requests(),
            "ended": self._ended_requests(),
            "running": path.admission.running,
            "queued": path.admission.queued,
        }
        before, self._workers = self._workers, self._rows_of_workers()
        found["workers"] = [x for name, x in self._workers.items() if x != before.get(name)]
        found["gone"] = [name for name in before if name not in self._workers]
        found["steps"] = self._steps()
        pairs = [_pair(pair) for pair in pair_views(fleet)]
        if pairs != self._pairs:
            found["pairs"] = self._pairs = pairs
        if now - self._models_at >= MODELS_EVERY_S:
            self._models_at = now
            models = [self._model(x) for x in sorted(fleet.models())]
            if models != self._models:
                found["models"] = self._models = models
            texts = () if path.on_demand is None else path.on_demand.texts()
            on_demand = [{"model": model, "text": text} for model, text in texts]
            if on_demand != self._on_demand:
                found["on_demand"] = self._on_demand = on_demand
            sessions = self._last_sessions()
            if sessions != self._sessions:
                found["sessions"] = self._sessions = sessions
        return found

    def _last_sessions(self) -> Row:
        sessions = self._path.sessions
        return {
            "count": len(sessions),
            "rows": [
                {
                    "id": x.session,
                    "tenant": x.tenant,
                    "model": x.model,
                    "adapter": x.adapter,
                    "workers": sorted(history.workers),
                    **{name: getattr(history, name) for name in _OF_SESSION},
                }
                for x, history in sessions.last(MAX_SESSIONS)
            ],
        }

    def _open_requests(self) -> list[Row]:
        """Return the open requests that are new or have progressed."""
        found: list[Row] = []
        before, self._open = self._open, {}
        for record in self._path.log.open:
            answers = record.answers
            first = [x.first_token_at for x in answers if x.first_token_at is not None]
            streams = sum(len(x.streams) for x in answers)
            state = self._open[record] = (record.admitted, bool(first), streams)
            if state == before.get(record):
                continue
            if len(found) == MAX_ROWS:
                del self._open[record]  # still counts as changed in the next message
                continue
            row = _request(record)
            row["first_token_at"] = min(first, default=0.0)
            row["path"] = [s.worker_id for x in answers[:1] for s in x.streams]
            found.append(row)
        return found

    def _ended_requests(self) -> list[Row]:
        log = self._path.log
        first_kept = log.ended_count - len(log.ended)
        start = max(self._ended, first_kept) - first_kept
        records = list(islice(log.ended, start, start + MAX_ROWS))
        self._ended = first_kept + start + len(records)
        return [_request(record) for record in records]

    def _rows_of_workers(self) -> dict[str, Row]:
        changing = self._control.changer.changing
        return {x.info.worker_id: _worker(x, changing) for x in worker_views(self._fleet)}

    def _steps(self) -> dict[str, list[tuple[float, float, int, int]]]:
        """Return the new engine steps of each worker: end, duration, prompt tokens, decoding
        requests."""
        found = {}
        for name, member in self._fleet.members.items():
            recent, at = member.reported.recent_steps, member.reported.recent_steps_at
            if recent is None or self._steps_at.get(name) == at:
                continue
            self._steps_at[name] = at
            columns = (recent.age_s, recent.took_s, recent.prefill_tokens, recent.decode_reqs)
            found[name] = [
                (round(at - age, 4), round(took, 5), prompt, reqs)
                for age, took, prompt, reqs in zip(*columns, strict=False)
            ]
        return found

    def _model(self, name: str) -> Row:
        costs, verdicts = self._path.costs, self._control.autoscaler.verdicts
        roles = verdicts.get(name)
        both = costs.counterfactual(name)
        verdict = None if both is None else costs.verdict(*both)
        return {
            "name": name,
            "verdict": verdict,
            "advice": None if verdict is None else ADVICE[verdict],
            "split": None if both is None else _latency(both[0]),
            "aggregated": None if both is None else _latency(both[1]),
            "roles": None
            if roles is None
            else {
                "text": roles.text,
                "stance": roles.stance,
                "prefill": _load(roles, Role.PREFILL),
                "decode": _load(roles, Role.DECODE),
            },
        }


def _latency(latency: Latency) -> dict[str, float] | None:
    """Return the predicted latency, or None for an overload."""
    return structs.asdict(latency) if latency.is_finite else None


def _load(verdict: Verdict, role: Role) -> Row:
    loads, wanted = verdict.loads, verdict.wanted
    workers = getattr(loads, f"{role}_workers")
    return {
        "workers": workers,
        "load": round(getattr(loads, role.value), 2) if workers else None,
        "wanted": getattr(wanted, f"{role}_workers"),
    }


def _request(record: RequestRecord) -> Row:
    found: Row = {
        "n": record.number,
        "id": record.request_id,
        "model": record.model,
        "tenant": record.tenant,
        "class": record.service_class.value,
        "prompt_tokens": record.prompt_tokens,
        "arrived": record.arrived,
        "admitted": record.admitted,
    }
    for name in _IF_SET:
        if value := getattr(record, name):
            found[name] = value
    if record.receipt is not None:
        # `receipt` means that the answer is complete.
        name = "partial_receipt" if record.is_partial else "receipt"
        found[name], found["usage"] = record.receipt, record.usage
    if record.ttft_met is not None:
        found["ttft_met"] = record.ttft_met
    return found


def _pair(view: PairView) -> Row:
    return {
        "prefill": view.prefill,
        "decode": view.decode,
        "ejected": view.is_ejected,
        "reason": view.breaker.reason,
        "failures": view.breaker.failures,
    }


def _worker(view: WorkerView, changing: str) -> Row:
    info, load = view.info, view.load
    found: Row = {
        "id": info.worker_id,
        "role": info.role.value,
        "model": info.model.name,
        "state": "changing role" if changing == info.worker_id else view.state.value,
        "reason": view.reason,
        "engine": info.engine,
        "where": "/".join(info.topology.values()),
        "max_num_seqs": info.limits.max_num_seqs,
        "total_blocks": info.total_blocks,
        "placed": view.placed_requests,
        "gpus": [{name: getattr(gpu, name) for name in _GPU} for gpu in view.gpus],
    }
    if load is not None:
        found["running"], found["waiting"] = load.num_running_reqs, load.num_waiting_reqs
        found["kv_usage"] = round(load.kv_cache_usage, 4)
    if view.kv is not None:
        found["links"] = view.kv.links
        found["failures"] = view.kv.totals.get("failures", 0.0)
    return found


def _decision(decision: a.PlacementDecision) -> Row:
    chosen = (decision.decode, decision.prefill)
    return {
        "unix_time_s": decision.unix_time_s,
        "policy": decision.policy,
        "outcome": outcome(decision),
        "details": details(decision),
        "predictions": [predicted(x) for x in decision.predictions],
        "candidates": [
            {
                "worker": x.worker_id,
                "chosen": x.worker_id in chosen,
                "total": total(x),
                "scores": scores(x),
                "prompt_tokens": x.outstanding_tokens,
                "blocks": f"{x.reserved_blocks}/{x.total_blocks}",
                "requests": f"{x.load.num_running_reqs}+{x.load.num_waiting_reqs}"
                if x.HasField("load")
                else "",
            }
            for x in decision.candidates
        ],
    }

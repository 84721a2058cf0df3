"""What the work at hand takes of a model's prefill and decode workers, in workers. Pure.

Prefill: a worker with a prompt to compute is one busy worker. Decode: of each worker, the share of
its seats, of its KV blocks or of the time that a token may take that is used, whichever is most;
blocks of requests that still wait for their prefill do not count. What waits, in the router or
before a prefill worker, counts as it would if it were to be done within WORK_OFF_S, in both phases
by what recent requests took; until some have ended it does not count. What decode workers prefill
themselves is not prefill's load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.types import Role
from router.cost.step_model import Batch
from router.fleet.member import MemberState
from router.roles.controller import Loads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.cost.pace import Pace
    from router.cost.step_model import StepModel
    from router.fleet.member import Member

WORK_OFF_S = 10.0


def loads_of(
    members: Sequence[Member],
    *,
    queued: int,
    pace: Pace | None,
    step_model: Callable[[str], StepModel | None],
    tpot_s: float,
) -> Loads:
    """Of one model's members; `queued` of its requests wait in the router, and `tpot_s` is what was
    promised."""
    ready = [m for m in members if m.state is MemberState.READY]
    prefill = [m for m in ready if m.info.role is Role.PREFILL]
    decode = [m for m in ready if m.info.role is Role.DECODE]
    prefill_need = sum(_busy(m, pace) for m in prefill)
    decode_need = sum(_occupied(m, step_model(m.worker_id), tpot_s) for m in decode)
    if queued and pace is not None:
        running = sum(_running(m) for m in decode)
        seats = sum(m.info.max_num_seqs for m in decode)
        each = decode_need / running if running else len(decode) / max(1, seats)
        prefill_need += queued * pace.prefill_s / WORK_OFF_S
        decode_need += queued * each * pace.decode_s / WORK_OFF_S
    return Loads(len(prefill), len(decode), prefill_need, decode_need)


def _busy(member: Member, pace: Pace | None) -> float:
    """Other routers' prompts show in the load alone."""
    load, tokens = member.load, member.outstanding_tokens
    if not tokens and (load is None or not load.num_running_reqs + load.num_waiting_reqs):
        return 0.0
    if pace is None:
        return 1.0
    behind = max(0.0, tokens / max(1.0, pace.prompt_tokens) - 1.0)
    return 1.0 + behind * pace.prefill_s / WORK_OFF_S


def _running(member: Member) -> int:
    return member.outstanding_requests if member.load is None else member.load.num_running_reqs


def _occupied(member: Member, model: StepModel | None, tpot_s: float) -> float:
    info, load, running = member.info, member.load, _running(member)
    known = running + (0 if load is None else load.num_waiting_reqs)
    if not running:
        return 0.0
    blocks = (member.reserved_blocks + member.foreign_blocks) * running / known
    used = max(running / info.max_num_seqs, blocks / info.total_blocks)
    if model is None or not model.knows_decode:
        return used
    empty_s = model.decode_step_s(Batch())
    if empty_s >= tpot_s:
        return used
    if load is not None:
        blocks = (info.total_blocks - load.free_blocks) * running / known
    step_s = model.decode_step_s(Batch(running, round(blocks * info.block_size)))
    return max(used, (step_s - empty_s) / (tpot_s - empty_s))

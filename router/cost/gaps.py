"""Whether a decode worker can take one more and keep what was promised of the gaps between tokens.
Pure; times in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.cost.step_model import Batch

if TYPE_CHECKING:
    from router.cost.step_model import StepModel
    from router.placement.values import Candidate

# Where a request that decodes alone has half of the limit between its tokens or more, two may
# decode together all the same.
ALONE = 2.0
# Of the limit: as many do not decode at all times, and now and then a prompt is computed there.
MARGIN = 0.8


def takes_one_more(
    model: StepModel, worker: Candidate, context: float, decoding: float, limit_s: float
) -> bool:
    """Whether steps stay within the limit with another request on the worker, each of `context`
    tokens on average. Of those that this router placed there the share `decoding` decodes at a
    time: the others' prompts are being computed elsewhere, and as many end as begin."""
    if not worker.outstanding_requests:
        return True
    expected = 1.0 + decoding * worker.outstanding_requests
    alone_s = model.decode_step_s(Batch(1, round(context)))
    slope_s = model.decode_step_s(Batch(2, round(2 * context))) - alone_s
    return alone_s + (expected - 1.0) * slope_s <= max(MARGIN * limit_s, ALONE * alone_s)


def context_of(worker: Candidate, otherwise: float) -> float:
    """Tokens that a request holds there on average, as the worker said last: those whose KV is on
    its way have their blocks too."""
    load, info = worker.load, worker.info
    requests = 0 if load is None else load.num_running_reqs + load.num_waiting_reqs
    if load is None or not requests:
        return otherwise
    return max(0, info.total_blocks - load.free_blocks) * info.block_size / requests

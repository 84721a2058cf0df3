"""Charges the work of an answer, and writes its last delta with usage and receipt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Cancelled, PdserveError
from pdserve.types import Usage
from router.attempt.handoff import Side
from router.attempt.receipt import combined_receipt, fill_in, receipt_of
from router.fleet.billing import StreamUsage
from router.placement.values import shown_regions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.types import Receipt
    from router.attempt.streams import Answer
    from router.fleet.billing import Billing, UsageCharge
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.placement.cost import CostModel
    from router.walk import Answered, Proceed, Walk


class AccountStep:
    """The innermost step. It sees all work. Work for a failed request counts as waste."""

    def __init__(
        self, billing: Billing, metrics: RouterMetrics, costs: CostModel, fleet: Fleet
    ) -> None:
        self._billing, self._metrics = billing, metrics
        self._costs, self._fleet = costs, fleet

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        try:
            done = await proceed(walk)
        except BaseException as error:
            code = error.code if isinstance(error, PdserveError) else Cancelled.code
            if walk.record.answers:
                self._account_partly(walk, walk.record.answers, code)
            raise
        done.usage, done.receipt = self._account(walk, done.answers)
        done.last.usage, done.last.receipt = done.usage, done.receipt
        walk.out.write(done.last)
        return done

    def _account(self, walk: Walk, answers: Sequence[Answer]) -> tuple[Usage, Receipt]:
        """Return usage and receipt of all answers, and record them in the metrics."""
        metrics, costs, now = self._metrics, self._costs, self._fleet.now()
        request, record, parent = walk.request, walk.record, answers[0]
        waited_s, resumed = record.admitted - record.arrived, len(request.resume)
        lengths = [len(x.tokens) for x in answers]
        # Each token counts once, even if retries computed it several times.
        usage = Usage(len(request.prompt_token_ids), sum(lengths), parent.cached_tokens)
        charges = charge_all(self._billing, answers, request.tenant)
        receipt = combined_receipt(
            [receipt_of(x, y, admission_s=waited_s) for x, y in zip(answers, charges, strict=True)]
        )
        receipt.images, receipt.render_s = len(request.media), request.render_s
        usage.inference_geo = shown_regions(receipt.regions)
        ttft_s = min([x.first_token_at or now for x in answers]) - record.arrived
        e2e_s = now - record.arrived
        record.usage, record.receipt, record.ttft_s = usage, receipt, ttft_s
        self._count_saved(parent)
        metrics.answered(
            request.model,
            request.tenant,
            usage,
            receipt,
            resumed=resumed,
            longest=max(lengths) - resumed,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            revision=parent.revision,
            trace_id=record.trace_id,
        )
        if request.media:
            self._count_images(walk, parent, receipt)
        # Retries, resumed, cut and parallel answers would distort the means of the cost model.
        if len(answers) == 1 and not (receipt.fallbacks or resumed or parent.cut):
            ttft_s, e2e_s = ttft_s - waited_s, e2e_s - waited_s
            costs.answered(request.model, usage, receipt, ttft_s=ttft_s, e2e_s=e2e_s)
        return usage, receipt

    def _account_partly(self, walk: Walk, answers: Sequence[Answer], failed: str) -> None:
        """Record what is known of interrupted answers. Their work was done, but is not paid for."""
        record, now, receipts = walk.record, self._fleet.now(), []
        waited_s = record.admitted - record.arrived
        charges = charge_all(self._billing, answers, walk.request.tenant, failed)
        for answer, charge in zip(answers, charges, strict=True):
            receipt = receipt_of(answer, charge, admission_s=waited_s)
            fill_in(receipt, answer, record.admitted, now)
            receipts.append(receipt)
        tokens = sum([len(x.tokens) for x in answers])
        first = [x.first_token_at for x in answers if x.first_token_at is not None]
        record.is_partial = True
        record.receipt = combined_receipt(receipts)
        record.usage = Usage(record.prompt_tokens, tokens, answers[0].cached_tokens)
        record.ttft_s = min(first) - record.arrived if first else 0.0

    def _count_images(self, walk: Walk, answer: Answer, receipt: Receipt) -> None:
        """Record images that an encode worker encoded, and its time."""
        model, tokens = walk.request.model, sum(x.length for x in walk.request.media)
        self._metrics.count("fetched_images", model, by=receipt.fetched_images)
        for stream in answer.streams:
            if stream.side is Side.ENCODE and stream.report is not None:
                self._costs.encoded(model, tokens, stream.report.encode_s)

    def _count_saved(self, answer: Answer) -> None:
        """Record the price of the prefill that the prefix cache saved, as the step model predicts
        it."""
        first, cached = answer.first_token_stream, answer.cached_tokens
        if first is None or not cached:
            return
        steps = self._costs.step_model(first.worker_id)
        if steps is not None and steps.knows_prefill:
            info = self._fleet.members[first.worker_id].info
            self._billing.saved(info, steps.prompt_s(cached, cached**2 / 2))


class AccountPoolingStep:
    """Charges embeddings, which have neither usage nor receipt."""

    def __init__(self, billing: Billing, count: Callable[..., None]) -> None:
        self._billing, self._count = billing, count

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        done, request = await proceed(walk), walk.request
        charge_all(self._billing, done.answers, request.tenant)
        self._count("prompt_tokens", request.model, by=len(request.prompt_token_ids))
        return done


def charge_all(
    billing: Billing, answers: Sequence[Answer], tenant: str, failed: str = ""
) -> list[UsageCharge]:
    """Charge the work for each answer and return the charges. All work is waste if `failed`, the
    error code of a failed request, is set."""
    charges = []
    for answer in answers:
        streams = [*answer.copies, *answer.streams]
        work = [StreamUsage(x.member.info, x.report, x.cause) for x in streams]
        charges.append(billing.charge(work, tenant, failed))
    return charges

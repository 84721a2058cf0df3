"""Answers requests for virtual models, and passes on all others. Read this file first.

    choose ─► read for the model ─► prepare ─► serve ─► complete
      ▲                                          │
      └── another model: 429 or 503 before the first token, a prompt that does not fit, or an
          answer that was held back and did not pass its check

An answer comes from one model: another one begins from the beginning, before the client has
anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from pdserve.errors import (
    LIMITS_OF_TENANTS,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PdserveError,
    PermissionDenied,
    Refusal,
    ServiceError,
    Unavailable,
)
from pdserve.model.tokenizer import Conversation
from pdserve.types import ModelChoice
from router.dialects import prompts
from router.dialects.fields import refuse
from router.intake.image_prompts import ImagePrompt
from router.virtual.classifier import ModelClassifier, last_message
from router.virtual.forecast import Forecast
from router.virtual.held_answer import PASSED, HeldAnswer, HeldVerdict, check_of
from router.virtual.rules import ChosenModel, ModelFacts, RequestFacts, choose, wants_label

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from pdserve.config import EscalateConfig, RouterConfig, VirtualModelConfig
    from pdserve.types import GenerateRequest, Regions
    from router.attempt.answer import AnswerDelta, Generates, Out
    from router.intake.intake import Intake, Origin, ReadRequest
    from router.placement.decisions import DecisionLog
    from router.request_path import RequestPath
    from router.virtual.rules import ModelsRefused

    # Returns the receiver of the answer to these requests.
    Opens = Callable[[Sequence[GenerateRequest]], Out]

OVERRIDE_HEADER = "x-model-override"
_ESCALATED = "escalated"
# Another model would meet the same limit.
_NOT_OF_THE_MODEL = (*LIMITS_OF_TENANTS, Refusal.MEMORY)


class Prepared(Struct):
    """A request that is ready to be served. `made`: for its model, or for the last choice of its
    virtual model. `prompt_tokens`: of the longest prompt, by the tokenizer that read it first; 0
    with images. `choice`: what the receipt says. `cannot`, `busy`: the models that failed, with the
    reasons."""

    read: ReadRequest[Any]
    origin: Origin
    made: list[GenerateRequest]
    virtual: VirtualModelConfig | None = None
    prompt_tokens: int = 0
    choice: ModelChoice = ModelChoice()
    escalate: EscalateConfig | None = None
    label: str | None = None
    cannot: dict[str, str] = {}
    busy: dict[str, str] = {}


class ModelChooser:
    """Prepares and serves the requests of all APIs. `classifiers`: by virtual model. `count` is
    RouterMetrics.count."""

    def __init__(
        self,
        intake: Intake,
        generator: Generates,
        forecast: Forecast,
        classifiers: Mapping[str, ModelClassifier],
        decisions: DecisionLog,
        count: Callable[..., None],
    ) -> None:
        self._intake, self._generator = intake, generator
        self._forecast, self._classifiers = forecast, classifiers
        self._decisions, self._count = decisions, count

    def virtual_models(self) -> Iterator[tuple[str, int]]:
        """Yield the virtual models that have a model, with the smallest context of their models."""
        for name, virtual in self._intake.virtual_models.items():
            served = filter(self._intake.models.is_served, virtual.models)
            lengths = [self._intake.models.find(x)[0].max_model_len for x in served]
            if lengths:
                yield name, min(lengths)

    async def prepare(self, read: ReadRequest[Any], origin: Origin) -> Prepared:
        """Return a request that is ready to be served. Raises as Intake.prepare does, and as
        `serve` if its virtual model has no model for it."""
        if read.source is None:
            if origin.model_override:
                refuse(OVERRIDE_HEADER, "requires a virtual model as 'model'")
            return Prepared(read, origin, await self._intake.prepare(read, origin))
        _check(read)
        virtual = read.source.virtual
        lengths = [len(x) for x in read.prompts if not isinstance(x, ImagePrompt)]
        one = Prepared(read, origin, [], virtual, max(lengths, default=0))
        await self._choose(one)
        return one

    async def serve(self, one: Prepared, opened: Opens) -> None:
        """Write the answer to what `opened` returns. Raises as RequestServer.serve does, and
        PermissionDenied if the tenant may use none of the models."""
        if one.virtual is None:
            await self._serve(one.made, opened(one.made))
            return
        while True:
            out = _Chosen(one, opened)
            try:
                if one.escalate is None:
                    await self._serve(one.made, out)
                    return
                if await self._passes(one, one.escalate, out):
                    return
            except (Overloaded, Unavailable) as error:
                is_final = out.has_begun or one.choice.rule == _ESCALATED
                if is_final or error.reason in _NOT_OF_THE_MODEL:
                    raise
                one.busy[one.choice.model] = error.message
                await self._choose(one, error)

    async def _serve(self, made: Sequence[GenerateRequest], out: Out) -> None:
        if len(made) == 1:
            await self._generator.serve(made[0], out)
        else:
            await prompts.serve(self._generator, made, out)

    # -- Choices

    async def _choose(self, one: Prepared, error: PdserveError | None = None) -> None:
        """Choose a model and prepare the request for it. `error`: why the last model failed, which
        is raised if no other is left."""
        assert one.virtual is not None
        facts = await self._facts(one)
        while isinstance(found := choose(one.virtual, facts), ChosenModel):
            try:
                await self._use(one, found)
            except ContextLengthExceeded as failure:
                one.cannot[found.model], error = failure.message, error or failure
            except (Overloaded, Unavailable) as failure:
                if failure.reason in _NOT_OF_THE_MODEL:
                    raise
                one.busy[found.model], error = failure.message, failure
            else:
                return
            facts = await self._facts(one)
        raise error or _error_of(found, one)

    async def _use(self, one: Prepared, found: ChosenModel) -> None:
        """Prepare the request for the chosen model."""
        assert one.virtual is not None
        one.read = await self._intake.read_for(one.read, found.model, one.origin)
        one.made = await self._intake.prepare(one.read, one.origin)
        # What reading cost is given back once, by the first `prepare`.
        one.read = structs.replace(one.read, charge=nullcontext())
        one.escalate = found.escalate
        one.choice = structs.replace(
            one.choice,
            virtual_model=one.virtual.name,
            model=found.model,
            rule=found.rule,
            skipped=found.skipped,
        )
        self._count("model_choices", one.virtual.name, found.model, found.rule)
        chosen, request_id = self._decisions.chosen, one.origin.request_id
        chosen.keep(request_id, [*chosen.entries(request_id), one.choice])

    async def _facts(self, one: Prepared) -> RequestFacts:
        assert one.virtual is not None
        read, virtual, tenant = one.read, one.virtual, one.origin.tenant
        parsed, tokens = read.parsed[0], one.prompt_tokens
        regions = self._intake.regions_of(one.origin)
        has_images = any(isinstance(x, ImagePrompt) for x in read.prompts)
        facts = RequestFacts(
            prompt_tokens=tokens,
            models={
                x: self._model_facts(one, x, tokens, regions, has_images=has_images)
                for x in virtual.models
            },
            answers=len(read.parsed) * parsed.sampling.n,
            has_tools=isinstance(parsed.prompt, Conversation) and bool(parsed.prompt.tools),
            has_images=has_images,
            tenant=tenant,
            budget_left=self._intake.door.budget_left(tenant),
            allowed=self._intake.door.allowed_models(tenant),
            label=one.label,
            override=one.origin.model_override,
        )
        if one.label is None:
            one.label = ""
            text = last_message(read) if wants_label(virtual, facts) else ""
            if text:
                classifier = self._classifiers[virtual.name]
                one.label = await classifier.label(text, one.origin.request_id, regions)
        return structs.replace(facts, label=one.label)

    def _model_facts(
        self, one: Prepared, name: str, tokens: int, regions: Regions, *, has_images: bool
    ) -> ModelFacts:
        try:
            model, _ = self._intake.models.find(name)
        except (ModelNotFound, Unavailable) as error:
            return ModelFacts(busy=error.message)
        found = self._forecast.of(
            model,
            tokens,
            one.read.parsed[0].sampling.max_tokens,
            regions,
            has_images=has_images,
            starts=not self._intake.models.is_served(name),
        )
        return structs.replace(
            found,
            cannot=one.cannot.get(name, found.cannot),
            busy=one.busy.get(name, found.busy),
        )

    # -- Answers that are held back

    async def _passes(self, one: Prepared, escalate: EscalateConfig, out: _Chosen) -> bool:
        """Serve a request whose answer is held back. Return False if it did not pass; the request
        is then prepared for the other model."""
        (request,) = one.made
        check = check_of(escalate, one.read.parsed[0], request)
        hides = bool(escalate.min_mean_logprob) and request.sampling.logprobs is None
        if hides:
            sampling = dataclasses.replace(request.sampling, logprobs=0)
            request = structs.replace(request, sampling=sampling)
        held = HeldAnswer(check, out, hides_logprobs=hides)
        verdict = await self._verdict(request, held, escalate.timeout_s)
        if verdict is PASSED:
            return True
        self._discard(one, held, verdict)
        await self._use(one, ChosenModel(escalate.to, _ESCALATED, tuple(one.choice.skipped)))
        return False

    async def _verdict(
        self, request: GenerateRequest, held: HeldAnswer, timeout_s: float
    ) -> HeldVerdict:
        """Serve until the answer ends, or has not passed. Raises what `serve` raises, unless the
        client has nothing of the answer and another model may do better."""
        serving = asyncio.create_task(self._generator.serve(request, held))
        try:
            both = (serving, held.verdict)
            await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not (serving.done() or held.verdict.done()):
                held.verdict.set_result(HeldVerdict("timeout", f"held back for {timeout_s:g} s"))
            # An answer that has ended is charged in full.
            if serving.done() or held.passed or held.receipt is not None:
                await serving
            return held.verdict.result()
        except ServiceError as error:
            falls_over = isinstance(error, Overloaded | Unavailable | DeadlineExceeded)
            if held.passed or falls_over:
                raise
            return HeldVerdict(error.code, error.message)
        finally:
            if not serving.done():
                serving.cancel("the answer was held back, and did not pass")
                await asyncio.wait((serving,))
            if not serving.cancelled():
                serving.exception()  # asyncio logs an exception that nobody reads

    def _discard(self, one: Prepared, held: HeldAnswer, verdict: HeldVerdict) -> None:
        """Record an answer that did not pass, and what it cost."""
        assert one.virtual is not None
        tokens, receipt, (request,) = held.held.tokens, held.receipt, one.made
        tenant, model = request.tenant, request.model
        if receipt is not None:
            cost = receipt.cost
        else:
            cost = self._forecast.cost(model, len(request.prompt_token_ids), tokens)
            if tenant and cost:
                self._count("tenant_cost", tenant, by=cost)
        self._count("escalations", one.virtual.name, one.choice.model, verdict.code)
        one.choice = structs.replace(
            one.choice,
            discarded_model=one.choice.model,
            discarded_reason=verdict.text,
            discarded_tokens=tokens,
            discarded_cost=cost,
            discarded_cost_is_predicted=receipt is None and cost is not None,
        )


class _Chosen:
    """Out of a chosen model's answer. Opens the client's writer with the first delta, and puts the
    choice into the receipt."""

    def __init__(self, one: Prepared, opened: Opens) -> None:
        self._one, self._opened = one, opened
        self._out: Out | None = None

    @property
    def has_begun(self) -> bool:
        return self._out is not None

    def write(self, delta: AnswerDelta) -> bool:
        if self._out is None:
            self._out = self._opened(self._one.made)
        if delta.receipt is not None:
            delta.receipt.model_choice = self._one.choice
        return self._out.write(delta)


def _check(read: ReadRequest[Any]) -> None:
    """Raise InvalidRequest for a request that is bound to one model: ids of tokens differ between
    models."""
    for one in read.parsed:
        for field_name, is_set in (
            (one.prompt_field, isinstance(one.prompt, tuple)),
            ("resume_token_ids", one.resume),
            ("stop_token_ids", one.sampling.stop_token_ids),
            ("logit_bias", one.sampling.logit_bias),
        ):
            if is_set:
                refuse(field_name, "has token ids, which differ between models: name a model")


def _error_of(refused: ModelsRefused, one: Prepared) -> PdserveError:
    match refused.kind:
        case "not_listed":
            return InvalidRequest(refused.reason, field=OVERRIDE_HEADER)
        case "not_allowed":
            return PermissionDenied(refused.reason, field="model")
        case "unfit":
            return InvalidRequest(refused.reason, field=one.read.parsed[0].prompt_field)
        case "busy":
            return Unavailable(refused.reason, retry_after_s=1.0)


@asynccontextmanager
async def open_chooser(
    config: RouterConfig, path: RequestPath, intake: Intake
) -> AsyncIterator[ModelChooser]:
    """Open for the context what chooses models, with the classifiers of virtual models."""
    workers = path.workers
    forecast = Forecast(workers.fleet, path.costs, path.admission, workers.billing, path.peers)
    async with AsyncExitStack() as stack:
        classifiers = {}
        for virtual in config.virtual_models:
            if virtual.classifier.model:
                made = ModelClassifier(virtual.classifier, path.embedder, intake)
                classifiers[virtual.name] = made
                stack.push_async_callback(made.close)
        count = path.metrics.count
        yield ModelChooser(intake, path.server, forecast, classifiers, path.decisions, count)

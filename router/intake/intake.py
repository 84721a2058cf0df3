"""From the bytes of a call to requests, for every API. Read this file first.

    charge ─► read ─► parse ─► tokenise ─► guard ─► render ─► fit ─► GenerateRequest
              └ in the router, or in a child process

`read` charges the tenant for a body (charge.py), and has an executor read, parse and tokenise it
(executors.py, tokenise.py): a large body in a child process (body_processes.py, body_reader.py).
`checked` asks guards about the prompts (prompt_texts.py), and tokenises again what they replaced.
`prepare` has a worker render images (render_images.py), and fits length and sampling parameters to
the model (answer_length.py). Each stage returns a new value; none changes one that it was given.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from msgspec import Struct, structs

from pdserve.errors import (
    ContentFiltered,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    Refusal,
    Unavailable,
    UnsupportedField,
)
from pdserve.model.pixels import Pixels
from pdserve.model.tokenizer import Conversation
from pdserve.types import GenerateRequest, SamplingParams, ServiceClass
from router.dialects.fields import GenerateBody
from router.dialects.generation_rpc import GenerateMessage
from router.dialects.responses import NOTHING_EARLIER, Earlier, ResponsesRequest
from router.guardrails.guard import NO_GUARDS, GuardedText, GuardPlace, Subject, check_prompt
from router.intake.answer_length import fitted_sampling
from router.intake.charge import image_bytes
from router.intake.executors import InProcess, InRouter
from router.intake.image_prompts import ImagePrompt
from router.intake.prompt_texts import RESUMED, UNCHECKED, PromptTexts
from router.intake.tokenise import TokenisedBody  # noqa: TC001 - NamedTuple reads it
from router.placement.residency import ANYWHERE, cache_namespace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pdserve.config import VirtualModelConfig
    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import MediaItem, ModelInfo, Regions
    from router.admission import Door
    from router.dialects.fields import Body
    from router.dialects.parsed_request import ParsedRequest
    from router.fleet.served_models import ModelFinder
    from router.guardrails.guard import Guardrail, Guards
    from router.intake.answer_parsers import AnswerParsers
    from router.intake.body_processes import BodyProcesses
    from router.intake.executors import Executor, Kind
    from router.intake.render_images import Rendered
    from router.intake.tokenizers import Tokenizers
    from router.placement.residency import Residency
    from router.steps.ledger import Owner
    from router.store.responses import ResponseStore

B = TypeVar("B", bound=GenerateBody | GenerateMessage)
G = TypeVar("G", bound=GenerateBody)

NO_VIRTUAL_MODELS: Mapping[str, VirtualModelConfig] = MappingProxyType({})
# Refusals of a request that another model may accept.
_OF_THE_MODEL = (ContextLengthExceeded, ModelNotFound, UnsupportedField)
# Bytes of a body. The images in a smaller one are charged as text, which is little.
_MAY_HAVE_IMAGES = 4096
# W3C Trace Context. Later versions may have more fields.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{0,256})?")


class Origin(Struct, frozen=True):
    """The client, and the parameters of the call outside its body. `session`, `service_class` and
    `timeout_s` take precedence over the body if they are set. `inference_geo`: the region that the
    call or its body names, or "". `model_override`: the model that the call names in place of a
    virtual model's choice, or ""."""

    request_id: str
    tenant: str
    session: str = ""
    traceparent: str = ""
    inference_geo: str = ""
    model_override: str = ""
    service_class: ServiceClass | None = None
    timeout_s: float | None = None


class Unchecked(NamedTuple):
    """Texts that `guards` have not checked yet. `tokenise` reads and tokenises the body again."""

    guards: Sequence[Guardrail]
    pieces: Sequence[tuple[str, str]]
    model: str
    tokenise: Callable[[PromptTexts], Awaitable[TokenisedBody]]


class Source(NamedTuple):
    """A body that can be read again for another model of its virtual model. `texts`: changed by
    guards. `has_prompt`: the parsed body has the text of its prompt, which a child process
    removes."""

    virtual: VirtualModelConfig
    guards: Sequence[Guardrail]
    tokenise: Callable[[ModelInfo, PromptTexts], Awaitable[TokenisedBody]]
    texts: PromptTexts
    has_prompt: bool


class ReadRequest(Struct, Generic[B], frozen=True, eq=False):
    """A body that was read at the loop time `began`, with its prompts. `charge` gives back what
    reading it cost, once it is prepared. `unchecked`: None if no guard checks its prompts.
    `source`: of a request for a virtual model, which was read for `model`."""

    body: B
    parsed: Sequence[ParsedRequest]
    prompts: Sequence[Sequence[int] | ImagePrompt]
    charge: AbstractContextManager[object]
    began: float
    unchecked: Unchecked | None = None
    source: Source | None = None
    model: ModelInfo | None = None


class Intake:
    """Reads bodies and prepares requests."""

    def __init__(
        self,
        door: Door,
        models: ModelFinder,
        tokenizers: Tokenizers,
        processes: BodyProcesses,
        parsers: AnswerParsers,
        *,
        render: Callable[[ImagePrompt, ModelInfo, float, Regions, Owner], Awaitable[Rendered]],
        residency: Residency = ANYWHERE,
        responses: ResponseStore | None = None,
        guards: Guards = NO_GUARDS,
        virtual_models: Mapping[str, VirtualModelConfig] = NO_VIRTUAL_MODELS,
        timeout_s: float,
    ) -> None:
        """`door` charges tenants, `processes` read large bodies, `residency` says where data may
        be, `responses` has the stored conversations, None if no API continues them. `guards` check
        prompts. `render` is as ImageRenderer.render. `virtual_models`: by name. `timeout_s`: of a
        request, and the longest it may set."""
        self.door, self.models, self._tokenizers = door, models, tokenizers
        self._in_router = InRouter(tokenizers)
        self._in_process = InProcess(processes, tokenizers, self._in_router)
        self._large_bytes = processes.larger_than
        self._parsers, self._render, self._responses = parsers, render, responses
        self.residency, self.virtual_models = residency, virtual_models
        self._guards, self._timeout_s = guards or None, timeout_s
        self._now = asyncio.get_running_loop().time

    def close(self) -> None:
        """End the threads."""
        self._in_router.close()

    # The stages, for the APIs whose bodies do not generate.

    def charge(self, tenant: str, data: bytes, requests: int = 0) -> AbstractContextManager[object]:
        """Charge a JSON body. Raises Overloaded. `requests` and the result: see Door.charge."""
        images = image_bytes(data) if len(data) > _MAY_HAVE_IMAGES else 0
        return self.door.charge(tenant, len(data), requests, images=images)

    async def names(self, kind: type[Body], data: bytes) -> Any:
        """Return a body with the fields of Names, or the whole body. Raises InvalidRequest."""
        return await self._executor(len(data)).names(kind, data)

    async def tokenise(
        self,
        kind: Kind,
        data: bytes,
        names: Body | GenerateMessage,
        model: ModelInfo,
        tenant: str,
    ) -> TokenisedBody:
        """Return the whole body, tokenised. Raises InvalidRequest naming the field, Overloaded if
        too many bytes wait, and NoTokenizer."""
        executor = self._executor(len(data))
        return await executor.tokenise(kind, data, names, model, tenant, NOTHING_EARLIER)

    async def find_model(self, name: str | None, timeout_s: float | None = None) -> ModelInfo:
        """Return the model with this name, or of this adapter, once it has workers. For a virtual
        model, return the model that counts the tokens of its prompts."""
        if virtual := self.virtual_models.get(name or ""):
            name = next(filter(self.models.is_served, virtual.models), virtual.default)
        return await self.models.find_when_ready(name or "", self._limited(timeout_s))

    def check_allowed(self, tenant: str, name: str | None, model: ModelInfo) -> None:
        """Raise PermissionDenied if the tenant may not use `model`, which `name` names, or the
        adapter with this name."""
        if (allowed := self.door.allowed_models(tenant)) is None:
            return
        names = model.names if name in (None, "", *model.names) else (name,)
        if allowed.isdisjoint(names):
            text = f"tenant {tenant} may not use model {name or model.name}"
            raise PermissionDenied(text, field="model")

    async def render(
        self, prompt: ImagePrompt, model: ModelInfo, regions: Regions, tenant: str
    ) -> Rendered:
        """Return a rendered prompt. Raises as ImageRenderer.render."""
        until = self._now() + self._timeout_s
        return await self._render(prompt, model, until, regions, (tenant, ""))

    async def tokenizer(self, model: ModelInfo) -> Tokenizer:
        """Return the model's tokenizer. Raises NoTokenizer if it cannot be loaded."""
        return await self._tokenizers.get(model)

    def remarks(self) -> list[tuple[str, str]]:
        """Return what limits the tool calls of models, by model."""
        return self._parsers.remarks(self.models.models().values())

    async def text(self, token_ids: Sequence[int], model: ModelInfo) -> str:
        """Return the text of token ids."""
        tokenizer = await self._tokenizers.get(model)
        work = partial(tokenizer.decode, token_ids)
        return await self._in_router.run(len(token_ids), work)

    # The steps of each request that generates.

    async def read(
        self, kind: type[G], data: bytes, tenant: str, timeout_s: float | None = None
    ) -> ReadRequest[G]:
        """Charge and read the JSON body of a request. Raises Overloaded, ModelNotFound,
        Unavailable, and InvalidRequest naming the field."""
        charged, began = self.charge(tenant, data), self._now()
        names = await self._executor(len(data)).names(kind, data)
        return await self._read(kind, data, names, tenant, timeout_s, charged, began)

    async def read_message(
        self, body: GenerateMessage, tenant: str, timeout_s: float | None
    ) -> ReadRequest[GenerateMessage]:
        """Charge and read the message of an RPC. Raises as `read`."""
        data, began = body.encoded(), self._now()
        charged = self.door.charge(tenant, len(data), images=body.image_bytes)
        return await self._read(type(body), data, body, tenant, timeout_s, charged, began)

    async def _read(
        self,
        kind: Kind,
        data: bytes,
        names: Any,
        tenant: str,
        timeout_s: float | None,
        charged: AbstractContextManager[object],
        began: float,
    ) -> ReadRequest[Any]:
        earlier = NOTHING_EARLIER
        if issubclass(kind, ResponsesRequest):
            earlier = await self._earlier(names.previous_response_id, tenant)
        executor = self._executor(len(data) + len(earlier.items))

        def tokenise(model: ModelInfo, texts: PromptTexts = UNCHECKED) -> Awaitable[TokenisedBody]:
            return executor.tokenise(kind, data, names, model, tenant, earlier, texts)

        guards: Sequence[Guardrail] = ()
        if virtual := self.virtual_models.get(names.model or ""):
            if self._guards is not None:
                guards = self._guards.of(GuardPlace.PROMPT, tenant, (virtual.name, *virtual.models))
            texts = PromptTexts(wanted=bool(guards))
            source = Source(virtual, guards, tokenise, texts, executor is self._in_router)
            read = await self._read_for_any(source, timeout_s)
            return structs.replace(read, charge=charged, began=began)
        model = await self.models.find_when_ready(names.model or "", self._limited(timeout_s))
        self.check_allowed(tenant, names.model, model)
        if self._guards is not None:
            guards = self._guards.of(GuardPlace.PROMPT, tenant, (model.name, names.model))
        if not guards:
            done = await tokenise(model)
            return ReadRequest(done.body, done.parsed, done.prompts, charged, began)
        done = await tokenise(model, PromptTexts(wanted=True))
        name = names.model or model.name
        unchecked = Unchecked(guards, done.pieces, name, partial(tokenise, model))
        return ReadRequest(done.body, done.parsed, done.prompts, charged, began, unchecked)

    async def _read_for_any(self, source: Source, timeout_s: float | None) -> ReadRequest[Any]:
        """Read a request for the first model of a virtual one that can read it, so that the rules
        know the prompt. Raises as `read`."""
        last, virtual = None, source.virtual
        for name in filter(self.models.is_served, virtual.models):
            try:
                return await self._read_for(source, name)
            except (Unavailable, *_OF_THE_MODEL) as error:
                last = error
        if last is not None:
            raise last
        try:
            await self.models.find_when_ready(virtual.default, self._limited(timeout_s))
        except ModelNotFound:
            text = f"no model of {virtual.name} has a worker: {', '.join(virtual.models)}"
            raise Unavailable(text, retry_after_s=1.0) from None
        return await self._read_for(source, virtual.default)

    async def _read_for(self, source: Source, name: str) -> ReadRequest[Any]:
        model, _ = self.models.find(name)
        done = await source.tokenise(model, source.texts)
        parsed, unchecked = [structs.replace(x, model=name) for x in done.parsed], None
        if source.guards and source.texts.wanted:
            tokenise = partial(source.tokenise, model)
            unchecked = Unchecked(source.guards, done.pieces, source.virtual.name, tokenise)
        return ReadRequest(
            done.body, parsed, done.prompts, nullcontext(), 0.0, unchecked, source, model
        )

    async def read_for(self, read: ReadRequest[Any], name: str, origin: Origin) -> ReadRequest[Any]:
        """Read a request for a virtual model for its model `name`. Raises as `read`."""
        assert read.source is not None, "the request is for a virtual model"
        left_s = read.began + self._limited(origin.timeout_s) - self._now()
        model = await self.models.find_when_ready(name, left_s)
        if read.model is not None and _reads_alike(read.model, model):
            parsed = [structs.replace(x, model=name) for x in read.parsed]
            return structs.replace(read, parsed=parsed, model=model)
        found = await self._read_for(read.source, name)
        return structs.replace(found, charge=read.charge, began=read.began)

    def _executor(self, size: int) -> Executor:
        return self._in_process if size > self._large_bytes else self._in_router

    async def _earlier(self, previous: str | None, tenant: str) -> Earlier:
        """Return the conversation that ends with the response `previous`. Raises InvalidRequest if
        it is not stored."""
        if previous is None:
            return NOTHING_EARLIER
        assert self._responses is not None
        found = await self._responses.items(previous, tenant)
        if found is None:
            field = "previous_response_id"
            raise InvalidRequest(f"'{field}': no response {previous!r} is stored", field=field)
        return Earlier(*found)

    async def checked(self, read: ReadRequest[B], origin: Origin) -> ReadRequest[B]:
        """Return a body as guards let it pass. Raises ContentFiltered naming the field if one
        refuses it, and Unavailable if one fails.

        Not before the body is tokenised, because a call that gets a recorded answer needs no
        verdict, and most prompts pass."""
        if (unchecked := read.unchecked) is None:
            return read
        regions = self.regions_of(origin)
        subject = Subject(
            GuardPlace.PROMPT, origin.request_id, origin.tenant, unchecked.model, regions
        )
        pieces = [GuardedText(*x) for x in unchecked.pieces]
        field = read.parsed[0].prompt_field
        changes = await check_prompt(unchecked.guards, subject, pieces, field)
        if any(x.kind == RESUMED and x.text in changes for x in pieces):
            text = "'resume_token_ids' has text that guards replace"
            raise ContentFiltered(text, field="resume_token_ids", reason=Refusal.GUARD)
        done: TokenisedBody | ReadRequest[B] = read
        texts = PromptTexts(changes=changes) if changes else UNCHECKED
        if changes:
            done = await unchecked.tokenise(texts)
        parsed, source = done.parsed, read.source
        if source is not None:
            # Another model gets the changed texts, too.
            source = source._replace(texts=texts)
            parsed = [structs.replace(x, model=read.parsed[0].model) for x in parsed]
        return structs.replace(
            read,
            body=done.body,
            parsed=parsed,
            prompts=done.prompts,
            unchecked=None,
            source=source,
        )

    async def prepare(self, read: ReadRequest[Any], origin: Origin) -> list[GenerateRequest]:
        """Return a request for each prompt of a body that is `checked`. Raises ClientError naming
        the field, and Unavailable without a worker that renders images."""
        assert read.unchecked is None, "guards come before"
        until = read.began + self._limited(origin.timeout_s)
        with read.charge:
            if len(read.parsed) == 1:
                return [await self._prepare(read.parsed[0], read.prompts[0], origin, until)]
            one_id = origin.request_id
            origins = [
                structs.replace(origin, request_id=f"{one_id}-{i}") for i in range(len(read.parsed))
            ]
            parts = zip(read.parsed, read.prompts, origins, strict=True)
            return [await self._prepare(*part, until) for part in parts]

    async def _prepare(
        self,
        parsed: ParsedRequest,
        prompt: Sequence[int] | ImagePrompt,
        origin: Origin,
        until: float,
    ) -> GenerateRequest:
        render_s, parsing = 0.0, None
        regions = self.regions_of(origin)
        rendered: tuple[MediaItem, ...] = ()
        if isinstance(prompt, ImagePrompt):
            model, _ = self.models.find(parsed.model)
            began = self._now()
            owner = origin.tenant, origin.request_id
            prompt, rendered = await self._render(prompt, model, until, regions, owner)
            render_s = self._now() - began
        # Found again: the adapter may have been unloaded or replaced meanwhile.
        model, adapter = self.models.find(parsed.model)
        resume_text = ""
        if parsed.resume and self._guards is not None:
            resume_text = await self.text(parsed.resume, model)
        sampling = fitted_sampling(parsed, len(prompt), model)
        if isinstance(parsed.prompt, Conversation):
            parsing = await self._parsers.choose(parsed, parsed.prompt, model, prompt)
            if parsing is not None and sampling.skip_special_tokens:
                # The markup of tool calls and reasoning may consist of special tokens.
                sampling = replace(sampling, skip_special_tokens=False)
        if (salt := parsed.cache_salt) or regions is not None:
            salt = cache_namespace(regions, salt)
        own_session = origin.request_id if parsed.starts_session else ""
        return GenerateRequest(
            request_id=origin.request_id,
            model=model.name,
            prompt_token_ids=prompt,
            sampling=sampling,
            resume=parsed.resume,
            resume_text=resume_text,
            deadline=until,
            priority=parsed.priority,
            service_class=origin.service_class or parsed.service_class,
            tenant=origin.tenant,
            traceparent=_valid_traceparent(origin.traceparent),
            adapter=adapter,
            cache_salt=salt,
            stale_kv=parsed.stale_kv,
            parsing=parsing,
            media=tuple([x.without_data() for x in rendered]),
            pixels=Pixels(rendered) if rendered else None,
            render_s=render_s,
            session=origin.session or parsed.session or own_session,
            regions=regions,
            storage=self.residency.storage_of(origin.tenant),
        )

    def embedding_request(
        self, tokens: Sequence[int], second_text_at: int, model: ModelInfo, origin: Origin
    ) -> GenerateRequest:
        """Return a request for the embedding of a prompt, or the score of a pair."""
        return GenerateRequest(
            request_id=origin.request_id,
            model=model.name,
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=1),
            deadline=self._now() + (origin.timeout_s or self._timeout_s),
            service_class=origin.service_class or ServiceClass.INTERACTIVE,
            tenant=origin.tenant,
            second_text_at=second_text_at,
            regions=self.regions_of(origin),
        )

    def regions_of(self, origin: Origin) -> Regions:
        """Return where data of a request may be. Raises InvalidRequest."""
        # Looked at here, because most services have no rules.
        rules, tenant, geo = self.residency, origin.tenant, origin.inference_geo
        return rules.regions_of(tenant, geo) if geo or tenant in rules.tenants else None

    def _limited(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)


def _reads_alike(a: ModelInfo, b: ModelInfo) -> bool:
    """Return True if a body that was read for one of the models is valid for the other."""
    return bool(a.tokenizer) and all(
        getattr(a, x) == getattr(b, x)
        for x in ("tokenizer", "max_model_len", "vocab_size", "modalities")
    )


def _valid_traceparent(given: str) -> str:
    """Return a client's `traceparent`, or "" if it is not valid: W3C has such headers ignored, and
    bytes that are no text could not be sent to workers."""
    return given if given and _TRACEPARENT.fullmatch(given) else ""

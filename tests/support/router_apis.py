"""A scripted generator, the two APIs in front of it, and a client for tests."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from pdserve.config import ParsersConfig, SloConfig
from pdserve.errors import Cancelled, PdserveError
from pdserve.types import Adapter, FinishReason, MediaItem, ModelInfo, Receipt, Usage
from pdserve.v1 import generation_pb2 as g
from pdserve.v1 import worker_pb2 as w
from router.admission import Door, Tenants
from router.attempt.answer import AnswerDelta
from router.dialects.generation_rpc import GenerateMessage
from router.fleet.served_models import ModelFinder
from router.guardrails.guard import NO_GUARDS
from router.intake.answer_parsers import AnswerParsers
from router.intake.body_processes import BodyProcesses
from router.intake.intake import NO_VIRTUAL_MODELS, Intake, Origin, ReadRequest
from router.intake.render_images import Rendered
from router.intake.tokenizers import Tokenizers
from router.metrics import RouterMetrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    import aiohttp

    from pdserve.client import Client
    from pdserve.config import VirtualModelConfig
    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import GenerateRequest, Regions
    from router.api.open_requests import OpenRequests
    from router.attempt.answer import Out
    from router.dialects.parsed_request import ParsedRequest
    from router.guardrails.guard import Guards
    from router.intake.image_prompts import ImagePrompt
    from router.steps.ledger import Owner
    from router.steps.log import RequestLog
    from router.store.responses import ResponseStore

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
MODEL = "demo"
CORS_ORIGIN = "https://chat.example"
JSON = {"content-type": "application/json"}
MAX_MODEL_LEN = 64
VOCAB_SIZE = 300
MAX_BODY_BYTES = 64 * 1024
# The deadline of requests without one.
TIMEOUT_S = 30.0
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.reasoning_content }}"
    "{{ message.content }}{% endfor %}{{ style }}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RECEIPT = Receipt(
    prefill_s=0.25,
    transfer_bytes=4096,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    first_token_source="prefill",
)
ANSWER = (
    AnswerDelta(token_ids=(10,), text="Leaves"),
    AnswerDelta(token_ids=(11, 12), text=' turn "réd"\n'),
    AnswerDelta(
        token_ids=(13,),
        text=".",
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=7, completion_tokens=4, cached_tokens=2),
        receipt=RECEIPT,
    ),
)
ANSWER_TEXT = 'Leaves turn "réd"\n.'


async def no_images(*_: object) -> Rendered:
    raise AssertionError("the test has no images")


def make_intake(
    models: Callable[[], Mapping[str, ModelInfo]],
    load: Callable[[ModelInfo], Coroutine[Any, Any, Tokenizer]],
    adapters: Callable[[], Mapping[str, Adapter]] = dict,
    *,
    parsers: ParsersConfig | None = None,
    processes: BodyProcesses | None = None,
    door: Door | None = None,
    render: Callable[
        [ImagePrompt, ModelInfo, float, Regions, Owner], Awaitable[Rendered]
    ] = no_images,
    responses: ResponseStore | None = None,
    guards: Guards = NO_GUARDS,
    virtual_models: Mapping[str, VirtualModelConfig] = NO_VIRTUAL_MODELS,
    timeout_s: float = TIMEOUT_S,
) -> Intake:
    """Return an intake as a router has it."""
    tokenizers, metrics = Tokenizers(models, load), RouterMetrics(SloConfig())
    return Intake(
        door or Door(Tenants(), lambda: 0.0, metrics.refused),
        ModelFinder(models, adapters),
        tokenizers,
        processes or BodyProcesses(metrics),
        AnswerParsers(tokenizers, parsers or ParsersConfig()),
        render=render,
        responses=responses,
        guards=guards,
        virtual_models=virtual_models,
        timeout_s=timeout_s,
    )


class ParsedBody(GenerateMessage):
    """A body that parses to one request."""

    def __init__(self, parsed: ParsedRequest) -> None:
        super().__init__(g.GenerateRequest())
        self._parsed = parsed

    def parse(self) -> list[ParsedRequest]:
        return [self._parsed]


async def prepare(
    intake: Intake, parsed: ParsedRequest, data: bytes = b"", traceparent: str = ""
) -> GenerateRequest:
    """Take in a parsed request whose body was `data`."""
    body: Any = ParsedBody(parsed)
    model = await intake.find_model(parsed.model)
    done = await intake.tokenise(type(body), data, body, model, "")
    began = asyncio.get_running_loop().time()
    read: ReadRequest[Any] = ReadRequest(body, done.parsed, done.prompts, nullcontext(), began)
    (made,) = await intake.prepare(read, Origin("r", "", traceparent=traceparent))
    return made


@dataclass
class FakeRenderer:
    """Renders each prompt to IMAGE_TOKENS and an item for each image. `prompts`: what was asked."""

    prompts: list[w.RenderRequest] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    async def __call__(
        self, prompt: ImagePrompt, model: ModelInfo, until: float, regions: Regions, owner: Owner
    ) -> Rendered:
        request = w.RenderRequest.FromString(prompt.request)
        self.prompts.append(request)
        self.urls += prompt.urls.values()
        count = len(request.images)
        items = [MediaItem("image", f"h{i}", 2 * i, 2, data=b"pixels") for i in range(count)]
        return Rendered((9,) * 2 * count, tuple(items))


class Hold(Enum):
    """A script item that never arrives."""

    FOR_EVER = auto()


Item = AnswerDelta | PdserveError | asyncio.Event | Hold


@dataclass
class ScriptedGenerator:
    """A generator with a script. For the test, `waiting` is set when an answer reaches an event or
    a hold of its script, and `left` when a client has left an answer."""

    served: dict[str, ModelInfo]
    loaded: dict[str, Adapter] = field(default_factory=dict)
    script: tuple[Item, ...] = ANSWER
    refusal: PdserveError | None = None
    not_ready: PdserveError | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    open_requests: int = 0

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        items = deque(self.script)
        try:
            while items:
                await self._perform(items.popleft(), out)
        finally:
            self.left.set()

    async def _perform(self, item: Item, out: Out) -> None:
        match item:
            case AnswerDelta():
                if not out.write(item):
                    raise Cancelled("the client does not read its answer")
                await asyncio.sleep(0)
            case PdserveError():
                raise item
            case Hold():
                self.waiting.set()
                await asyncio.Event().wait()
            case _:
                self.waiting.set()
                await item.wait()

    def models(self) -> Mapping[str, ModelInfo]:
        return self.served

    def adapters(self) -> Mapping[str, Adapter]:
        return self.loaded

    async def load(self, name: str, path: str, *, model: str, replace: bool) -> None:
        """Load an adapter, in place of the router's Adapters."""
        self.loaded[name] = Adapter(name, "d1", path, model or MODEL)

    async def unload(self, name: str) -> None:
        del self.loaded[name]

    def check_ready(self) -> None:
        if self.not_ready is not None:
            raise self.not_ready


@dataclass(frozen=True, slots=True)
class RouterApis:
    """The addresses of the APIs and the objects behind them."""

    url: str
    host: str
    port: int
    grpc_address: str
    generator: ScriptedGenerator
    open_requests: OpenRequests
    metrics: RouterMetrics
    log: RequestLog
    session: aiohttp.ClientSession
    client: Client

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Post a body and return status and JSON of the answer. Bytes are sent unchanged."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = JSON | (headers or {})
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, body: object) -> str:
        """Post a body, assert status 200, and return the whole event stream."""
        data = json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=JSON) as response:
            assert response.status == 200, await response.text()
            return (await response.read()).decode()


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": HELLO, **changes}


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi", **changes}


def events(text: str) -> list[Any]:
    """Return the JSON of each event; DONE stays text."""
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [x if x == "[DONE]" else json.loads(x) for x in data]

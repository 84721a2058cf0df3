"""A scripted generator, the two APIs in front of it, and a client for tests."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from pdserve.errors import Cancelled, PdserveError
from pdserve.types import Adapter, FinishReason, MediaItem, ModelInfo, Receipt, Usage
from pdserve.v1 import worker_pb2 as w
from router.operations.rendering import Rendered
from router.request.answer import AnswerDelta

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from pdserve.client import Client
    from pdserve.types import GenerateRequest
    from router.api.open_requests import OpenRequests
    from router.operations.rendering import ImagePrompt
    from router.request.answer import Out

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


@dataclass
class FakeRenderer:
    """Renders each prompt to IMAGE_TOKENS and an item for each image. `prompts`: what was asked."""

    prompts: list[w.RenderRequest] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    async def __call__(self, prompt: ImagePrompt, model: ModelInfo, until: float) -> Rendered:
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

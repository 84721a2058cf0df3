"""An OpenAI-compatible endpoint, as a client sees it: chat completions, models and metrics."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from pdserve.errors import printable

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable

    Body = dict[str, Any]

_T = TypeVar("_T")
CONNECT_TIMEOUT_S = 10.0
ANSWER_TOKENS = 32
TOP_LOGPROBS = 5


class Refused(Exception):
    """The endpoint answered with a status from 400 to 499."""

    def __init__(self, request: Body, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.request, self.status, self.message = request, status, message


class Broken(Exception):
    """The endpoint violated HTTP or OpenAI's API: status 500 or above, a closed connection, an
    unreadable body, or an error in the middle of a stream."""

    def __init__(self, request: Body, what: str) -> None:
        super().__init__(what)
        self.request = request


@dataclass(slots=True)
class EndpointChoice:
    """One of the answers to a request. `scores`: OpenAI's logprobs, an entry a token."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tool_calls: dict[int, dict[str, str]] = field(default_factory=dict)
    scores: list[Body] = field(default_factory=list)

    def add(self, message: Body, found: Body) -> None:
        """Add a message, or a delta of one, from the choice `found`."""
        self.text += message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
        self.finish_reason = found.get("finish_reason") or self.finish_reason
        self.scores += (found.get("logprobs") or {}).get("content") or []
        for position, call in enumerate(message.get("tool_calls") or []):
            known = self.tool_calls.setdefault(
                call.get("index", position), {"name": "", "arguments": ""}
            )
            for name in known:
                known[name] += (call.get("function") or {}).get(name) or ""


@dataclass(slots=True)
class EndpointAnswer:
    """The answer to one request."""

    request: Body
    choices: dict[int, EndpointChoice] = field(default_factory=lambda: defaultdict(EndpointChoice))
    usage: Body | None = None
    receipt: Body | None = None

    @property
    def first(self) -> EndpointChoice:
        return self.choices[0]

    @property
    def text(self) -> str:
        """All text of the first answer, its reasoning first."""
        return self.first.reasoning + self.first.text

    def add(self, found: Body) -> None:
        """Add a body, or a chunk of a stream."""
        for choice in found.get("choices") or []:
            message = choice.get("message") or choice.get("delta") or {}
            self.choices[choice.get("index", 0)].add(message, choice)
        self.usage = found.get("usage") or self.usage
        self.receipt = (found.get("pdserve") or {}).get("receipt") or self.receipt

    def shown(self) -> Body:
        """Return request and answer for a report."""
        choices = [
            {
                name: value
                for name in EndpointChoice.__slots__
                if (value := getattr(choice, name)) or name == "text"
            }
            for _, choice in sorted(self.choices.items())
        ]
        return {"request": self.request, "choices": choices, "usage": self.usage}


class Endpoint:
    """The API below `url`, such as http://host:8000 or https://host/v1. `concurrency`: most
    requests at once. `timeout_s`: limit of each check. `is_claimed`: its owner claims that it
    separates prefill and decode. `weights`: a checkpoint that its model may be updated to, or "".
    `open`: unfinished requests."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        model: str = "",
        concurrency: int = 8,
        timeout_s: float = 60.0,
        is_claimed: bool = False,
        weights: str = "",
    ) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self.model, self.concurrency, self.timeout_s = model, concurrency, timeout_s
        self.is_claimed, self.weights = is_claimed, weights
        self.max_model_len: int | None = None
        self.has_logprobs = False
        self.open: list[Body] = []
        self.last: EndpointAnswer | None = None
        self._session = session
        self._limit = "max_tokens"

    @staticmethod
    @asynccontextmanager
    async def connect(
        url: str, *, key: str, tls: ssl.SSLContext | bool, **options: Any
    ) -> AsyncIterator[Endpoint]:
        """Yield the endpoint. Checks have deadlines; requests do not."""
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        ) as session:
            yield Endpoint(url, session, **options)

    async def discover(self) -> None:
        """Find the model, its context length, and the optional fields that the endpoint accepts.
        Raises Refused or Broken if it does not answer a plain question."""
        try:
            listed = (await self.call("/v1/models")).get("data") or []
        except Refused:
            if not self.model:
                raise
            listed = []
        self.model = self.model or (printable(listed[0]["id"]) if listed else "")
        for entry in listed:
            if entry.get("id") == self.model:
                self.max_model_len = entry.get("max_model_len")
        try:
            await self.ask("Hello", max_tokens=1)
        except Refused as error:
            if "max_completion_tokens" not in error.message:
                raise
            self._limit = "max_completion_tokens"
            await self.ask("Hello", max_tokens=1)
        try:
            self.has_logprobs = bool((await self.scored("Hello", max_tokens=4)).first.scores)
        except (Refused, Broken):
            self.has_logprobs = False

    def body(self, content: str | list[Body], **fields: Any) -> Body:
        """Return the body of a request: greedy, at most ANSWER_TOKENS, unless `fields` override
        it."""
        limit = fields.pop("max_tokens", ANSWER_TOKENS)
        message = {"role": "user", "content": content}
        body: Body = {"model": self.model, "messages": [message], "temperature": 0}
        body |= {self._limit: limit, **fields}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return body

    async def ask(self, content: str | list[Body], **fields: Any) -> EndpointAnswer:
        """Return the answer to one user message. Raises Refused or Broken."""
        return await self.send(self.body(content, **fields))

    async def scored(self, content: str | list[Body], **fields: Any) -> EndpointAnswer:
        """Return the answer with the logprobs of its tokens and of TOP_LOGPROBS others."""
        return await self.ask(content, logprobs=True, top_logprobs=TOP_LOGPROBS, **fields)

    async def send(self, body: Body) -> EndpointAnswer:
        self.last = answer = EndpointAnswer(body)
        async for found in self.chunks(body):
            answer.add(found)
        return answer

    async def at_once(self, bodies: list[Body]) -> list[EndpointAnswer]:
        """Send requests, at most `concurrency` at a time. Return answers in the same order."""
        free = asyncio.Semaphore(self.concurrency)

        async def send(body: Body) -> EndpointAnswer:
            async with free:
                return await self.send(body)

        return await together(send(body) for body in bodies)

    async def chunks(self, body: Body) -> AsyncGenerator[Body, None]:
        """Yield the chunks of a stream, or the one body. Closing this early drops the connection.
        Raises Refused or Broken."""
        self.open.append(body)
        try:
            url = f"{self.root}/v1/chat/completions"
            async with self._session.post(url, json=body) as response:
                await _check(body, response)
                if not body.get("stream"):
                    yield _object(body, await response.read())
                    return
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    yield _object(body, data)
                raise Broken(body, "the stream ended without [DONE]")
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise Broken(body, f"{type(error).__name__}: {error}") from error
        finally:
            self.open.remove(body)

    async def metrics(self) -> dict[str, float]:
        """Return the sums of all samples of /metrics with a name, and with a name and one label
        such as name{role="prefill"}. Empty if there are none."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = defaultdict(float)
        try:
            async with self._session.get(f"{self.root}/metrics") as response:
                text = await response.text() if response.status == 200 else ""
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found[sample.name] += sample.value
                    for label, value in sample.labels.items():
                        found[f'{sample.name}{{{label}="{value}"}}'] += sample.value
        except (aiohttp.ClientError, ValueError, OSError):
            return {}
        return found

    async def call(self, path: str, body: Body | None = None) -> Body:
        """Return the answer to a GET, or with a `body` to a POST. Raises Refused or Broken."""
        method = "GET" if body is None else "POST"
        asked = {method: path}
        try:
            url = self.root + path
            async with self._session.request(method, url, json=body) as response:
                await _check(asked, response)
                return _object(asked, await response.read())
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise Broken(asked, f"{self.root}{path}: {error or type(error).__name__}") from error


async def together(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines and return their results. Cancel the others and raise if one raises."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _check(request: Body, response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = await response.text()
    try:
        error = json.loads(text)
        error = error.get("error", error)
        message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        message = text[:500]
    if response.status >= 500:
        raise Broken(request, f"HTTP {response.status}: {printable(message)}")
    raise Refused(request, response.status, printable(message))


def _object(request: Body, data: bytes) -> Body:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise Broken(request, f"expected a JSON object, not {data[:80]!r}")
    if found.get("error"):
        raise Broken(request, f"an error with HTTP 200: {found['error']}")
    return found

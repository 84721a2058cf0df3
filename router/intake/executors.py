"""Where bodies are read and tokenised. Both executors do the same (tokenise.py): small bodies are
read in the router, and large ones in a child process, because that would delay the tokens of all
streams by seconds: neither JSON decoding nor a chat template releases the GIL."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from pdserve.model.token_cache import TokenCache
from pdserve.model.token_ids import TokenIds
from router.dialects.embeddings import PoolingBody
from router.dialects.fields import Body, GenerateBody, Names
from router.dialects.generation_rpc import GenerateMessage
from router.dialects.responses import Earlier, ResponsesRequest
from router.intake.prompt_texts import UNCHECKED, with_changes
from router.intake.tokenise import Inputs, NoTokenizer, TokenisedBody, tokenise_body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.types import ModelInfo
    from router.intake.body_processes import BodyProcesses, Done
    from router.intake.prompt_texts import PromptTexts
    from router.intake.tokenizers import Tokenizers

T = TypeVar("T")
Kind = type[Body] | type[GenerateMessage]

# Longer bodies are tokenised in a thread, so that they do not delay the tokens of other streams.
INLINE_BYTES = 2048
_THREADS = 2
# Token ids of the conversations that are tokenised in the router: bodies of up to 64 KiB.
TOKEN_CACHE_BYTES = 16 << 20
# Bodies whose names are read in much less time than it takes to wake a thread.
_QUICK_BYTES = 512 << 10


class Executor(Protocol):
    """Reads bodies in two steps, because a conversation that is stored must be found between
    them."""

    async def names(self, kind: type[Body], data: bytes) -> Body:
        """Return a body with the fields of Names. Raises InvalidRequest."""
        ...

    async def tokenise(
        self,
        kind: Kind,
        data: bytes,
        body: Body | GenerateMessage,
        model: ModelInfo,
        tenant: str,
        earlier: Earlier,
        texts: PromptTexts = UNCHECKED,
    ) -> TokenisedBody:
        """Return the whole body, tokenised. `body`: from `names`. Raises as `tokenise_body`."""
        ...


class InRouter:
    """Tokenises bodies in the router: short ones at once, others in a thread. State: the token ids
    of texts."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self._cache = TokenCache(TOKEN_CACHE_BYTES)
        # Not the loop's default executor, where long prompts would delay uploads and DNS lookups.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    def close(self) -> None:
        """End the threads. Queued texts are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Call `work`, in a thread if `size` (bytes or tokens) is large."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def names(self, kind: type[Body], data: bytes) -> Body:
        return kind.decode(data)

    async def tokenise(
        self,
        kind: Kind,
        data: bytes,
        body: Body | GenerateMessage,
        model: ModelInfo,
        tenant: str,
        earlier: Earlier,
        texts: PromptTexts = UNCHECKED,
    ) -> TokenisedBody:
        if isinstance(body, ResponsesRequest):
            body = body.after(earlier)
        size = len(data) + len(earlier.items)
        tokenizer = self._tokenizers.loaded(model)
        if size <= INLINE_BYTES and tokenizer is not None:  # most requests
            return tokenise_body(body, model, self._cache, tenant, tokenizer, texts)
        work = partial(tokenise_body, body, model, self._cache, tenant)
        try:
            return await self.run(size, partial(work, tokenizer, texts))
        except NoTokenizer:
            return await self.run(size, partial(work, await self._tokenizers.get(model), texts))


class InProcess:
    """Tokenises bodies in child processes, which return them without their prompts."""

    def __init__(
        self, processes: BodyProcesses, tokenizers: Tokenizers, in_router: InRouter
    ) -> None:
        self._processes, self._tokenizers, self._in_router = processes, tokenizers, in_router

    async def names(self, kind: type[Body], data: bytes) -> Body:
        if len(data) <= _QUICK_BYTES:
            return Names.decode(data)
        return await self._in_router.run(len(data), partial(Names.decode, data))

    async def tokenise(
        self,
        kind: Kind,
        data: bytes,
        body: Body | GenerateMessage,
        model: ModelInfo,
        tenant: str,
        earlier: Earlier,
        texts: PromptTexts = UNCHECKED,
    ) -> TokenisedBody:
        load = partial(self._tokenizers.get, model)
        done = await self._processes.read(
            kind.__name__, data, model, load, earlier.items, tenant, texts
        )
        work = partial(_unpacked, kind, done, earlier, texts.changes)
        return await self._in_router.run(len(done.body), work)


def _unpacked(
    kind: Kind, done: Done, earlier: Earlier, changes: Mapping[str, str]
) -> TokenisedBody:
    """Decode the result of a child process."""
    tokens = [TokenIds(*x) for x in done.tokens]
    prompts = tokens if done.images is None else (done.images,)
    if done.is_answer:
        return TokenisedBody(None, prompts=prompts, answer=done.body)
    body = kind.decode(done.body)
    if isinstance(body, PoolingBody):
        return TokenisedBody(body, inputs=Inputs(tokens, done.second_at, done.order))
    if isinstance(body, ResponsesRequest):
        body = body.after(Earlier(b"", earlier.conversation), done.items)
    assert isinstance(body, GenerateBody | GenerateMessage)
    parsed = body.parse()
    if changes:  # an answer that echoes its prompt has the prompt in its body
        parsed = [with_changes(x, changes) for x in parsed]
    return TokenisedBody(body, parsed, prompts, pieces=done.pieces)

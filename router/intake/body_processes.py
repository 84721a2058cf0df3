"""Lifecycle of the processes that read large bodies (body_reader.py).

A process starts when the others have much to read, and ends after IDLE_S without a body, which
releases its memory. A body that kills its process is retried once, in a new process. A body that
takes too long is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from pdserve.errors import ErrorInfo, InvalidRequest, Overloaded, from_info
from pdserve.process.child_pool import ChildFailed, ChildSlot, End, execute
from router.intake.image_prompts import ImagePrompt  # noqa: TC001 - msgspec reads it
from router.intake.prompt_texts import UNCHECKED, PromptTexts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# Smaller bodies are read in the router: that takes a few milliseconds at most.
LARGE_BODY_BYTES = 64 << 10
# Per start and body. 8 MiB of text take 7 s on a slow core.
TIMEOUT_S = 30.0
MEMORY_MIB = 2048
# Longer than an agent's tools usually take: its next turn finds its token ids here.
IDLE_S = 600.0
_LEAVE_S = 1.0  # for a body whose client has left: the process knows many conversations
MAX_WAITING_BYTES = 128 << 20  # of all queued bodies
_TRIES = 2
# Predictions, measured on one core with chats of 220 KB: seconds to start a process, and for each
# byte of a conversation that a process knows, or does not. Only their ratios matter.
_START_S = 0.8
_KNOWN_S, _NEW_S = 12e-9, 350e-9
# Prefix that identifies a conversation: different ones rarely share one of this length.
_BEGIN_BYTES = 64 << 10
_MAX_HOMES = 10_000
COMMAND = (sys.executable, "-m", "router.intake.body_reader")


class Job(Struct):
    """A body to read. `kind`: name of its class. `previous`: JSON of the previous response's items.
    `tokenizer`: its digest. `files`: the tokenizer's, once the process has asked for them.
    `tenant`: of the client. `texts`: what to do with those of prompts."""

    kind: str
    data: bytes
    previous: bytes
    model: str
    max_model_len: int
    vocab_size: int
    cross_encoder: bool
    modalities: dict[str, int]
    tokenizer: str
    files: dict[str, bytes]
    tenant: str
    texts: PromptTexts


class Done(Struct):
    """Result of a job.

    `body`: the body without its prompts, or the answer to a body that only tokenises (`is_answer`).
    `tokens`: arguments of the TokenIds of each prompt. `images`: a prompt with images, in place of
    its tokens. `second_at`, `order`: as in tokenise.Inputs. `items`: JSON of the items of a
    Responses request. `pieces`: as in TokenisedBody. `wants_tokenizer`: the body has text, and the
    process has no tokenizer of its model: send the files.
    """

    body: bytes = b""
    is_answer: bool = False
    tokens: list[tuple[bytes, bytes]] = []
    images: ImagePrompt | None = None
    second_at: list[int] = []
    order: list[int] = []
    items: bytes = b""
    pieces: list[tuple[str, str]] = []
    error: ErrorInfo | None = None
    wants_tokenizer: bool = False


class BodyProcesses:
    """Reads large bodies in up to `most` processes. Callers send bodies of more than `larger_than`
    bytes. State: the bytes of queued bodies, the predicted seconds of the bodies at each process,
    and the process that has the token ids of each conversation, found by the beginning of its
    bodies, with the number of its start.

    A body goes where it is predicted to be read first: to tokenise a conversation again takes
    longer than to wait for some others.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        command: Sequence[str] = COMMAND,
        *,
        most: int = 1,
        larger_than: int = LARGE_BODY_BYTES,
        timeout_s: float = TIMEOUT_S,
        memory_mib: int = MEMORY_MIB,
    ) -> None:
        self.larger_than = larger_than
        self._metrics, self._timeout_s = metrics, timeout_s
        self._waiting = 0
        self._homes: OrderedDict[int, tuple[ChildSlot, int]] = OrderedDict()
        start = partial(execute, (*command, "--memory-mib", str(memory_mib)))
        self._processes = [
            ChildSlot(start, timeout_s=timeout_s, idle_s=IDLE_S, leave_s=_LEAVE_S)
            for _ in range(most or default_processes())
        ]
        self._queued_s = dict.fromkeys(self._processes, 0.0)

    async def read(
        self,
        kind: str,
        data: bytes,
        model: ModelInfo,
        load: Callable[[], Awaitable[Tokenizer]],
        previous: bytes = b"",
        tenant: str = "",
        texts: PromptTexts = UNCHECKED,
    ) -> Done:
        """Read a body in a process. `kind`, `previous`, `tenant` and `texts` are fields of Job.
        `load` returns the model's tokenizer, which bodies of token ids do not need. Raises the same
        errors as `tokenise_body` in the router, InvalidRequest if reading takes too much time or
        memory, and Overloaded if too many bytes are queued."""
        size = len(data) + len(previous)
        if self._waiting + size > MAX_WAITING_BYTES:
            raise Overloaded("too many large bodies wait to be read", retry_after_s=1.0)
        job = Job(
            kind=kind,
            data=data,
            previous=previous,
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            cross_encoder=model.cross_encoder,
            modalities=dict(model.modalities),
            tokenizer=model.tokenizer or model.name,
            files={},
            tenant=tenant,
            texts=texts,
        )
        begin, owner = (previous or data)[:_BEGIN_BYTES], f"{tenant}\0{job.tokenizer}"
        key = xxh3_64_intdigest(begin, xxh3_64_intdigest(owner.encode()))
        process, takes_s = self._choose(key, size)
        self._waiting += size
        self._queued_s[process] += takes_s
        try:
            done = await self._read(process, job)
            if done.wants_tokenizer:
                job.files = dict((await load()).files)
                done = await self._read(process, job)
        finally:
            self._waiting -= size
            self._queued_s[process] -= takes_s
        if done.error is not None:
            raise from_info(done.error)
        self._homes[key] = process, process.starts
        self._homes.move_to_end(key)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return done

    async def _read(self, process: ChildSlot, job: Job) -> Done:
        data = msgspec.msgpack.encode(job)
        for _ in range(_TRIES):
            try:
                return msgspec.msgpack.decode(await process.call(data), type=Done)
            except ChildFailed as error:
                self._metrics.count("body_process_failures")
                if error.end is End.HUNG:
                    text = f"the body takes longer than {self._timeout_s:g} s to read"
                    raise InvalidRequest(text) from None
                logger.warning("the process for large bodies has failed: %s", error)
        raise InvalidRequest("reading the body ended the process for large bodies")

    def _choose(self, key: int, size: int) -> tuple[ChildSlot, float]:
        """Return the process for a body, and how long it is predicted to take there."""
        home, starts = self._homes.get(key, (None, 0))
        if home is not None and home.starts != starts:
            home = None  # another process by now, which knows nothing
        takes_s = {x: size * (_KNOWN_S if x is home else _NEW_S) for x in self._processes}
        process = min(takes_s, key=lambda x: self._wait_s(x) + takes_s[x])
        return process, takes_s[process]

    def _wait_s(self, process: ChildSlot) -> float:
        """Return how long another body is predicted to wait. One that takes long is seen by the
        time that it has taken."""
        start_s = 0.0 if process.is_running else _START_S
        return start_s + max(self._queued_s[process], process.running_s)

    async def close(self) -> None:
        """End the processes. Idempotent."""
        await asyncio.gather(*(x.close() for x in self._processes))


def default_processes() -> int:
    """Return the number of processes for the cores that the router may use, of which it needs one
    itself. Beyond four, it could not give them enough bodies of known conversations."""
    return max(1, min(4, len(os.sched_getaffinity(0)) - 1))

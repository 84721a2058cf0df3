"""Lifecycle of the processes that read large bodies (router/api/large_bodies.py).

A process starts when the others have much to read, and ends after IDLE_S without a body, which
releases its memory. A body that kills its process is retried once, in a new process. A body that
takes too long is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from pdserve.errors import ErrorInfo, InvalidRequest, Overloaded, from_info
from pdserve.model.token_ids import TokenIds
from router.api.dialects.fields import Names, read
from router.api.preprocess import NoTokenizer
from router.operations.rendering import ImagePrompt  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo
    from router.api.preprocess import ParsedRequest, Preprocessor
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# Smaller bodies are read in the router: that takes a few milliseconds at most.
LARGE_BODY_BYTES = 64 << 10
# For one body, including the start of the process. 8 MiB of text take 7 s on a slow core.
TIMEOUT_S = 30.0
MEMORY_MIB = 2048
# Longer than an agent's tools usually take: its next turn finds its token ids here.
IDLE_S = 600.0
_LEFT_S = 1.0  # for a body whose client has left
MAX_WAITING_BYTES = 128 << 20  # of all queued bodies
_MAX_REPLY_BYTES = 128 << 20
_TRIES = 2
_MAX_TOKENIZERS = 4  # in one process
# Predictions, measured on one core with chats of 220 KB: seconds to start a process, and for each
# byte of a conversation that a process knows, or does not. Only their ratios matter.
_START_S = 0.8
_KNOWN_S, _NEW_S = 12e-9, 350e-9
# Bodies whose names are read in much less time than it takes to wake a thread.
_QUICK_BYTES = 512 << 10
# Of a body: bodies of one conversation begin alike, and those of others seldom do for so long.
_BEGIN_BYTES = 64 << 10
_MAX_HOMES = 10_000
COMMAND = (sys.executable, "-m", "router.api.large_bodies")
GENERATE = "GenerateRequest"  # Job.kind of a gRPC request


class Job(Struct):
    """A body to read. `kind`: name of its class. `previous`: JSON of the previous response's items.
    `tokenizer`: its digest. `files`: the tokenizer's, empty if the process has loaded it, or has
    not yet asked for it. `tenant`: of the client."""

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


class Done(Struct):
    """Result of a job. `body`: the body without its prompts, or the whole response of an endpoint
    that only tokenises. `tokens`: arguments of the TokenIds of each prompt. `images`: a prompt with
    images, in place of its tokens. `second_at`, `order`: as in embeddings.Inputs. `items`: JSON of
    the items of a Responses request. `wants_tokenizer`: the body has text, and the process has no
    tokenizer of its model: send the files."""

    body: bytes = b""
    tokens: list[tuple[bytes, bytes]] = []
    images: ImagePrompt | None = None
    second_at: list[int] = []
    order: list[int] = []
    items: bytes = b""
    error: ErrorInfo | None = None
    wants_tokenizer: bool = False


def unpack(done: Done) -> list[TokenIds]:
    """Return the token ids of each prompt."""
    return [TokenIds(*x) for x in done.tokens]


def put_prompts(parsed: Sequence[ParsedRequest], done: Done) -> None:
    """Give the prompts of a body that the process has read to its requests."""
    if done.images is not None:
        (one,) = parsed
        one.images = done.images
        return
    for one, tokens in zip(parsed, unpack(done), strict=True):
        one.tokens = tokens


class BodyProcess:
    """Reads bodies one at a time. State: the process, the digests of its tokenizers, the number of
    starts, and the predicted seconds of its queued bodies."""

    def __init__(
        self,
        metrics: RouterMetrics,
        command: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        memory_mib: int = MEMORY_MIB,
    ) -> None:
        self._metrics = metrics
        self._command = (*command, "--memory-mib", str(memory_mib))
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._known: set[str] = set()
        self._idle: asyncio.TimerHandle | None = None
        self._begun = 0.0  # the last read
        self.starts = 0
        self.queued_s = 0.0

    def wait_s(self) -> float:
        """Return how long another body is predicted to wait. One that takes long is seen by the
        time that it has taken."""
        start_s = 0.0 if self._process is not None or self._turn.locked() else _START_S
        running_s = time.monotonic() - self._begun if self._turn.locked() else 0.0
        return start_s + max(self.queued_s, running_s)

    async def read(self, job: Job) -> Done:
        """Read a body. Raises InvalidRequest if that takes too much time or ends the process."""
        async with self._turn:
            self._begun = time.monotonic()
            return await self._read(job)

    async def _read(self, job: Job) -> Done:
        if self._idle is not None:
            self._idle.cancel()
        files = job.files
        if files and job.tokenizer not in self._known and len(self._known) == _MAX_TOKENIZERS:
            await self._end()
        for _ in range(_TRIES):
            if self._process is None:
                await self._start()
            job.files = {} if job.tokenizer in self._known else files
            asking = asyncio.create_task(self._ask(job))
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await asyncio.shield(asking)
            except asyncio.CancelledError:
                # The client has left. The process has the token ids of many conversations: let it
                # finish.
                await asyncio.wait([asking], timeout=_LEFT_S)
                raise
            except TimeoutError:
                self._metrics.count("body_process_failures")
                raise InvalidRequest(
                    f"the body takes longer than {self._timeout_s:g} s to read"
                ) from None
            except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
                self._metrics.count("body_process_failures")
                logger.warning("the process for large bodies has failed: %r", error)
            finally:
                # The next job must not read this job's reply.
                if not asking.done() or asking.exception() is not None:
                    asking.cancel()
                    await self._end()
        raise InvalidRequest("reading the body ended the process for large bodies")

    async def _start(self) -> None:
        self.starts += 1
        # OpenBLAS, which numpy loads, reserves memory for each thread that it could start.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )

    async def _ask(self, job: Job) -> Done:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        data = msgspec.msgpack.encode(job)
        process.stdin.write(len(data).to_bytes(8))
        process.stdin.write(data)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(8))
        if size > _MAX_REPLY_BYTES:
            raise msgspec.DecodeError(f"a reply of {size} bytes")
        done = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Done)
        if done.wants_tokenizer:
            self._known.discard(job.tokenizer)  # it was sent, but could not be loaded
        elif job.files:
            self._known.add(job.tokenizer)
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._kill)
        return done

    def _kill(self) -> asyncio.subprocess.Process | None:
        process, self._process = self._process, None
        self._known = set()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
        return process

    async def _end(self) -> None:
        if (process := self._kill()) is not None:
            await process.wait()

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._idle is not None:
            self._idle.cancel()
        await self._end()


class BodyProcesses:
    """Reads large bodies in up to `most` processes. Callers send bodies of more than `larger_than`
    bytes. State: the bytes of queued bodies, and the process that has the token ids of each
    conversation, found by the beginning of its bodies.

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
        self._waiting = 0
        self._homes: OrderedDict[int, tuple[BodyProcess, int]] = OrderedDict()
        self._processes = [
            BodyProcess(metrics, command, timeout_s=timeout_s, memory_mib=memory_mib)
            for _ in range(most or default_processes())
        ]

    async def read(
        self,
        kind: str,
        data: bytes,
        model: ModelInfo,
        load: Callable[[], Awaitable[Tokenizer | None]],
        previous: bytes = b"",
        tenant: str = "",
    ) -> Done:
        """Read a body in a process. `kind`, `previous` and `tenant` are fields of Job. `load`
        returns the model's tokenizer, which bodies of token ids do not need, or None if it cannot
        be loaded. Raises the same ClientError as the router's own reader, InvalidRequest if reading
        takes too much time or memory, and Overloaded if too many bytes are queued."""
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
        )
        begin, owner = (previous or data)[:_BEGIN_BYTES], f"{tenant}\0{job.tokenizer}"
        key = xxh3_64_intdigest(begin, xxh3_64_intdigest(owner.encode()))
        process, takes_s = self._choose(key, size)
        self._waiting += size
        process.queued_s += takes_s
        try:
            done = await process.read(job)
            if done.wants_tokenizer:
                tokenizer = await load()
                if tokenizer is None:
                    raise NoTokenizer(model)
                job.files = dict(tokenizer.files)
                done = await process.read(job)
        finally:
            self._waiting -= size
            process.queued_s -= takes_s
        if done.error is not None:
            raise from_info(done.error)
        self._homes[key] = process, process.starts
        self._homes.move_to_end(key)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return done

    def _choose(self, key: int, size: int) -> tuple[BodyProcess, float]:
        """Return the process for a body, and how long it is predicted to take there."""
        home, starts = self._homes.get(key, (None, 0))
        if home is not None and home.starts != starts:
            home = None  # another process by now, which knows nothing
        takes_s = {x: size * (_KNOWN_S if x is home else _NEW_S) for x in self._processes}
        process = min(takes_s, key=lambda x: x.wait_s() + takes_s[x])
        return process, takes_s[process]

    async def close(self) -> None:
        """End the processes. Idempotent."""
        await asyncio.gather(*(x.close() for x in self._processes))


def default_processes() -> int:
    """Return the number of processes for the cores that the router may use, of which it needs one
    itself. Beyond four, it could not give them enough bodies of known conversations."""
    return max(1, min(4, len(os.sched_getaffinity(0)) - 1))


class LargeBodies:
    """Reads bodies of more than `larger_than` bytes, with the tokenizer of the model that they
    name."""

    def __init__(self, preprocessor: Preprocessor, processes: BodyProcesses) -> None:
        self._preprocessor = preprocessor
        self._processes = processes
        self.larger_than = processes.larger_than

    async def names(self, data: bytes) -> Names:
        """Read only the fields of a body that select its model and previous response; of a very
        large body in a thread, so that the event loop can run between several of them."""
        if len(data) <= _QUICK_BYTES:
            return read(Names, data)
        return await self._preprocessor.run(len(data), partial(read, Names, data))

    async def read(
        self, kind: str, data: bytes, name: str | None, tenant: str, previous: bytes = b""
    ) -> Done:
        """Read a body of a tenant for the model or adapter `name`. Raises as `BodyProcess.read`
        does, and as `Preprocessor.find_when_ready`."""
        model = await self._preprocessor.find_when_ready(name or "")
        load = partial(self._preprocessor.tokenizer_or_none, model)
        return await self._processes.read(kind, data, model, load, previous, tenant)

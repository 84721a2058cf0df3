"""A service with a client that measures the arrival of tokens."""

from __future__ import annotations

import struct
import time
import zlib
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.client import GrpcTarget, Request, exactly
from benchmarks.errors import BenchError
from benchmarks.service import LocalService
from pdserve.model.tokenizer import ChatMessage, MessageImage

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.client import ServedModel


@dataclass(frozen=True, slots=True)
class Serving:
    """A running service. `ready` is the content of its ready file."""

    ready: Mapping[str, Any]
    target: GrpcTarget
    model: ServedModel

    def prompt(self, chance: random.Random, length: int) -> list[int]:
        return [chance.randrange(16, self.model.vocab_size or 1000) for _ in range(length)]

    def message(self, chance: random.Random, words: int, images: int) -> list[ChatMessage]:
        """Return a conversation of one message with `words` words and `images` random images."""
        text = " ".join(str(chance.randrange(100)) for _ in range(words))
        parts = [MessageImage(_picture(chance), "auto", "images") for _ in range(images)]
        return [ChatMessage.of_parts("user", [text, *parts])]

    async def ask(
        self, prompt: Sequence[int] | Sequence[ChatMessage], tokens: int
    ) -> tuple[list[float], Mapping[str, Any]]:
        """Send a request. Return the milliseconds from sending to each token, and the receipt.
        Raises TargetError if the request fails, and BenchError if tokens are missing."""
        request = Request("", self.model.name, prompt, exactly(tokens))
        receipt: Mapping[str, Any] = {}
        begun, at_ms = time.perf_counter(), []
        async for piece in self.target.stream(request):
            at_ms += [(time.perf_counter() - begun) * 1e3] * (piece.tokens or 0)
            receipt = piece.receipt or receipt
        if len(at_ms) != tokens:
            raise BenchError(f"{len(at_ms)} tokens instead of {tokens}")
        return at_ms, receipt


def _picture(chance: random.Random) -> bytes:
    """Return a PNG file of 448 x 448 random grey pixels, in squares of 14, the usual patch."""
    side, patch = 448, 14
    rows = bytearray()
    for _ in range(side // patch):
        line = b"".join(bytes((chance.randrange(256),)) * patch for _ in range(side // patch))
        rows += (b"\0" + line) * patch  # 0: not filtered
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)  # 8 bits, grey
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@asynccontextmanager
async def serving(
    name: str, folder: Path, worker: Mapping[str, Any], up: Mapping[str, Any], **router: Any
) -> AsyncIterator[Serving]:
    """Run a service until the context exits. `worker`, `up` and `router` are sections of its
    configuration. Raises BenchError if it does not start."""
    free = {"http": {"port": 0}, "grpc": {"port": 0}}
    service = LocalService(name, {"router": free | router, "worker": worker, "up": up}, folder)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(service.stop)
        await service.start()
        target = GrpcTarget(service.ready["grpc"])
        ending.push_async_callback(target.aclose)
        yield Serving(service.ready, target, await target.model())

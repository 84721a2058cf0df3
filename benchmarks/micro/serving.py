"""A service with a client that measures the arrival of tokens."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.client import GrpcTarget, exactly
from benchmarks.errors import BenchError
from benchmarks.service import LocalService

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

    async def ask(
        self, prompt: Sequence[int], tokens: int
    ) -> tuple[list[float], Mapping[str, Any]]:
        """Send a request. Return the milliseconds from sending to each token, and the receipt.
        Raises TargetError if the request fails, and BenchError if tokens are missing."""
        request = self.target.prepare(self.model, "", prompt, exactly(tokens))
        receipt: Mapping[str, Any] = {}
        begun, at_ms = time.perf_counter(), []
        async for piece in self.target.stream(request):
            at_ms += [(time.perf_counter() - begun) * 1e3] * (piece.tokens or 0)
            receipt = piece.receipt or receipt
        if len(at_ms) != tokens:
            raise BenchError(f"{len(at_ms)} tokens instead of {tokens}")
        return at_ms, receipt


@asynccontextmanager
async def serving(
    name: str, folder: Path, worker: Mapping[str, Any], up: Mapping[str, Any], **router: Any
) -> AsyncIterator[Serving]:
    """Run a service until the context exits. `worker`, `up` and `router` are sections of its
    configuration. Raises BenchError if it does not start."""
    free = {"http_port": 0, "grpc_port": 0}
    service = LocalService(name, {"router": free | router, "worker": worker, "up": up}, folder)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(service.stop)
        await service.start()
        target = GrpcTarget(service.ready["grpc"])
        ending.push_async_callback(target.aclose)
        yield Serving(service.ready, target, await target.model())

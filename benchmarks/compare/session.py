"""The arms of a running comparison: started, reached, measured one at a time, stopped.

All arms are started before the first round and wait while another is driven: engines without work
block (under 2 % of a core for three processes), and arms that stay alive can take turns every few
seconds. NIXL's do not block, and are paused meanwhile. What waiting arms did use is measured, and
spoils the run when it is much. ``restart`` keeps one arm alive at a time instead, for devices that
hold only one.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.compare.nixl import NixlPair
from benchmarks.compare.processor import ProcessorMeter
from benchmarks.compare.result import ArmFacts
from benchmarks.compare.settings import settings_of
from benchmarks.compare.stack import Stack
from benchmarks.grpc_target import GrpcTarget
from benchmarks.spread import open_http
from benchmarks.targets import HttpTarget

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.compare.arms import Arm
    from benchmarks.compare.stack import Started
    from benchmarks.targets import ServedModel, Target

Face = Literal["grpc", "http"]


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """An arm and, where it is started here, the whole configuration of its `pdserve up`; vLLM's own
    P/D is set by the same. Key and ``tls`` (as aiohttp takes it) are for one that is a URL."""

    arm: Arm
    config: Mapping[str, Any] | None
    api_key: str = field(default="", repr=False)
    tls: ssl.SSLContext | bool = True


class Contender:
    """One arm: owns its processes, if it has any here, and its connection.

    State: ``facts`` and ``served`` are None until it was up once.
    """

    def __init__(self, plan: ArmPlan, face: Face, model: str | None, directory: Path) -> None:
        self.name = plan.arm.name
        self.facts: ArmFacts | None = None
        self.served: ServedModel | None = None
        self.stack: Started | None = None
        self._plan = plan
        self._face: Face = face
        self._model = model
        if plan.config is not None:
            make = NixlPair if plan.arm.is_nixl else Stack
            self.stack = make(self.name, plan.config, directory / self.name)
        self._target: Target[Any] | None = None

    @property
    def target(self) -> Target[Any]:
        """Where its requests go."""
        assert self._target is not None, f"{self.name} is not up"
        return self._target

    async def up(self) -> None:
        """Start it, and learn what it is. Raises BenchError."""
        if self._target is not None:
            return
        begun = time.monotonic()
        settings, ready_s = None, None
        if self.stack is not None:
            await self.stack.start()
            ready_s = round(time.monotonic() - begun, 2)
            settings = settings_of(await self.stack.workers())
        self._target = self._open()
        self.served = await self._target.model(self._model if self.stack is None else None)
        self.facts = self.facts or ArmFacts(
            name=self.name,
            kind="endpoint" if self.stack is None else "started",
            face=self._face,
            model=self.served.name,
            settings=settings,
            ready_s=ready_s,
        )

    def wait(self, *, is_driven: bool) -> None:
        """Pause what would not wait quietly while another is driven, and let it go on for its own
        turn."""
        if isinstance(self.stack, NixlPair) and self.stack.ready is not None:
            if is_driven:
                self.stack.resume()
            else:
                self.stack.pause()

    async def down(self) -> None:
        """Close the connection and stop the processes. Idempotent."""
        target, self._target = self._target, None
        if target is not None:
            await target.aclose()
        if self.stack is not None:
            await self.stack.stop()

    def _open(self) -> Target[Any]:
        if self.stack is None:
            assert self._plan.arm.url is not None
            return open_http(self._plan.arm.url, self._plan.api_key, self._plan.tls)
        assert self.stack.ready is not None
        if self._face == "grpc":
            return GrpcTarget(self.stack.ready["grpc"])
        return HttpTarget(self.stack.ready["http"])


class Session:
    """All contenders of one comparison; a context that leaves none of them running."""

    def __init__(self, contenders: Sequence[Contender], *, restart: bool) -> None:
        self.contenders = {contender.name: contender for contender in contenders}
        self._restart = restart
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Session:
        for contender in self.contenders.values():
            self._stack.push_async_callback(contender.down)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def start(self) -> AsyncIterator[Contender]:
        """Bring up each arm in its turn, so that none is slowed down by another; with ``restart``
        each is taken down again when the next one is asked for."""
        for contender in self.contenders.values():
            await contender.up()
            yield contender
            if self._restart:
                await contender.down()

    async def ready(self, name: str) -> tuple[Contender, bool]:
        """The arm, up; and whether it was started just now, with cold caches."""
        contender = self.contenders[name]
        is_fresh = self._restart
        if self._restart:
            for other in self.contenders.values():
                if other is not contender:
                    await other.down()
            await contender.down()
            await contender.up()
        for each in self.contenders.values():
            each.wait(is_driven=each is contender)
        return contender, is_fresh

    def meter(self, name: str) -> ProcessorMeter:
        """Begin to count processor time while ``name`` is driven."""
        up = [c for c in self.contenders.values() if c.stack is not None and c.stack.ready]
        idle = [c.stack for c in up if c.name != name and c.stack is not None]
        return ProcessorMeter(self.contenders[name].stack, idle)

"""Renders prompts with images: fetches them, and has a worker of the model turn them into tokens.

A router has no models. Chat template, tokenizer and image processor of the model run in a process
beside a prefill or aggregated worker, which any of them does equally.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from pdserve import wire
from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Refusal,
    Unavailable,
    WorkerFailed,
)
from pdserve.model.images import MAX_IMAGE_BYTES, read_header
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from router.control.worker_rpc import worker_stub
from router.intake.image_prompts import ImagePrompt
from router.placement.values import MemberState, may_hold, shown_regions
from router.steps.ledger import NO_LEDGER, ROUTER, DataTransfer

if TYPE_CHECKING:
    from pdserve.net.rpc import Dialer
    from pdserve.types import MediaItem, ModelInfo, Regions
    from router.admission.memory import MediaMemory
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.intake.fetch_images import ImageFetcher
    from router.metrics import RouterMetrics
    from router.steps.ledger import Owner, ResidencyLedger

    _Key = tuple[bytes, Regions]

logger = logging.getLogger(__name__)

# As long as the process that renders may take to start on a busy machine: a worker is ready before
# it has loaded. A request waits until its own deadline only.
RENDER_TIMEOUT_S = 120.0
# Workers asked for one prompt, if they are busy or fail.
_TRIES = 3
# Of all processed images of one prompt: a command to a worker may have 64 MiB.
MAX_MEDIA_BYTES = 48 << 20
CACHE_BYTES = 128 << 20
_INDEX = re.compile(r"images\[(\d+)\]")


class Rendered(NamedTuple):
    """A rendered prompt. `media`: its images, in order of their offsets."""

    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...]


class _Cached(NamedTuple):
    """A rendered prompt, and the worker whose processor made it."""

    member: Member
    rendered: Rendered
    size: int


class _Rendering(NamedTuple):
    """A prompt that is being rendered, and the workers that were sent it."""

    task: asyncio.Task[_Cached]
    asked: list[Member]


class ImageRenderer:
    """Renders each prompt once while its result is cached, by content. State: the cached results,
    and the prompts that are being rendered. A result is dropped with its worker: another one may
    have another processor under the same name of its model."""

    def __init__(
        self,
        fleet: Fleet,
        dialer: Dialer,
        fetcher: ImageFetcher,
        memory: MediaMemory,
        metrics: RouterMetrics,
        ledger: ResidencyLedger = NO_LEDGER,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._fleet, self._dialer = fleet, dialer
        self._fetcher, self._memory, self._metrics = fetcher, memory, metrics
        self._ledger, self._cache_bytes = ledger, cache_bytes
        self._cached: OrderedDict[_Key, _Cached] = OrderedDict()
        self._used_bytes = 0
        self._open: dict[_Key, _Rendering] = {}
        self._waiting = Counter[asyncio.Task[_Cached]]()  # requests for each of them

    async def close(self) -> None:
        """End the calls to workers."""
        tasks = [call.task for call in self._open.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def render(
        self,
        prompt: ImagePrompt,
        model: ModelInfo,
        until: float,
        regions: Regions = None,
        owner: Owner = ("", ""),
    ) -> Rendered:
        """Return the rendered prompt, by a worker in one of `regions`. Raises InvalidRequest naming
        the image, Overloaded if memory for images or all workers are busy, Unavailable without
        workers, and DeadlineExceeded at the loop time `until`."""
        began = self._fleet.now()
        try:
            # The prompt, its message to the worker, and what is fetched.
            size = 2 * len(prompt.request) + len(prompt.urls) * MAX_IMAGE_BYTES
            with self._memory.hold(size):
                async with asyncio.timeout_at(until):
                    if prompt.urls:
                        prompt = await self._fetched(prompt)
                    return await self._render(prompt, model, regions, owner)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while images were rendered") from None
        finally:
            self._metrics.observe("render_seconds", self._fleet.now() - began, model.name)

    async def _fetched(self, prompt: ImagePrompt) -> ImagePrompt:
        """Return the prompt with the images at its `urls` in its request."""

        async def fetch(index: int, url: str) -> tuple[int, bytes]:
            field = prompt.fields[index]
            data = await self._fetcher.fetch(url, field)
            try:
                read_header(data)
            except ValueError as error:
                raise InvalidRequest(f"'{field}' {error}", field=field) from None
            return index, data

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch(*each)) for each in prompt.urls.items()]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        request = w.RenderRequest.FromString(prompt.request)
        for index, data in (task.result() for task in tasks):
            request.images[index].data = data
        if (size := request.ByteSize()) > MAX_MEDIA_BYTES:
            text = f"the images have {size} bytes; the limit is {MAX_MEDIA_BYTES}"
            raise InvalidRequest(text, field=prompt.fields[0])
        return ImagePrompt(request.SerializeToString(), {}, prompt.fields)

    async def _render(
        self, prompt: ImagePrompt, model: ModelInfo, regions: Regions, owner: Owner
    ) -> Rendered:
        digest = await asyncio.to_thread(_digest, model.name, prompt.request)
        # Equal prompts share a call to a worker, so it must be one that both may use.
        key = (digest, regions)
        if (known := self._cached.get(key)) is not None:
            if not known.member.lost:
                self._cached.move_to_end(key)
                return known.rendered
            self._drop(key)
        call = self._open.get(key)
        if call is None:
            asked: list[Member] = []
            task = asyncio.create_task(self._ask(prompt.request, model, regions, asked))
            call = self._open[key] = _Rendering(task, asked)
            task.add_done_callback(lambda done: self._keep(key, done))
        task = call.task
        self._waiting[task] += 1
        try:
            # Shielded: equal prompts of other clients wait for the same call.
            found = await asyncio.shield(task)
            size = sum(len(x.data) for x in found.rendered.media)
            back = DataTransfer("images", found.member.worker_id, ROUTER, size)
            self._moved(owner, back, found.member)
            return found.rendered
        except InvalidRequest as error:
            raise _named(error, prompt.fields) from error
        finally:
            for member in call.asked:
                size = len(prompt.request)
                sent = DataTransfer("image_files", ROUTER, member.worker_id, size)
                self._moved(owner, sent, member)
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                if not task.done():
                    # No request accounts for the memory of its prompt any longer.
                    task.cancel()
                    del self._open[key]

    def _moved(self, owner: Owner, transfer: DataTransfer, member: Member) -> None:
        """Write a transfer between this router and a worker."""
        region = member.info.topology.get("region", "")
        regions = {ROUTER: self._ledger.region, member.worker_id: region}
        self._ledger.moved(*owner, transfer, regions)

    def _keep(self, key: _Key, task: asyncio.Task[_Cached]) -> None:
        if (call := self._open.get(key)) is not None and call.task is task:
            del self._open[key]
        if task.cancelled() or task.exception() is not None:
            return
        found = self._cached[key] = task.result()
        self._used_bytes += found.size
        while self._used_bytes > self._cache_bytes:
            self._drop(next(iter(self._cached)))

    def _drop(self, key: _Key) -> None:
        self._used_bytes -= self._cached.pop(key).size

    async def _ask(
        self, request: bytes, model: ModelInfo, regions: Regions, tried: list[Member]
    ) -> _Cached:
        """Have one worker after another render a prompt, the least busy first. Add them to
        `tried`."""
        text, reason = f"no worker of model {model.name} can read prompts now", ""
        if regions is not None:
            text = f"{text} in region {shown_regions(regions)}"
            reason = Refusal.NO_WORKER_IN_REGION
        error: PdserveError = Unavailable(text, reason=reason)
        while len(tried) < _TRIES:
            ready = [
                x
                for x in self._fleet.of_model(model.name)
                if _reads(x) and may_hold(regions, x.info.topology) and x not in tried
            ]
            if not ready:
                break
            member = min(ready, key=_business)
            tried.append(member)
            try:
                rendered = await self._call(member, request)
            except (Overloaded, Unavailable, WorkerFailed) as failed:
                logger.warning("images are not rendered: %s", failed.message)
                error = failed
            else:
                size = sum(len(x.data) for x in rendered.media)
                if size > MAX_MEDIA_BYTES:
                    raise InvalidRequest(
                        f"the images have {size} bytes for the model; the limit is "
                        f"{MAX_MEDIA_BYTES}: send fewer or smaller ones",
                        field="images",
                    )
                return _Cached(member, rendered, size + 8 * len(rendered.token_ids))
        raise error

    async def _call(self, member: Member, request: bytes) -> Rendered:
        async with worker_stub(self._dialer, member) as stub:
            answer = await stub.Render(
                w.RenderRequest.FromString(request),
                timeout=RENDER_TIMEOUT_S,
                metadata=self._dialer.metadata,
            )
        tokens = tuple(answer.prompt_token_ids)
        try:
            return Rendered(tokens, wire.media_from_pb(answer.media, len(tokens)))
        except InvalidRequest as error:
            text = f"worker {member.worker_id} rendered no valid prompt: {error.message}"
            raise WorkerFailed(text) from error


def _reads(member: Member) -> bool:
    """Return True if a worker is ready and computes prompts."""
    return member.state is MemberState.READY and member.info.role is not Role.DECODE


def _business(member: Member) -> tuple[int, int]:
    return member.placed.outstanding_tokens, member.placed.outstanding_requests


def _digest(model: str, request: bytes) -> bytes:
    return blake2b(request, key=blake2b(model.encode()).digest(), digest_size=16).digest()


def _named(error: InvalidRequest, fields: list[str]) -> InvalidRequest:
    """Return a worker's error with the client's name of the image, and without the worker's."""
    text = error.message.partition(": ")[2] if error.message.startswith("worker ") else ""
    text, field = text or error.message, error.field
    if (index := _INDEX.fullmatch(field)) is not None:
        name = fields[int(index[1])]
        return type(error)(text.replace(field, f"'{name}'", 1), field=name)
    return type(error)(text, field=field)

"""The renderer over scripted workers: whom it asks, what it keeps, and whom it blames."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, WorkerFailed
from pdserve.net import rpc
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from router.admission.memory import MediaMemory
from router.intake.render_images import MAX_MEDIA_BYTES, ImagePrompt, ImageRenderer
from tests.support.images import png
from tests.support.router_stack import MODEL, ScriptedWorker, running_stack
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc.aio

    from pdserve.errors import PdserveError
    from router.intake.fetch_images import ImageFetcher
    from router.intake.render_images import Rendered

RED, BLUE = png(3, 4), png(5, 6)


class RenderingWorker(ScriptedWorker):
    """A worker that renders. `error`: what it answers, if not None. `may_answer`: waited for."""

    def __init__(self, worker_id: str, role: Role, **changes: Any) -> None:
        super().__init__(worker_id, role, **changes)
        self.error: PdserveError | None = None
        self.data: bytes | None = None
        self.offset = 0
        self.rendered: list[w.RenderRequest] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def Render(  # noqa: N802
        self, request: w.RenderRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> w.RenderResponse:
        self.rendered.append(request)
        await self.may_answer.wait()
        if self.error is not None:
            await rpc.abort(context, self.error)
        items = [
            w.MediaItem(modality="image", hash="h", offset=i, length=1, data=self.data or x.data)
            for i, x in enumerate(request.images, self.offset)
        ]
        return w.RenderResponse(prompt_token_ids=[3] * (len(items) + 1), media=items)


class Fetched:
    """Fetches from a dictionary."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    async def fetch(self, url: str, field: str) -> bytes:
        return self._files[url]


def prompt(*images: bytes, urls: dict[int, str] | None = None) -> ImagePrompt:
    request = w.RenderRequest(text="a", images=[w.EncodedImage(data=x) for x in images])
    fields = [f"messages[{i}]" for i in range(len(images))]
    return ImagePrompt(request.SerializeToString(), urls or {}, fields)


@asynccontextmanager
async def renderer(
    *workers: RenderingWorker, limit: int = 1 << 30, cache_bytes: int = 1 << 20
) -> AsyncIterator[ImageRenderer]:
    async with running_stack(*workers) as stack:
        fetcher = cast("ImageFetcher", Fetched({"u:red": RED, "u:text": b"text"}))
        made = ImageRenderer(
            stack.fleet,
            rpc.PLAIN,
            fetcher,
            MediaMemory(limit),
            stack.metrics,
            cache_bytes=cache_bytes,
        )
        yield made
        await made.close()
        assert made._memory.used == 0


async def render(made: ImageRenderer, asked: ImagePrompt, timeout_s: float = WAIT_S) -> Rendered:
    return await made.render(asked, MODEL, asyncio.get_running_loop().time() + timeout_s)


@pytest.fixture
def one() -> RenderingWorker:
    return RenderingWorker("p1", Role.PREFILL)


@pytest.fixture
def other() -> RenderingWorker:
    return RenderingWorker("a2", Role.AGGREGATED)


async def test_equal_prompts_are_rendered_once(one: RenderingWorker) -> None:
    async with renderer(one) as made:
        one.may_answer.clear()
        both = [asyncio.create_task(render(made, prompt(RED))) for _ in range(2)]
        await wait_until(lambda: one.rendered)
        one.may_answer.set()
        found = await asyncio.gather(*both)
        assert found[0] == found[1] == await render(made, prompt(RED))
        assert (found[0].token_ids, found[0].media[0].data) == ((3, 3), RED)
        assert len(one.rendered) == 1
        assert (await render(made, prompt(BLUE))).media[0].data == BLUE
        assert (await render(made, prompt(RED, BLUE))).media[1].data == BLUE


async def test_the_cache_is_bounded(one: RenderingWorker) -> None:
    async with renderer(one, cache_bytes=2 * len(RED)) as made:
        for image in (RED, BLUE, RED):
            await render(made, prompt(image))
        assert len(one.rendered) == 3
        assert made._used_bytes <= 2 * len(RED)


async def test_results_of_a_lost_worker_are_made_again(
    one: RenderingWorker, other: RenderingWorker
) -> None:
    async with renderer(one, other) as made:
        await render(made, prompt(RED))
        used, left = (one, other) if one.rendered else (other, one)
        made._fleet.members[used.info.worker_id].lost = True
        await render(made, prompt(RED))
        assert len(left.rendered) == 1


@pytest.mark.parametrize("error", [Overloaded("busy"), Unavailable("no"), WorkerFailed("dead")])
async def test_another_worker_is_asked_if_one_fails(
    one: RenderingWorker, other: RenderingWorker, error: PdserveError
) -> None:
    async with renderer(one, other) as made:
        one.error = error
        # The least busy is asked first.
        placed = made._fleet.members["a2"].placed
        placed.outstanding_tokens = 9
        assert (await render(made, prompt(RED))).token_ids == (3, 3)
        placed.outstanding_tokens = 0
        assert len(one.rendered) == len(other.rendered) == 1
        other.error = error
        with pytest.raises(type(error)):
            await render(made, prompt(BLUE))


async def test_decode_workers_render_nothing() -> None:
    async with renderer(RenderingWorker("d", Role.DECODE)) as made:
        with pytest.raises(Unavailable, match="no worker of model demo"):
            await render(made, prompt(RED))


async def test_a_bad_image_has_the_name_that_the_client_gave_it(
    one: RenderingWorker, other: RenderingWorker
) -> None:
    async with renderer(one, other) as made:
        one.error = other.error = InvalidRequest("images[1] is no image", field="images[1]")
        with pytest.raises(InvalidRequest) as caught:
            await render(made, prompt(RED, BLUE))
        assert caught.value.field == "messages[1]"
        assert caught.value.message == "'messages[1]' is no image"
        assert len(one.rendered) + len(other.rendered) == 1, "another worker would refuse it too"


async def test_images_at_addresses_are_fetched_and_checked(one: RenderingWorker) -> None:
    async with renderer(one) as made:
        found = await render(made, prompt(b"", BLUE, urls={0: "u:red"}))
        assert [x.data for x in found.media] == [RED, BLUE]
        with pytest.raises(InvalidRequest, match="not a PNG") as caught:
            await render(made, prompt(BLUE, b"", urls={1: "u:text"}))
        assert caught.value.field == "messages[1]"


async def test_images_that_grow_too_large_are_refused(one: RenderingWorker) -> None:
    one.data = bytes(MAX_MEDIA_BYTES // 2 + 1)
    async with renderer(one) as made:
        with pytest.raises(InvalidRequest, match="send fewer or smaller ones"):
            await render(made, prompt(RED, BLUE))


async def test_memory_for_images_is_limited(one: RenderingWorker) -> None:
    async with renderer(one, limit=2 * len(prompt(RED).request)) as made:
        await render(made, prompt(RED))
        with pytest.raises(Overloaded, match="memory_mib") as caught:
            await render(made, prompt(RED, BLUE))
        assert caught.value.retry_after_s > 0


async def test_a_deadline_ends_the_wait_of_its_own_request(one: RenderingWorker) -> None:
    async with renderer(one) as made:
        one.may_answer.clear()
        patient = asyncio.create_task(render(made, prompt(RED)))
        with pytest.raises(DeadlineExceeded):
            await render(made, prompt(RED), timeout_s=0.05)
        one.may_answer.set()
        assert (await patient).media[0].data == RED


async def test_a_prompt_for_which_nobody_waits_any_more_takes_no_memory(
    one: RenderingWorker,
) -> None:
    async with renderer(one) as made:
        one.may_answer.clear()
        waiting = [asyncio.create_task(render(made, prompt(RED))) for _ in range(2)]
        await wait_until(lambda: one.rendered)
        for task in waiting:
            assert made._open
            task.cancel()
            await asyncio.wait([task])
        await wait_until(lambda: not made._open)
        one.may_answer.set()
        assert (await render(made, prompt(RED))).media[0].data == RED
        assert len(one.rendered) == 2


async def test_a_worker_that_renders_nonsense_is_not_the_clients_fault(
    one: RenderingWorker,
) -> None:
    one.offset = 99
    async with renderer(one) as made:
        with pytest.raises(WorkerFailed, match="no valid prompt"):
            await render(made, prompt(RED))


async def test_images_are_rendered_where_their_request_may_be(one: RenderingWorker) -> None:
    """An equal prompt that was rendered elsewhere is no answer: both share calls to workers."""
    eu = RenderingWorker("p2", Role.PREFILL, topology={"region": "eu"})
    regions, until = frozenset({"eu"}), asyncio.get_running_loop().time() + WAIT_S
    async with renderer(one, eu) as made:
        await render(made, prompt(RED))
        await made.render(prompt(RED), MODEL, until, regions)
        assert (len(one.rendered), len(eu.rendered)) == (1, 1)
    async with renderer(one) as made:
        with pytest.raises(Unavailable, match="in region eu"):
            await made.render(prompt(RED), MODEL, until, regions)

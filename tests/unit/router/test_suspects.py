"""Requests under which workers died: refused after two deaths, and kept apart until then."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from pdserve.config import QueueConfig, RetryConfig
from pdserve.errors import DeadlineExceeded, EngineDied, PoisonRequest
from pdserve.net import deadline
from pdserve.types import (
    Constraint,
    FinishReason,
    Parsing,
    Role,
    SamplingParams,
    StructuredOutput,
)
from router.attempt.suspects import CLEARED_TOKENS, MAX_REMEMBERED, REMEMBER_S, Suspects, Suspicion
from router.fleet.registry import Fleet
from tests.support.router_stack import ScriptedWorker, request, running_stack, worker_info
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from pdserve.v1 import worker_pb2 as w
    from router.walk import Answered, Proceed, Walk
    from tests.support.router_stack import RouterStack

DIED = EngineDied("the worker's engine died")
STOP = FinishReason.STOP
LONG = SamplingParams(max_tokens=64)


def aggregated(*names: str) -> list[ScriptedWorker]:
    return [ScriptedWorker(name, Role.AGGREGATED) for name in names]


async def taken_by(workers: list[ScriptedWorker]) -> tuple[ScriptedWorker, w.Submit]:
    """Return the worker that gets the next request, and the request."""
    waiting = {asyncio.ensure_future(x.submitted()): x for x in workers}
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for other in rest:
        other.cancel()
    await asyncio.wait(waiting)
    (first,) = done
    return waiting[first], first.result()


async def die(stack: RouterStack, worker: ScriptedWorker, *submits: w.Submit) -> None:
    """Fail `submits` as a dying engine does, then let the worker leave."""
    for submit in submits:
        worker.fail(submit, DIED)
    await wait_until(lambda: not stack.member(worker).placed.outstanding_requests)
    leave(stack, worker)


def leave(stack: RouterStack, worker: ScriptedWorker) -> None:
    stack.fleet.deregister(worker.info.worker_id, worker.info.instance_id)


async def test_a_request_ends_two_workers_at_most_and_is_refused_when_it_is_sent_again() -> None:
    workers = aggregated("a", "b", "c", "d")
    async with running_stack(*workers, queue=QueueConfig(timeout_s=WAIT_S)) as stack:
        async with stack.ask(request()) as answer:
            for _ in range(2):
                worker, submit = await taken_by(workers)
                await die(stack, worker, submit)
                workers.remove(worker)
            with pytest.raises(PoisonRequest, match="2 workers died while they ran this request"):
                await answer.rest()
        same = request(request_id="again", sampling=SamplingParams(max_tokens=8, seed=7))
        async with stack.ask(same) as answer:
            with pytest.raises(PoisonRequest):
                await answer.rest()
        assert not any(x.has_submissions for x in workers)
        async with stack.ask(request(prompt_token_ids=(1, 2))) as answer:
            worker, submit = await taken_by(workers)
            worker.send(submit, 5, finish=STOP)
            await answer.rest()


async def test_waiting_for_a_worker_does_not_start_the_count_again() -> None:
    first, second, third = aggregated("a", "b", "c")
    async with running_stack(first, second, third, queue=QueueConfig(timeout_s=WAIT_S)) as stack:
        # Nobody is ready after each death, as where one worker is restarted again and again.
        leave(stack, second)
        leave(stack, third)
        async with stack.ask(request()) as answer:
            await die(stack, first, await first.submitted())
            await stack.join(second)
            await die(stack, second, await second.submitted())
            await stack.join(third)
            with pytest.raises(PoisonRequest):
                await answer.rest()
            assert not third.has_submissions


async def test_a_break_of_the_network_is_no_death() -> None:
    workers = aggregated("a", "b")
    async with (
        running_stack(*workers, queue=QueueConfig(timeout_s=WAIT_S)) as stack,
        stack.ask(request()) as answer,
    ):
        for _ in range(4):
            worker, submit = await taken_by(workers)
            worker.break_link()
        worker, submit = await taken_by(workers)
        worker.send(submit, 5, finish=STOP)
        assert (await answer.rest()).token_ids == (5,)


async def test_two_suspects_never_share_a_worker_until_one_has_advanced() -> None:
    dying, other = aggregated("a", "b")
    async with running_stack(
        dying, other, queue=QueueConfig(max_running_requests=8, timeout_s=WAIT_S)
    ) as stack:
        leave(stack, other)
        one = stack.ask(request(request_id="one", prompt_token_ids=(1, 2), sampling=LONG))
        two = stack.ask(request(request_id="two", prompt_token_ids=(3, 4), sampling=LONG))
        async with one, two:
            submits = [await dying.submitted(), await dying.submitted()]
            await stack.join(other)
            await die(stack, dying, *submits)
            first = await other.submitted()
            answer, waiting = (one, two) if first.request_id == "one" else (two, one)
            # A request that met no death may share the worker of a suspect.
            async with stack.ask(request(request_id="three", prompt_token_ids=(5, 6))) as three:
                submit = await other.submitted()
                assert submit.request_id == "three"
                other.send(submit, 9, finish=STOP)
                await three.rest()
            for token in range(CLEARED_TOKENS):
                assert not other.has_submissions
                other.send(first, token)
                await answer.next()
            second = await other.submitted()
            assert second.request_id != first.request_id
            for submit in (first, second):
                other.send(submit, 5, finish=STOP)
            for each in (answer, waiting):
                await each.rest()


async def test_an_answer_that_advances_outlives_any_number_of_workers() -> None:
    workers = aggregated("a", "b", "c", "d")
    stacked = running_stack(*workers, queue=QueueConfig(timeout_s=WAIT_S))
    async with stacked as stack, stack.ask(request(sampling=LONG)) as answer:
        for _ in range(3):
            worker, submit = await taken_by(workers)
            for token in range(CLEARED_TOKENS):
                worker.send(submit, token)
                await answer.next()
            await die(stack, worker, submit)
            workers.remove(worker)
        worker, submit = await taken_by(workers)
        worker.send(submit, 5, finish=STOP)
        assert (await answer.rest()).token_ids == (5,)


async def test_a_suspect_is_not_sent_to_a_worker_that_does_not_answer_a_ping() -> None:
    """Workers that are killed together are found dead one by one. A request that was sent to each
    of them would be refused, and would have killed none."""
    dying, dead, living = aggregated("a", "b", "c")
    dead.answers_pings = False
    async with running_stack(dying, dead, living, queue=QueueConfig(timeout_s=WAIT_S)) as stack:
        leave(stack, dead)
        leave(stack, living)
        async with stack.ask(request()) as answer:
            submit = await dying.submitted()
            await stack.join(dead)
            await die(stack, dying, submit)
            await dead.pinged.wait()
            await stack.join(living)
            living.send(await living.submitted(), 5, finish=STOP)
            assert (await answer.rest()).token_ids == (5,)
            assert not dead.has_submissions


class TestLeaving:
    """A client may leave wherever its request waits. The stack asserts that nothing stays."""

    async def test_while_the_next_worker_is_pinged(self) -> None:
        dying, dead = aggregated("a", "b")
        dead.answers_pings = False
        async with running_stack(dying, dead, queue=QueueConfig(timeout_s=WAIT_S)) as stack:
            leave(stack, dead)
            async with stack.ask(request()):
                submit = await dying.submitted()
                await stack.join(dead)
                await die(stack, dying, submit)
                await dead.pinged.wait()
                assert stack.member(dead).placed.outstanding_requests == 1

    async def test_while_another_suspect_is_placed(self) -> None:
        dying, other = aggregated("a", "b")
        stacked = running_stack(
            dying, other, queue=QueueConfig(max_running_requests=8, timeout_s=WAIT_S)
        )
        async with stacked as stack:
            leave(stack, other)
            asked = stack.ask(request(sampling=LONG))
            suspects, ends = stack.requests.generating._failover._suspects, deadline.after(WAIT_S)
            async with suspects.turn("demo", ends), asked:
                submit = await dying.submitted()
                await die(stack, dying, submit)
                await stack.join(other)
            async with suspects.turn("demo", ends):  # it is free again
                assert not other.has_submissions

    @pytest.mark.parametrize("is_late", [False, True])
    async def test_while_it_is_not_certain_that_the_workers_died(self, is_late: bool) -> None:
        workers = aggregated("a", "b")
        ends = deadline.after(0.5 if is_late else 600.0)
        async with (
            running_stack(*workers, queue=QueueConfig(timeout_s=WAIT_S)) as stack,
            stack.ask(request(deadline=ends)) as answer,
        ):
            for _ in range(2):
                worker, _ = await taken_by(workers)
                worker.accepts_hello = False
                worker.break_link()
            if is_late:
                with pytest.raises(DeadlineExceeded):
                    await answer.rest()
                return
            await wait_until(lambda: not stack.member(worker).placed.outstanding_requests)
            assert len(stack.requests.log.open) == 1


class Constrains:
    """Adds a constraint to requests with tools, as the router's parser does."""

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        wanted = StructuredOutput(Constraint.JSON_OBJECT)
        sampling = replace(walk.request.sampling, structured_output=wanted)
        request = structs.replace(walk.request, parsing=None, sampling=sampling)
        return await proceed(structs.replace(walk, request=request))


async def test_a_deadly_request_with_tools_is_known_when_it_is_sent_again() -> None:
    workers = aggregated("a", "b", "c")
    tools = request(parsing=Parsing("", {}, "fits", "r", "{}", "{}"))
    async with running_stack(
        *workers, queue=QueueConfig(timeout_s=WAIT_S), parse=Constrains()
    ) as stack:
        for _ in range(2):
            async with stack.ask(tools) as answer:
                while len(workers) > 1:
                    worker, submit = await taken_by(workers)
                    assert submit.sampling.HasField("structured_output")
                    await die(stack, worker, submit)
                    workers.remove(worker)
                with pytest.raises(PoisonRequest):
                    await answer.rest()
        assert not workers[0].has_submissions


async def test_ranks_that_end_together_are_one_death() -> None:
    """The rank that is left answers pings until its step fails."""
    first, second = (ScriptedWorker(x, Role.AGGREGATED, group="g") for x in "ab")
    (other,) = aggregated("c")
    async with running_stack(first, second, other, queue=QueueConfig(timeout_s=WAIT_S)) as stack:
        leave(stack, other)
        async with stack.ask(request(sampling=LONG)) as answer:
            dying, submit = await taken_by([first, second])
            left = second if dying is first else first
            dying.send(submit, 5)
            await answer.next()
            dying.fail(submit, DIED)
            await stack.join(other)
            submit = await other.submitted()
            assert not left.has_submissions
            other.send(submit, 6, finish=STOP)
            assert (await answer.rest()).token_ids == (6,)


class TestRanks:
    async def test_ranks_of_one_life_count_once(self) -> None:
        fleet = Fleet()
        suspects, suspicion = Suspects(fleet, {}, RetryConfig(max_worker_deaths=2)), Suspicion()

        def start(life: str) -> None:
            for name in "ab":
                fleet.register(worker_info(name, Role.DECODE, group="g", instance_id=life))

        start("1")
        a, b = fleet.members.values()
        for rank in (a, b):
            suspicion.add(suspects.death_of(rank, said_so=False))
            assert suspicion.count == 1
        start("2")
        assert suspicion.ending() == frozenset()
        # The first life was found dead again, only after the second has begun.
        suspicion.add(suspects.death_of(b, said_so=False))
        assert suspicion.count == 1
        suspicion.add(suspects.death_of(fleet.members["a"], said_so=False))
        assert suspicion.count == 2
        assert suspicion.ending() == {"a", "b"}

    async def test_a_rank_that_only_lost_its_connection_hides_no_death_of_another(self) -> None:
        fleet = Fleet()
        suspects, suspicion = Suspects(fleet, {}, RetryConfig(max_worker_deaths=1)), Suspicion()
        for name in "ab":
            fleet.register(worker_info(name, Role.DECODE, group="g"))
        a, b = fleet.members.values()
        suspicion.add(suspects.death_of(a, said_so=False))
        a.attached = True
        suspicion.add(suspects.death_of(b, said_so=True))
        assert await suspects.confirm(suspicion) == 1


async def test_a_worker_that_leaves_under_a_request_has_not_died() -> None:
    workers = aggregated("a", "b", "c")
    stacked = running_stack(*workers, queue=QueueConfig(timeout_s=WAIT_S))
    async with stacked as stack, stack.ask(request()) as answer:
        for _ in range(2):
            worker, _ = await taken_by(workers)
            leave(stack, worker)
            workers.remove(worker)
        worker, submit = await taken_by(workers)
        worker.send(submit, 5, finish=STOP)
        assert (await answer.rest()).token_ids == (5,)


class TestMemory:
    async def test_it_ends_after_ten_minutes(self) -> None:
        now = 0.0
        suspects = Suspects(Fleet(clock=lambda: now), {}, RetryConfig(max_worker_deaths=2))
        suspects.end(request(), Suspicion(earlier=2), answered=False)
        with pytest.raises(PoisonRequest):
            suspects.begin(request())
        now = REMEMBER_S
        assert suspects.begin(request()).count == 0

    async def test_an_answer_clears_the_request(self) -> None:
        suspects = Suspects(Fleet(), {}, RetryConfig(max_worker_deaths=2))
        suspects.end(request(), Suspicion(earlier=1), answered=False)
        assert suspects.begin(request()).count == 1
        suspects.end(request(), suspects.begin(request()), answered=True)
        assert suspects.begin(request()).count == 0

    async def test_it_is_bounded(self) -> None:
        suspects = Suspects(Fleet(), {}, RetryConfig(max_worker_deaths=2))
        for number in range(MAX_REMEMBERED + 1):
            suspects.end(request(prompt_token_ids=(number,)), Suspicion(earlier=2), answered=False)
        assert suspects.begin(request(prompt_token_ids=(0,))).count == 0
        with pytest.raises(PoisonRequest):
            suspects.begin(request(prompt_token_ids=(1,)))


async def test_an_embedding_ends_two_workers_at_most() -> None:
    workers = [ScriptedWorker(name, Role.POOLING) for name in ("a", "b", "c")]
    async with running_stack(*workers, queue=QueueConfig(timeout_s=WAIT_S)) as stack:
        embedder = stack.requests.embedder
        asking = asyncio.create_task(embedder.embed(request()))
        for _ in range(2):
            worker, submit = await taken_by(workers)
            await die(stack, worker, submit)
            workers.remove(worker)
        with pytest.raises(PoisonRequest):
            await asking
        with pytest.raises(PoisonRequest):
            await embedder.embed(request(request_id="again"))
        assert not workers[0].has_submissions

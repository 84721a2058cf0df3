"""Workers that die or freeze under a whole service: every answer is, token for token, the one of an
engine that nothing happens to, and nothing stays behind."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from pdserve.config import HealthConfig, RouterConfig
from pdserve.types import Constraint, SamplingParams, StructuredOutput
from pdserve.v1 import worker_pb2 as w
from tests.e2e.service import Service
from tests.e2e.test_handoff_exact import prompt
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.types import FinishReason, PositionLogprobs, Receipt, Usage
    from tests.e2e.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
LENGTH = 400
PLAIN = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
WORKERS = ("prefill-0", "decode-0", "decode-1")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 1234},
    "penalties": {
        "temperature": 0.8,
        "seed": 5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 9},
    "structured": {
        "structured_output": StructuredOutput(Constraint.REGEX, "([a-c]{3}-[0-9]{2} )+")
    },
    "characters of many bytes": {"logit_bias": {}},
    "stop string": {},
    "several answers": {"n": 3, "temperature": 0.9, "seed": 77},
}


@dataclass(slots=True)
class Answer:
    """An answer as its client has it so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Asked:
    """One request under way."""

    def __init__(self, service: Service, ids: list[int], sampling: SamplingParams) -> None:
        self.answers = [Answer() for _ in range(sampling.n)]
        self.usage: Usage | None = None
        self.receipt: Receipt | None = None
        self._changed = asyncio.Event()
        self._deltas = service.client.generate(ids, sampling)
        self.task = asyncio.create_task(self._read())

    @property
    def fallbacks(self) -> tuple[str, ...]:
        assert self.receipt is not None
        return self.receipt.fallbacks

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    async def _read(self) -> None:
        async for delta in self._deltas:
            answer = self.answers[delta.index]
            answer.token_ids += delta.token_ids
            answer.text += delta.text
            answer.logprobs += delta.logprobs
            answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
            self.usage, self.receipt = delta.usage or self.usage, delta.receipt or self.receipt
            self._changed.set()

    async def until(self, tokens: int) -> None:
        """Waits until the client has so many, or all."""
        async with asyncio.timeout(WAIT_S):
            while self.tokens < tokens and any(x.finish_reason is None for x in self.answers):
                self._changed.clear()
                await self._changed.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tiny_model: Path) -> AsyncIterator[Service]:
    config = RouterConfig(
        http_port=0,
        grpc_port=0,
        policy="least_loaded",
        # Whoever freezes is found out by what it does not say, not by the end of its lease.
        lease_s=20.0,
        stop_grace_s=0.0,
        health=HealthConfig(stall_s=2.0, eject_s=0.5, probe_s=0.0),
    )
    async with Service.start(config, tiny_model) as service:
        for name in WORKERS:
            await service.add(name)
        await service.until_ready()
        yield service


@pytest_asyncio.fixture(loop_scope="session")
async def service(running: Service) -> AsyncIterator[Service]:
    """Every test begins with all workers, and leaves them empty."""
    for name in WORKERS:
        if name not in running.processes:
            await running.add(name)
    await running.until_ready()
    yield running
    await running.until_empty()


async def busy_decode(service: Service) -> str:
    """A decode worker that has requests."""
    entries = await service.entries()
    return max(WORKERS[1:], key=lambda name: entries[name].outstanding_requests)


async def expected_of(
    engine: EngineProcess, ids: list[int], sampling: SamplingParams
) -> list[Answer]:
    runs = [engine.run(ids, sampling.of_choice(i)) for i in range(sampling.n)]
    return [
        Answer(list(x.token_ids), x.text, list(x.logprobs), x.finish_reason, x.stop_reason)
        for x in await asyncio.gather(*runs)
    ]


async def jobs(
    engine: EngineProcess, max_tokens: int = LENGTH
) -> dict[str, tuple[list[int], SamplingParams]]:
    """A request of each kind, long enough to be killed twice."""
    found = {}
    for number, (kind, fields) in enumerate(KINDS.items()):
        ids = prompt(90 + 40 * number, number)
        sampling = replace(PLAIN, max_tokens=max_tokens, **fields)
        if kind == "stop string":
            text = (await engine.run(ids, sampling)).text
            # Late, and nowhere earlier.
            at = next(i for i in range(len(text) - 80, 0, -1) if text.index(text[i : i + 6]) == i)
            sampling = replace(sampling, stop=(text[at : at + 6],))
        found[kind] = ids, sampling
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_freezes_is_found_out_and_replaced(
    service: Service, aggregated: EngineProcess, role: str
) -> None:
    # Long enough that no machine completes it between the 20th token and the signal.
    ids, sampling = prompt(700, 77), replace(PLAIN, max_tokens=1600)
    expected = await expected_of(aggregated, ids, sampling)
    frozen = "prefill-0"
    if role == "prefill":
        service.send(frozen, signal.SIGSTOP)
        asked = Asked(service, ids, sampling)
    else:
        asked = Asked(service, ids, sampling)
        await asked.until(20)
        frozen = await busy_decode(service)
        service.send(frozen, signal.SIGSTOP)
    await asked.task
    reason = (await service.entries())[frozen].breaker.reason
    service.send(frozen, signal.SIGCONT)
    assert asked.answers == expected
    assert asked.fallbacks
    assert reason.startswith("no frame for")
    # Once it goes on, a request tries it.
    async with asyncio.timeout(WAIT_S):
        while (await service.entries())[frozen].HasField("breaker"):
            short = replace(PLAIN, max_tokens=2)
            tries = [Asked(service, prompt(50, i), short).task for i in range(2)]
            # Meanwhile others do its phase.
            await asyncio.gather(*tries)


async def test_a_prefill_worker_that_dies_in_mid_prefill_is_replaced(
    service: Service, aggregated: EngineProcess
) -> None:
    ids, sampling = prompt(1500, 78), replace(PLAIN, max_tokens=30)
    expected = await expected_of(aggregated, ids, sampling)
    service.send("prefill-0", signal.SIGSTOP)
    asked = Asked(service, ids, sampling)
    async with asyncio.timeout(WAIT_S):
        while not (await service.entries())["prefill-0"].outstanding_requests:
            pass
    await service.kill("prefill-0")
    await asked.task
    assert asked.answers == expected
    assert asked.fallbacks == ("aggregated:worker_failed",)


async def test_workers_are_restarted_under_answers_that_lose_nothing(
    service: Service, aggregated: EngineProcess
) -> None:
    """A decode worker is emptied at once and ends; the prefill worker gets a signal in mid-prefill.
    Both exit with 0, and come back."""
    kinds = ("seeded", "penalties", "structured")
    asked_for = [
        (prompt(120 + 40 * i, 200 + i), replace(PLAIN, **KINDS[kind]))
        for i, kind in enumerate(kinds)
    ]
    late = prompt(1500, 210), replace(PLAIN, max_tokens=30)
    runs = [expected_of(aggregated, *job) for job in (*asked_for, late)]
    expected = await asyncio.gather(*runs)
    asked = [Asked(service, *job) for job in asked_for]
    for one in asked:
        await one.until(20)
    emptied = await busy_decode(service)
    await service.drain(emptied, timeout_s=0.0, stop=True)
    assert await service.ended(emptied) == 0
    asked.append(Asked(service, *late))
    async with asyncio.timeout(WAIT_S):
        while not (await service.entries())["prefill-0"].outstanding_requests:
            pass
    service.send("prefill-0", signal.SIGTERM)
    await asked[-1].task
    assert await service.ended("prefill-0") == 0
    for one in asked:
        await one.task
    assert [one.answers for one in asked] == expected
    assert any("moved" in name for one in asked for name in one.fallbacks)


async def test_every_kind_of_answer_leaves_a_worker_with_its_kv(
    service: Service, aggregated: EngineProcess
) -> None:
    """All are on one decode worker, which is drained, and then on the other, which gets a SIGTERM.
    Both have time: nobody need be moved by another prefill, and nobody is."""
    asked_for = await jobs(aggregated, 1000)
    runs = [expected_of(aggregated, *job) for job in asked_for.values()]
    expected = dict(zip(asked_for, await asyncio.gather(*runs), strict=True))
    await service.drain("decode-1", timeout_s=WAIT_S, stop=False)
    asked = {kind: Asked(service, *job) for kind, job in asked_for.items()}
    for one in asked.values():
        await one.until(3 * len(one.answers))
    await service.undrain("decode-1")
    await service.until_ready()
    await service.drain("decode-0", timeout_s=WAIT_S, stop=False)
    assert (await service.statuses())["decode-0"].ledger == w.KvLedger()
    await service.undrain("decode-0")
    await service.until_ready()
    service.send("decode-1", signal.SIGTERM)
    assert await service.ended("decode-1") == 0
    for kind, one in asked.items():
        await one.task
        assert one.answers == expected[kind], kind
        assert set(one.fallbacks) == {"live_kv:moved"}, kind
        assert one.usage is not None
        assert one.usage.completion_tokens == one.tokens
    assert any(len(one.fallbacks) > len(one.answers) for one in asked.values()), "none left twice"


async def test_every_kind_of_answer_survives_its_workers(
    service: Service, aggregated: EngineProcess
) -> None:
    """Both decode workers are killed, one after the other, under answers of every kind."""
    asked_for = await jobs(aggregated, 4 * LENGTH)
    runs = [expected_of(aggregated, *job) for job in asked_for.values()]
    expected = dict(zip(asked_for, await asyncio.gather(*runs), strict=True))
    assert any(ord(c) > 0x7F for c in expected["characters of many bytes"][0].text)
    assert expected["stop string"][0].stop_reason is not None
    asked = {kind: Asked(service, *job) for kind, job in asked_for.items()}
    for name, more in (("decode-0", 20), ("decode-1", 3)):
        wanted = [(one, one.tokens + more * len(one.answers)) for one in asked.values()]
        for one, tokens in wanted:
            await one.until(tokens)
        await service.kill(name)
    for kind, one in asked.items():
        await one.task
        assert one.answers == expected[kind], kind
        assert one.fallbacks, kind
        assert one.usage is not None
        assert one.usage.completion_tokens == one.tokens
        assert one.usage.prompt_tokens == len(asked_for[kind][0])

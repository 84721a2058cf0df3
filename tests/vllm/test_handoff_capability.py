"""A real prefill engine gives its KV to whom the router says, exactly, and to nobody else."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kv_transfer.copying import WORDS
from kv_transfer.guard import MAX_STRIKES
from pdserve.capability import Capability, CapabilityKey, WorkerStart, mint
from pdserve.errors import TransferFailed
from pdserve.types import FinishReason
from tests.patience import HUNG_S, WAIT_S
from tests.vllm.engines import EngineProcess, settings
from tests.vllm.pair import Pair, joined
from tests.vllm.test_handoff_exact import params, prompt
from workers.engine import DecodePhase, PrefillPhase
from workers.vllm_settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(HUNG_S),
]

KEY = CapabilityKey.generate()
P, D = WorkerStart("p0", "keyed-instance"), WorkerStart("d0", "entitled-instance")


def right(transfer_id: str, target: WorkerStart = D, *, in_s: int = 60) -> str:
    return mint(KEY, Capability(transfer_id, P, target, int(time.time()) + in_s))


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile write to the file, to their end."""
    saved = [os.dup(fd) for fd in (1, 2)]
    with path.open("ab") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    try:
        yield
    finally:
        for fd, was in zip((1, 2), saved, strict=True):
            os.dup2(was, fd)
            os.close(was)


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("capability") / "log"


@pytest.fixture(scope="module")
def log(log_file: Path) -> Callable[[], str]:
    """Reads what both engines of `keyed` have printed."""
    return log_file.read_text


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(tiny_model: Path, log_file: Path) -> AsyncIterator[Pair]:
    """A prefill engine with a key, and a decode engine that its capabilities can name."""
    engines: list[EngineProcess] = []
    for start, key in ((P, KEY), (D, None)):
        extra = {"transports": ("shm", "tcp"), "worker_id": start.worker_id, "kv_key": key}
        made = settings(
            tiny_model, kv=KvSettings(start.instance_id, extra), max_num_batched_tokens=256
        )
        with output_to(log_file):
            engines.append(await EngineProcess.start(made, env={"VLLM_LOGGING_LEVEL": "DEBUG"}))
    prefill, decode = engines
    yield Pair(prefill, decode, P.instance_id, mint=right)
    await decode.close()
    await prefill.close()


async def test_the_right_one_is_exact(keyed: Pair, aggregated: EngineProcess) -> None:
    for length in (1, 300, 700):
        ids, sampling = prompt(length, 20), params(ignore_eos=True)
        expected = joined(await aggregated.run(ids, sampling))
        assert await keyed.run(ids, sampling) == expected
        await keyed.until_empty()


@pytest.mark.skipif(not WORDS, reason="the extension was not built: no C compiler at install")
async def test_what_lies_ready_is_taken_by_the_right_one_and_exact(
    keyed: Pair, aggregated: EngineProcess
) -> None:
    """In turn, as plain proxies ask: prefill has ended before decode hears of it."""
    taken, seeds = 0.0, itertools.count(40)
    async with asyncio.timeout(WAIT_S):
        while not taken:  # until the first link's memory is mapped, all is pushed
            seed = next(seeds)
            ids, sampling = prompt(333, seed), params(ignore_eos=True)
            expected = joined(await aggregated.run(ids, sampling))
            name = f"ready-{seed}"
            first = await keyed.prefill.collect(
                keyed.prefill.submit(ids, sampling, PrefillPhase(name))
            )
            source = DecodePhase(name, keyed.prefill.addresses, P.instance_id, right(name))
            rest = await keyed.decode.collect(keyed.decode.submit(ids, sampling, source))
            assert joined(first, rest) == expected
            await keyed.until_empty()
            state = await keyed.decode.kv_state()
            assert state is not None
            taken = state.report().totals["taken_blocks"]
    assert taken == -(-333 // 32)


async def refusal(keyed: Pair, make: Callable[[str], str]) -> str:
    """Why a transfer failed whose capability `make` has made; nothing of it is left."""
    refused = Pair(keyed.prefill, keyed.decode, P.instance_id, mint=make)
    streams = refused.submit(prompt(200, 21), params(ignore_eos=True))
    first = await refused.prefill.collect(streams[0])
    answer = await refused.decode.collect(streams[1])
    assert first.finish_reason is FinishReason.LENGTH
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert answer.error.code == TransferFailed.code
    assert not answer.token_ids
    # The router cancels what nobody will take.
    refused.prefill.cancel(streams[0])
    await refused.until_empty()
    return answer.error.message


FORGED = f"2.{KEY.key_id}.{2**40}.{'0' * 64}"
WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "missing": (lambda _: "", "refused: no capability was presented"),
    "forged": (lambda _: FORGED, "refused: the capability is not for this transfer"),
    "another's": (
        lambda t: right(t, WorkerStart("d1", D.instance_id)),
        "refused: the capability is not",
    ),
    "expired": (lambda t: right(t, in_s=-1), "refused: the capability has expired"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_one_fails_the_transfer_and_says_why(
    keyed: Pair, aggregated: EngineProcess, wrong: str, log: Callable[[], str]
) -> None:
    made: list[str] = []
    make, reason = WRONG[wrong]

    def remember(transfer_id: str) -> str:
        made.append(make(transfer_id))
        return made[0]

    message = await refusal(keyed, remember)
    assert reason in message
    ids, sampling = prompt(200, 21), params(ignore_eos=True)
    assert await keyed.run(ids, sampling) == joined(await aggregated.run(ids, sampling))
    await keyed.until_empty()
    logged = log()
    assert "refused to worker 'd0'" in logged
    assert "PdConnector" in logged
    for secret in (KEY.reveal().hex(), repr(KEY.reveal()), made[0] or KEY.reveal().hex()):
        assert secret not in logged


async def test_a_link_that_brings_too_many_is_dropped_and_the_next_one_serves(
    keyed: Pair, aggregated: EngineProcess
) -> None:
    reasons = [await refusal(keyed, lambda _: FORGED) for _ in range(MAX_STRIKES + 1)]
    assert any("closed the link" in reason for reason in reasons), reasons
    ids, sampling = prompt(300, 23), params(ignore_eos=True)
    assert await keyed.run(ids, sampling) == joined(await aggregated.run(ids, sampling))
    await keyed.until_empty()

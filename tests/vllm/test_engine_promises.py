"""The promises of `workers/engine.py` about handoffs and continuations, on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput
from tests.patience import HUNG_S
from tests.vllm.conftest import LEASE_S
from tests.vllm.pair import joined
from workers.engine import DecodePhase, PrefillPhase

if TYPE_CHECKING:
    from tests.vllm.engines import EngineProcess
    from tests.vllm.pair import Pair

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(HUNG_S),
]


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    """Tokens below 400; another `salt`, another first block."""
    return tuple(1 + (salt * 31 + 13 * i * i + 5 * i) % 400 for i in range(length))


def greedy(max_tokens: int = 24, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def sampled(**more: object) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        seed=11,
        max_tokens=24,
        ignore_eos=True,
        **more,  # type: ignore[arg-type]
    )


SAMPLINGS = {
    "greedy": greedy(ignore_eos=True),
    "seeded": sampled(),
    "penalties": sampled(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
    "logprobs": sampled(logprobs=4),
    "regex": greedy(60, structured_output=StructuredOutput(Constraint.REGEX, r"[abc]{7}[0-9]{3}")),
}


@pytest.mark.parametrize("name", list(SAMPLINGS))
@pytest.mark.parametrize("cut", [1, 6])
async def test_a_broken_off_answer_goes_on_through_another_handoff(
    pair_shm: Pair, aggregated: EngineProcess, name: str, cut: int
) -> None:
    sampling, prompt = SAMPLINGS[name], prompt_of(90, 200 + cut)
    whole = await aggregated.run(prompt, sampling)
    so_far = whole.token_ids[:cut]
    transfer_id = f"again-{name}-{cut}"
    first = pair_shm.prefill.submit(prompt, sampling, PrefillPhase(transfer_id), resume=so_far)
    rest = pair_shm.decode.submit(
        prompt, sampling, pair_shm.prefill.decode_phase(transfer_id), resume=so_far
    )
    prefill, decode = await pair_shm.prefill.collect(first), await pair_shm.decode.collect(rest)
    assert decode.error is None
    assert prefill.token_ids == whole.token_ids[cut : cut + 1]
    found = joined(prefill, decode)
    assert found.token_ids == whole.token_ids[cut:]
    assert whole.text.endswith(found.text)
    assert found.logprobs == whole.logprobs[cut:]
    assert found.finish_reason == whole.finish_reason
    await pair_shm.until_empty()


async def test_resumed_tokens_may_not_fill_the_answer(pair_shm: Pair) -> None:
    answer = await pair_shm.decode.run(prompt_of(9, 1), greedy(3), resume=(5, 6, 7))
    assert answer.error is not None
    assert (answer.error.code, answer.error.field) == ("invalid_value", "resume_token_ids")


async def test_a_stop_string_within_the_resumed_tokens_ends_the_stream(
    pair_shm: Pair, aggregated: EngineProcess
) -> None:
    prompt = prompt_of(40, 3)
    whole = await aggregated.run(prompt, greedy(ignore_eos=True))
    text = "".join(delta.text for delta in whole.deltas[:5])
    answer = await pair_shm.decode.run(
        prompt, greedy(ignore_eos=True, stop=(text,)), resume=whole.token_ids[:6]
    )
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, text)
    assert answer.token_ids == ()
    await pair_shm.until_empty()


async def test_a_prefill_that_ends_the_answer_leaves_nothing_behind(pair_shm: Pair) -> None:
    source, prompt = pair_shm.prefill, prompt_of(80, 400)
    first = (await source.run(prompt, greedy(1))).token_ids[0]
    answer = await source.run(prompt, greedy(stop_token_ids=(first,)), PrefillPhase("alone"))
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, first)
    await source.until_empty(timeout_s=LEASE_S / 2)


async def test_a_prefill_that_ends_in_a_stop_string_leaves_nothing_behind(pair_shm: Pair) -> None:
    source, prompt = pair_shm.prefill, prompt_of(80, 420)
    stop = (await source.run(prompt, greedy(1))).text
    assert stop
    answer = await source.run(prompt, greedy(stop=(stop,)), PrefillPhase("stopped"))
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)
    await source.until_empty(timeout_s=LEASE_S / 2)


async def test_blocks_are_leased_until_the_decode_engine_has_them(pair_shm: Pair) -> None:
    source, target = pair_shm.prefill, pair_shm.decode
    prompt, sampling = prompt_of(80, 450), greedy(4)
    first = await source.run(prompt, sampling, PrefillPhase("late"))
    assert first.finish_reason is FinishReason.LENGTH
    _, ledger = await source.status()
    assert (ledger.leased_blocks, ledger.pinned_blocks, ledger.transfers) == (3, 3, 1)
    rest = await target.run(prompt, sampling, source.decode_phase("late"))
    assert joined(first, rest).token_ids == (await target.run(prompt, sampling)).token_ids
    await pair_shm.until_empty()


async def test_an_unreachable_source_fails_the_stream(pair_shm: Pair) -> None:
    phase = DecodePhase("nowhere", ("127.0.0.1:1",), "gone")
    answer = await pair_shm.decode.run(prompt_of(80, 500), greedy(), phase)
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert answer.error.code == "transfer_failed"
    assert answer.error.message
    assert answer.token_ids == ()
    await pair_shm.until_empty()

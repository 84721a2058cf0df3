"""The promises of `workers/engine.py` about handoffs and continuations, on real engines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput
from tests.e2e.fixtures import LEASE_S
from tests.e2e.pair import joined
from workers.engine import DecodePhase, PrefillPhase

if TYPE_CHECKING:
    from tests.e2e.engines import Answer, EngineProcess
    from tests.e2e.pair import Pair

pytestmark = pytest.mark.asyncio(loop_scope="session")


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


async def exported(
    engine: EngineProcess, ids: tuple[int, ...], sampling: SamplingParams, transfer_id: str
) -> tuple[int, Answer]:
    """A stream that `engine` decoded for a while and let go."""
    stream_id = engine.submit(ids, sampling)
    head = engine.answer(stream_id)
    await engine.until(lambda: len(head.token_ids) >= 6)
    engine.export(stream_id, transfer_id)
    await engine.collect(stream_id)
    assert head.finish_reason is FinishReason.ABORT
    assert head.deltas[-1].exported_tokens == len(head.token_ids)
    return stream_id, head


@pytest.mark.parametrize("name", list(SAMPLINGS))
async def test_an_exported_answer_goes_on_elsewhere_without_a_prefill(
    pair_shm: Pair, aggregated: EngineProcess, name: str
) -> None:
    """All KV but that of the last token comes: with other tokens before, or other KV, the answer
    would be another one."""
    ids = prompt_of(150, 70 + list(SAMPLINGS).index(name))  # none is in a prefix cache
    sampling = replace(SAMPLINGS[name], max_tokens=300)
    if name == "regex":
        endless = StructuredOutput(Constraint.REGEX, r"([abc]{7}[0-9]{3})+")
        sampling = replace(sampling, structured_output=endless)
    old, new = pair_shm.prefill, pair_shm.decode
    _, head = await exported(old, ids, sampling, f"live-{name}")
    assert (await old.status())[1].leased_blocks
    phase = replace(old.decode_phase(f"live-{name}"), live=True)
    tail = await new.run(ids, sampling, phase, resume=head.token_ids)
    assert joined(head, tail) == joined(await aggregated.run(ids, sampling))
    assert tail.report is not None
    assert tail.report.transfer is not None
    assert tail.report.transfer.blocks == -(-(len(ids) + len(head.token_ids) - 1) // 32)
    await pair_shm.until_empty()


async def test_an_export_that_nobody_wants_holds_nothing(pair_shm: Pair) -> None:
    """It is cancelled with the same breath, or later, or has nothing to give yet."""
    engine, sampling = pair_shm.prefill, greedy(300, ignore_eos=True)
    stream_id, _ = await exported(engine, prompt_of(150, 90), sampling, "late cancel")
    assert (await engine.status())[1].leased_blocks
    engine.cancel(stream_id)
    await engine.until_empty()
    other = engine.submit(prompt_of(700, 91), sampling)  # three steps of prefill
    engine.export(other, "nothing yet")
    assert (await engine.collect(other)).error is not None
    third = engine.submit(prompt_of(150, 92), sampling)
    answer = engine.answer(third)
    await engine.until(lambda: answer.token_ids)
    engine.export(third, "one breath")
    engine.cancel(third)
    await engine.until_empty()


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

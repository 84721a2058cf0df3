"""The promises of `workers/engine.py` about handoffs and continuations, on real engines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput
from tests.support.engine_pair import KINDS, joined, params, prompt

if TYPE_CHECKING:
    from tests.support.engine_pair import EnginePair
    from tests.support.engines import EngineAnswer, EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")


TRIES = 20
SAMPLINGS = {
    "greedy": params(24, ignore_eos=True),
    "seeded": params(24, ignore_eos=True, **KINDS["seeded penalties logprobs"]),
    # No answer may end before it is let go, so the pattern has 300 characters at least.
    "regex": params(
        24, structured_output=StructuredOutput(Constraint.REGEX, r"([abc]{7}[0-9]{3}){30,}")
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("cut", [1, 6])
async def test_an_interrupted_answer_continues_through_another_handoff(
    pair_shm: EnginePair, aggregated: EngineProcess, name: str, cut: int
) -> None:
    sampling, ids = SAMPLINGS[name], prompt(90, 200 + cut)
    whole = await aggregated.run(ids, sampling)
    found = await pair_shm.run(ids, sampling, resume=whole.token_ids[:cut])
    assert found.token_ids == whole.token_ids[cut:]
    assert whole.text.endswith(found.text)
    assert found.logprobs == whole.logprobs[cut:]
    assert found.finish_reason == whole.finish_reason
    await pair_shm.until_empty()


async def exported(
    engine: EngineProcess, ids: list[int], sampling: SamplingParams, transfer_id: str
) -> tuple[int, EngineAnswer]:
    """Return a stream that `engine` decoded and exported. It is asked again if its answer ended
    before the export came."""
    for _ in range(TRIES):
        stream_id = engine.submit(ids, sampling)
        head = engine.answer(stream_id)
        await engine.until(lambda head=head: len(head.token_ids) >= 6)
        engine.export(stream_id, transfer_id)
        await engine.collect(stream_id)
        if head.finish_reason is FinishReason.ABORT:
            assert head.deltas[-1].exported_tokens == len(head.token_ids)
            return stream_id, head
        assert head.finish_reason is FinishReason.LENGTH
    raise AssertionError("each answer ended before the export")


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_an_exported_answer_continues_elsewhere_without_a_prefill(
    pair_shm: EnginePair, aggregated: EngineProcess, name: str
) -> None:
    """All KV but that of the last token comes: with other tokens before, or other KV, the answer
    would be another one."""
    ids = prompt(150, 7700 + list(SAMPLINGS).index(name))  # none is in a prefix cache
    sampling = replace(SAMPLINGS[name], max_tokens=300)
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


async def test_an_unneeded_export_holds_no_blocks(pair_shm: EnginePair) -> None:
    """The export is cancelled at once or later, or comes before the first token."""
    engine, sampling = pair_shm.prefill, params(300, ignore_eos=True)
    stream_id, _ = await exported(engine, prompt(150, 90), sampling, "late cancel")
    assert (await engine.status())[1].leased_blocks
    engine.cancel(stream_id)
    await engine.until_empty()
    waits = engine.decode_phase("never sent")  # so it has no token, however late the export is
    other = pair_shm.decode.submit(prompt(150, 91), sampling, waits)
    pair_shm.decode.export(other, "nothing yet")
    assert (await pair_shm.decode.collect(other)).error is not None
    third = engine.submit(prompt(150, 92), sampling)
    answer = engine.answer(third)
    await engine.until(lambda: answer.token_ids)
    engine.export(third, "one breath")
    engine.cancel(third)
    await engine.until_empty()


async def test_resumed_tokens_may_not_fill_the_answer(pair_shm: EnginePair) -> None:
    answer = await pair_shm.decode.run(prompt(9, 1), params(3), resume=(5, 6, 7))
    assert answer.error is not None
    assert (answer.error.code, answer.error.field) == ("invalid_value", "resume_token_ids")

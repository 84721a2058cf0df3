"""The test models notice what is in their context; a model that did not would prove nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from tests.e2e.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = tuple(1 + (7 * i * i + 3 * i) % 400 for i in range(200))
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize("position", [0, 31, 32, 100, 198, 199])
async def test_a_flipped_prompt_token_changes_the_answer(
    aggregated: EngineProcess, position: int
) -> None:
    flipped = list(PROMPT)
    flipped[position] = flipped[position] % 400 + 1
    straight = await aggregated.run(PROMPT, GREEDY)
    assert (await aggregated.run(flipped, GREEDY)).token_ids != straight.token_ids


async def test_the_answer_is_no_echo(aggregated: EngineProcess) -> None:
    answer = await aggregated.run(PROMPT, GREEDY)
    assert len(set(answer.token_ids)) > 4

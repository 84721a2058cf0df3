"""A round of the worker benchmark: the same prompts to both sides, whichever comes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from benchmarks.errors import BenchError
from benchmarks.worker import __main__ as program
from benchmarks.worker.__main__ import one_round, until_at_rest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

PROMPTS = [[1, 2], [3, 4], [5, 6]]
TOKENS = 128


class Both:
    """Plays the client and the peer, and remembers who was asked what."""

    def __init__(self, tokens: int = TOKENS) -> None:
        self.asked: list[tuple[str, list[int]]] = []
        self._tokens = tokens

    async def generate(self, prompt: list[int], _: object) -> AsyncIterator[SimpleNamespace]:
        self.asked.append(("pdserve", prompt))
        yield SimpleNamespace(token_ids=[0] * self._tokens)

    async def seconds(self, prompts: Sequence[list[int]], tokens: int) -> float:
        assert tokens == TOKENS
        self.asked += [("in_process", prompt) for prompt in prompts]
        return 2.0

    async def rest(self) -> None:
        self.asked.append(("rest", []))


def both_sides(both: Both) -> Any:
    return cast("Any", (both, both, PROMPTS, TOKENS, both.rest))


@pytest.mark.parametrize("ours_first", [True, False])
async def test_both_are_asked_the_same_in_turn(ours_first: bool) -> None:
    both = Both()
    found = await one_round(*both_sides(both), ours_first=ours_first)
    order = ["pdserve", "in_process"] if ours_first else ["in_process", "pdserve"]
    wanted = [[("rest", []), *((name, prompt) for prompt in PROMPTS)] for name in order]
    assert both.asked == [*wanted[0], *wanted[1]]
    assert found.in_process == len(PROMPTS) * TOKENS / 2.0
    assert found.ratio == pytest.approx(found.pdserve / found.in_process)


async def test_an_answer_that_is_too_short_counts_for_nothing() -> None:
    both = Both(tokens=TOKENS - 1)
    with pytest.raises(BenchError, match="not 128"):
        await one_round(*both_sides(both), ours_first=True)


async def test_rest_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.0, 0.5, 0.5, 0.9, 0.9, 0.901])
    monkeypatch.setattr(program, "REST_WINDOW_S", 0.02)
    monkeypatch.setattr(program, "processor_s", lambda pids: next(used))
    await until_at_rest([1])
    assert next(used, None) is None
    ever = iter(range(1_000_000))
    monkeypatch.setattr(program, "processor_s", lambda pids: next(ever))
    monkeypatch.setattr(program, "REST_WITHIN_S", 0.05)
    with pytest.raises(BenchError, match="without work the processes still use"):
        await until_at_rest([1])

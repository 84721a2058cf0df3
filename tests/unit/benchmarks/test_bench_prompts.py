"""Synthesised prompts: deterministic, and shared exactly as far as the trace says."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.prompts import PromptMaker, TokenRange, ordinary_tokens
from benchmarks.trace import TraceMeta, TraceRequest

META = TraceMeta(name="t", block_size=4)


def _maker(
    *,
    seed: int = 0,
    digest: str = "d",
    token_range: TokenRange = TokenRange(10, 500),  # noqa: B008 - frozen
    block_size: int = 4,
    meta: TraceMeta = META,
) -> PromptMaker:
    return PromptMaker(
        meta, digest=digest, seed=seed, token_range=token_range, block_size=block_size
    )


def _shared(one: object, other: object) -> int:
    assert isinstance(one, list | tuple)
    assert isinstance(other, list | tuple)
    return sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )


@st.composite
def _rows(draw: st.DrawFn) -> tuple[int, list[TraceRequest]]:
    block_size = draw(st.integers(1, 6))
    paths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12))
    rows = [
        TraceRequest(
            0.0,
            (len(path) - 1) * block_size + draw(st.integers(1, block_size)),
            1,
            tuple(path),
        )
        for path in paths
    ]
    rows += [TraceRequest(0.0, draw(st.integers(1, 9)), 1) for _ in range(draw(st.integers(0, 4)))]
    return block_size, draw(st.permutations(rows))


@settings(deadline=None)
@given(_rows(), st.integers(0, 3))
def test_two_prompts_share_exactly_the_tokens_of_their_shared_blocks(
    made: tuple[int, list[TraceRequest]], seed: int
) -> None:
    block_size, rows = made
    # No more ids than there can be siblings, so that chance alone would let some agree.
    maker = _maker(seed=seed, block_size=block_size, token_range=TokenRange(10, 18))
    prompts = [maker.tokens(str(number), row) for number, row in enumerate(rows)]
    for prompt, row in zip(prompts, rows, strict=True):
        assert len(prompt) == row.input_tokens
        assert all(10 <= token < 18 for token in prompt)
    for (one, row), (other, another) in itertools.combinations(zip(prompts, rows, strict=True), 2):
        blocks = _shared(row.hash_ids or (), another.hash_ids or ())
        assert _shared(one, other) == min(blocks * block_size, len(one), len(other))


def test_a_vocabulary_smaller_than_the_siblings_still_parts_them_within_two_tokens() -> None:
    maker = _maker(token_range=TokenRange(0, 16), block_size=8)
    prompts = [maker.tokens("x", TraceRequest(0.0, 8, 1, (i,))) for i in range(16 * 16)]
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 256
    with pytest.raises(BenchError, match="--limit"):
        maker.tokens("x", TraceRequest(0.0, 8, 1, (256,)))


def test_later_rows_do_not_change_the_prompts_of_earlier_ones() -> None:
    rows = [TraceRequest(0.0, 7, 1, (i % 3, i)) for i in range(20)]
    all_of_them, few = _maker(), _maker()
    long = [all_of_them.tokens(str(i), row) for i, row in enumerate(rows)]
    assert [few.tokens(str(i), row) for i, row in enumerate(rows[:5])] == long[:5]


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"digest": "e"}, {"token_range": TokenRange(10, 499)}], ids=str
)
def test_another_seed_trace_or_vocabulary_gives_other_tokens(other: dict[str, object]) -> None:
    row = TraceRequest(0.0, 64, 1, tuple(range(16)))
    assert _maker().tokens("0", row) == _maker().tokens("0", row)
    changed = _maker(**other)  # type: ignore[arg-type]
    assert _shared(_maker().tokens("0", row), changed.tokens("0", row)) < 4


def test_equal_ids_of_two_sessions_give_different_tokens() -> None:
    maker = _maker(meta=TraceMeta(name="t", block_size=4, hash_scope="session"))
    one, same, other = (
        maker.tokens("0", TraceRequest(0.0, 8, 1, (1, 2), session_id=session)) for session in "aab"
    )
    assert one == same
    assert one[0] != other[0]


_PROGRAM = """
from benchmarks.prompts import PromptMaker, TokenRange
from benchmarks.trace import TraceMeta, TraceRequest
maker = PromptMaker(TraceMeta(name="t", block_size=4), digest="d", seed=3,
                    token_range=TokenRange(10, 500), block_size=4)
for i in range(5):
    print(maker.tokens(str(i), TraceRequest(0.0, 9, 1, (7, i, i + 8))))
print(maker.tokens("5", TraceRequest(0.0, 9, 1)))
"""


def test_every_process_makes_the_same_prompts() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(outputs) == 1
    # The tokens of a release are those of the next: results of different versions compare.
    assert outputs.pop().splitlines()[0] == GOLDEN_PROMPT


GOLDEN_PROMPT = "[310, 310, 336, 104, 310, 310, 366, 361, 310]"


@pytest.mark.parametrize(
    ("vocab_size", "low", "high"),
    [(16, 2, 14), (2048, 256, 1792), (32_000, 1000, 31_000), (128_256, 1000, 127_256)],
)
def test_both_ends_of_the_vocabulary_are_left_out(vocab_size: int, low: int, high: int) -> None:
    assert ordinary_tokens(vocab_size) == TokenRange(low, high)


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(BenchError, match="vocab_size is 15"):
        ordinary_tokens(15)

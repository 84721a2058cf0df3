"""What is learnt of an engine's steps: known costs are found again under noise, followed when they
change, and unknown until enough was seen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.step_moments import StepMoments, StepRecorder, StepShape, pooled
from pdserve.wire import moments_from_pb, moments_to_pb
from router.cost.least_squares import fit
from router.cost.step_model import Batch, PromptWork, fit_steps, prompt_work

# Seconds: a step, a prompt token, a pair of tokens, a decoding request, a token of its context.
GPU = (6e-3, 5e-5, 2e-9, 1e-4, 2e-8)
LAPTOP = (8e-3, 6e-4, 1e-7, 3e-3, 1e-6)


def seconds(costs: tuple[float, ...], shape: StepShape) -> float:
    step, token, pair, request, context = costs
    return (
        step
        + token * shape.prefill_tokens
        + pair * shape.prefill_pairs
        + request * shape.decode_reqs
        + context * shape.decode_kv_tokens
    )


def prompts(draw: random.Random) -> StepShape:
    tokens, ahead = draw.choice((30, 200, 700, 2048)), draw.randrange(0, 6000)
    return StepShape(tokens, tokens * (ahead + tokens / 2), ahead + tokens)


def decoding(draw: random.Random) -> StepShape:
    reqs = draw.randrange(1, 48)
    return StepShape(decode_reqs=reqs, decode_kv_tokens=reqs * draw.randrange(100, 4000))


def record(
    recorder: StepRecorder,
    costs: tuple[float, ...],
    shapes: list[StepShape],
    draw: random.Random,
    noise: float = 0.0,
    start: float = 0.0,
) -> None:
    for i, shape in enumerate(shapes):
        took = seconds(costs, shape) * draw.lognormvariate(0, noise)
        recorder.observe(shape, took, start + i * 0.05)


def learnt(
    costs: tuple[float, ...], noise: float, seed: int, *kinds: object, steps: int = 400
) -> StepMoments:
    draw, recorder = random.Random(seed), StepRecorder()
    shapes = [shape(draw) for _ in range(steps) for shape in kinds]  # type: ignore[operator]
    record(recorder, costs, shapes, draw, noise)
    return recorder.moments(steps * 0.05)


@settings(max_examples=25, deadline=None)
@given(
    costs=st.tuples(
        st.floats(1e-3, 3e-2),
        st.floats(1e-5, 1e-3),
        st.floats(1e-9, 1e-7),
        st.floats(5e-5, 3e-3),
        st.floats(1e-9, 1e-6),
    ),
    seed=st.integers(0, 1000),
)
def test_known_costs_are_found_again_under_noise(costs: tuple[float, ...], seed: int) -> None:
    model = fit_steps(learnt(costs, 0.1, seed, prompts, decoding), chunk_tokens=2048)
    draw = random.Random(seed + 1)
    for _ in range(20):
        for shape in (prompts(draw), decoding(draw)):
            assert model.step_s(shape) == pytest.approx(seconds(costs, shape), rel=0.2)
    assert all(x >= 0 for x in model.coefficients)
    assert model.error == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize("costs", [GPU, LAPTOP])
def test_without_noise_the_coefficients_are_the_costs(costs: tuple[float, ...]) -> None:
    model = fit_steps(learnt(costs, 0.0, 1, prompts, decoding))
    step, token, pair, request, context = model.coefficients
    found = (step, token / 1e3, pair / 1e6, request / 10, context / 1e4)
    assert found == pytest.approx(costs, rel=0.1)
    assert model.error < 0.01


def test_a_change_is_followed() -> None:
    draw, recorder = random.Random(3), StepRecorder()
    shapes = [kind(draw) for _ in range(300) for kind in (prompts, decoding)]
    record(recorder, GPU, shapes, draw, 0.05)
    slower = tuple(3 * x for x in GPU)
    record(recorder, slower, shapes, draw, 0.05, start=60.0)
    model = fit_steps(recorder.moments(100.0))
    for shape in shapes[:50]:
        assert model.step_s(shape) == pytest.approx(seconds(slower, shape), rel=0.25)


def test_pauses_of_the_machine_are_not_learnt() -> None:
    draw, recorder = random.Random(4), StepRecorder()
    for i in range(600):
        shape = decoding(draw)
        pause = 5.0 if i % 50 == 49 else 0.0
        recorder.observe(shape, seconds(GPU, shape) + pause, i * 0.05)
    model = fit_steps(recorder.moments(30.0))
    shape = StepShape(decode_reqs=20, decode_kv_tokens=20000)
    assert model.step_s(shape) == pytest.approx(seconds(GPU, shape), rel=0.25)


def test_what_is_done_most_does_not_wipe_out_what_is_done_seldom() -> None:
    draw, recorder = random.Random(5), StepRecorder()
    record(recorder, GPU, [prompts(draw) for _ in range(60)], draw)
    record(recorder, GPU, [decoding(draw) for _ in range(5000)], draw, start=3.0)
    model = fit_steps(recorder.moments(253.0))
    assert model.knows_prefill
    shape = StepShape(2048, 2048 * 1024, 2048)
    assert model.step_s(shape) == pytest.approx(seconds(GPU, shape), rel=0.1)


def test_age_makes_unknown_again() -> None:
    recorder = StepRecorder()
    record(recorder, GPU, [prompts(random.Random(6)) for _ in range(20)], random.Random(6))
    assert fit_steps(recorder.moments(2.0)).knows_prefill
    assert not fit_steps(recorder.moments(7200.0)).knows_prefill


def test_nothing_is_said_before_enough_was_seen() -> None:
    draw = random.Random(7)
    few = fit_steps(learnt(GPU, 0.0, 7, prompts, decoding, steps=4))
    assert not few.knows_prefill
    assert not few.knows_decode
    assert few.prefill_s(prompt_work(100)) is None
    assert fit_steps(StepMoments()).prefill_s(prompt_work(100)) is None
    only_decodes = fit_steps(learnt(GPU, 0.0, 7, decoding))
    assert only_decodes.knows_decode
    assert only_decodes.prefill_s(prompt_work(100)) is None
    short = StepRecorder()
    record(short, GPU, [StepShape(100, 5000, 100)] * 20, draw)
    assert fit_steps(short.moments(1.0)).prefill_s(prompt_work(400)) is not None
    assert fit_steps(short.moments(1.0)).prefill_s(prompt_work(4000)) is None


def test_a_new_worker_is_told_by_its_like_and_then_by_itself() -> None:
    prior = learnt(GPU, 0.02, 8, prompts, decoding)
    work = prompt_work(1000)
    expected = seconds(GPU, StepShape(work.tokens, work.pairs))
    assert fit_steps(StepMoments(), prior).prefill_s(work) == pytest.approx(expected, rel=0.1)
    slower = tuple(4 * x for x in GPU)
    own = fit_steps(learnt(slower, 0.02, 9, prompts, decoding), prior).prefill_s(work)
    assert own == pytest.approx(4 * expected, rel=0.25)


def test_a_decode_worker_learns_of_prefill_from_prefill_workers() -> None:
    decodes = learnt(GPU, 0.02, 10, decoding)
    prefills = learnt(GPU, 0.02, 11, prompts)
    model = fit_steps(decodes, pooled((decodes, prefills)), chunk_tokens=2048)
    work, beside = prompt_work(2000), Batch(16, 16000)
    mixed = StepShape(work.tokens, work.pairs, 2000, beside.reqs, beside.kv_tokens)
    assert model.prefill_s(work, beside) == pytest.approx(seconds(GPU, mixed), rel=0.15)


def test_prompts_are_cut_into_steps() -> None:
    model = fit_steps(learnt(GPU, 0.0, 12, prompts, decoding), chunk_tokens=512)
    assert model.steps_of(prompt_work(2000)) == 4
    assert model.steps_of(prompt_work(2000) + prompt_work(100)) == 5
    assert model.steps_of(PromptWork()) == 0
    assert model.prefill_s(PromptWork()) == 0.0
    one, two = model.prefill_s(prompt_work(500)), model.prefill_s(prompt_work(1000))
    assert one is not None
    assert two is not None
    assert two == pytest.approx(2 * one, rel=0.1)


def test_cached_tokens_are_not_computed_but_attended_to() -> None:
    assert prompt_work(1000, 600) == PromptWork(400, (1000**2 - 600**2) / 2, 1000)
    assert prompt_work(64, 64).tokens == 1


def test_moments_travel_and_are_checked() -> None:
    moments = learnt(GPU, 0.1, 13, prompts, decoding)
    assert moments_from_pb(moments_to_pb(moments)) == moments
    for name, value in (("yy", float("nan")), ("steps", -1.0), ("yy", -1.0)):
        message = moments_to_pb(moments)
        setattr(message.decode, name, value)
        with pytest.raises(InvalidRequest, match="decode"):
            moments_from_pb(message)
    message = moments_to_pb(moments)
    message.prefill.xy.append(1.0)
    with pytest.raises(InvalidRequest, match="prefill"):
        moments_from_pb(message)


def test_a_step_without_tokens_or_time_says_nothing() -> None:
    recorder = StepRecorder()
    recorder.observe(StepShape(), 1.0, 0.0)
    recorder.observe(StepShape(decode_reqs=1), 0.0, 0.0)
    assert recorder.moments(0.0) == StepMoments()


@given(
    rows=st.lists(
        st.tuples(*(st.floats(0, 100) for _ in range(2)), st.floats(-100, 100)), max_size=12
    )
)
def test_lines_are_fitted_as_all_else(rows: list[tuple[float, float, float]]) -> None:
    (a, b, d), p, q = (
        [sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1))],
        sum(r[0] * r[2] for r in rows),
        sum(r[1] * r[2] for r in rows),
    )
    # A third feature that never was takes the general way, and nothing else.
    general = fit(((a, b, 0.0), (b, d, 0.0), (0.0, 0.0, 0.0)), (p, q, 0.0))
    assert fit(((a, b), (b, d)), (p, q)) == pytest.approx(general[:2], rel=1e-6, abs=1e-6)

"""The steps that the self-test measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.observe.step_costs import StepRecorder, fit_costs, total
from workers.vllm.start import self_test

STEP_S, TOKEN_S = 0.01, 0.001


class Engine:
    """Takes STEP_S a step and TOKEN_S a token of a prompt. An answer is that of the step before."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.now, self.lengths = 0.0, list[int]()
        self._left = 0
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
            model_config=SimpleNamespace(
                max_model_len=4096, get_vocab_size=lambda: 100, enforce_eager=True
            ),
        )

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.lengths.append(len(prompt["prompt_token_ids"]))
        self._left = params.max_tokens + 1

    def has_unfinished_requests(self) -> bool:
        return self._left > 0

    def step(self) -> list[str]:
        self._left -= 1
        if self._left == self_test._TOKENS:
            return []
        is_first = self._left == self_test._TOKENS - 1
        self.now += STEP_S + TOKEN_S * self.lengths[-1] * is_first
        return ["output"]

    def reset_prefix_cache(self) -> None:
        pass


@pytest.mark.parametrize(("most", "lengths"), [(100, [16, 32, 64]), (4096, [16, 32, 64, 128, 256])])
def test_prompts_that_fit_in_one_step_are_measured(
    most: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = Engine(most), StepRecorder()
    monkeypatch.setattr(self_test, "time", SimpleNamespace(monotonic=lambda: engine.now))
    self_test.measure_steps(engine, recorder)
    assert engine.lengths == lengths
    moments = recorder.moments(engine.now)
    assert moments.prefill.steps == pytest.approx(len(lengths), rel=0.1)
    assert moments.decode.steps == pytest.approx(2 * len(lengths), rel=0.1)
    step, token, *_ = fit_costs(total((moments.prefill, moments.decode)))
    assert step + token * 0.1 == pytest.approx(STEP_S + TOKEN_S * 100, rel=0.1)


def test_a_slow_machine_measures_less(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(4096)
    monkeypatch.setattr(self_test, "_MEASURE_S", 0.05)
    monkeypatch.setattr(self_test, "time", SimpleNamespace(monotonic=lambda: engine.now))
    self_test.measure_steps(engine, StepRecorder())
    assert engine.lengths == [16, 32]

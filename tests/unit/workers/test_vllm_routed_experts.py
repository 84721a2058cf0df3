"""The experts of a request's tokens, joined from the steps that computed them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ConfigError
from pdserve.types import RoutedExperts
from workers.vllm.step.routed_experts import WANTED, ExpertsByRequest, check_captures, joined


class Scheduler:
    """Counts the outputs that it gets. State: the requests, by id."""

    def __init__(self, **requests: Any) -> None:
        self.requests = requests
        self.aux_output_connector: Any = None

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> int:
        return len(model_output.aux_output_connector_output or ())

    def step(self, **computed: tuple[int, int]) -> None:
        """Compute tokens of requests: (position of the first one, number). The experts of a token
        are its position."""
        scheduled = SimpleNamespace(num_scheduled_tokens={x: y[1] for x, y in computed.items()})
        wanted = self.aux_output_connector.build_connector_meta(scheduled, self.requests)
        rows = {
            request_id: (start, np.arange(start, start + count, dtype=np.uint8).reshape(-1, 1, 1))
            for request_id, (start, count) in computed.items()
            if request_id in wanted
        }
        output = SimpleNamespace(aux_output_connector_output=rows or None)
        assert self.update_from_output(scheduled, output) == len(rows)

    def taken(self, request_id: str) -> list[int] | None:
        """Add a token to a request, and return the experts that leave with it."""
        request = self.requests[request_id]
        request.num_tokens += 1
        request.num_output_tokens += 1
        rows = self.aux_output_connector.take_output(request, None)
        return None if rows is None else rows.ravel().tolist()


def request(tokens: int, made: int = 0, *, is_wanted: bool = True) -> Any:
    sampling = SimpleNamespace(extra_args={WANTED: {}} if is_wanted else None)
    return SimpleNamespace(
        request_id="a", num_tokens=tokens, num_output_tokens=made, sampling_params=sampling
    )


def test_experts_leave_with_the_token_after_theirs() -> None:
    scheduler = Scheduler(a=request(5), b=request(3, is_wanted=False))
    experts = ExpertsByRequest(scheduler)
    scheduler.step(a=(0, 3), b=(0, 3))  # a part of the prompt
    scheduler.step(a=(3, 2))
    assert scheduler.taken("a") == [0, 1, 2, 3, 4]
    scheduler.step(a=(5, 1))
    assert scheduler.taken("a") == [5]
    # The request was preempted, so it is computed again from its beginning.
    scheduler.step(a=(0, 7))
    assert scheduler.taken("a") == [6]
    experts.request_finished(scheduler.requests["a"])
    assert scheduler.taken("a") is None


def test_an_answer_that_continues_has_no_experts_of_tokens_that_left_elsewhere() -> None:
    scheduler = Scheduler(a=request(8, made=2))
    ExpertsByRequest(scheduler)
    scheduler.step(a=(4, 4))  # the beginning is cached
    assert scheduler.taken("a") == [7]


def test_experts_with_a_gap_are_not_returned() -> None:
    scheduler = Scheduler(a=request(5))
    ExpertsByRequest(scheduler)
    scheduler.step(a=(2, 3))
    assert scheduler.taken("a") is None


def test_ids_of_many_experts_have_two_bytes() -> None:
    parts = [np.array([[[300, 1]]], np.uint16)]
    shape = RoutedExperts(layers=1, per_token=2, id_bytes=2)
    assert joined(shape, parts).ids == bytes([44, 1, 1, 0])
    assert parts == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_moe": False}, "mixture-of-experts"),
        ({"enforce_eager": False}, "enforce_eager"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_engines_without_experts_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    values = {"is_moe": True, "enforce_eager": True, "runner_type": "generate", **changes}
    speculative = values.pop("speculative_config", None)
    stages = values.pop("pipeline_parallel_size", 1)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**values),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=speculative,
    )
    with pytest.raises(ConfigError, match=reason) as refused:
        check_captures(config)
    assert refused.value.field == "engine_args.enable_return_routed_experts"

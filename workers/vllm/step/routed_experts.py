"""The experts of each token of a mixture-of-experts model, on their way from the layers to the
deltas of a request. Tested with vLLM 0.32.0 (vllm/distributed/aux_output_connector/,
model_executor/layers/fused_moe/routed_experts_capturer.py, v1/worker/gpu_model_runner.py).

vLLM returns them only with its model runner V2, which has no CPU build, and stores them by the
blocks of its own prefix cache, so that its connectors for P/D are refused. Here the layers are
watched with vLLM's own capturer; each step returns the experts of what it computed; and the
scheduler's side joins them by position. A token's experts leave with the next token, so an answer
that moves to another engine needs nothing of what the first one knew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.platforms import current_platform

from pdserve.errors import ConfigError
from pdserve.types import RoutedExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig

ARGUMENT = "enable_return_routed_experts"  # vLLM's
WANTED = "pdserve_routed_experts"  # key in `extra_args` of a request
# Of the prompt and the answer of one request. A prompt's leave in one message.
MAX_BYTES = 32 << 20


def check_captures(config: VllmConfig) -> None:
    """Raise ConfigError if the experts of this engine's tokens cannot be returned."""
    model, parallel = config.model_config, config.parallel_config
    name = f"engine_args.{ARGUMENT}"
    reasons = {
        "needs a mixture-of-experts model": not model.is_moe or model.runner_type != "generate",
        "is implemented for engines on CPUs only": not current_platform.is_cpu(),
        "needs enforce_eager": not model.enforce_eager,
        "cannot be combined with speculative_config": config.speculative_config is not None,
        "needs pipeline_parallel_size 1": parallel.pipeline_parallel_size > 1,
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise ConfigError(f"{name} {reason}", field=name)


def capture_in(worker: Any) -> RoutedExperts:
    """Watch the layers of the model in this process, and add to the output of each step what
    `ExpertsByRequest` reads. Return the shape of a token's experts."""
    runner = worker.model_runner
    config = runner.vllm_config
    tokens = config.scheduler_config.max_num_batched_tokens
    capturer = RoutedExpertsCapturer(max_num_batched_tokens=tokens, vllm_config=config)
    bind_routed_experts_capturer(runner.get_model(), capturer)
    execute, sample = runner.execute_model, runner.sample_tokens
    computed: dict[str, tuple[int, np.ndarray]] = {}

    def execute_and_capture(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = execute(scheduler_output, *args, **kwargs)
        computed.clear()
        if wanted := scheduler_output.aux_output_connector_metadata:
            computed.update(_rows(capturer, runner.input_batch.req_ids, scheduler_output, wanted))
        return output

    def sample_and_add(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if computed:
            # With asynchronous scheduling, the output is inside of one that waits for the tokens.
            inner = getattr(output, "_model_runner_output", output)
            inner.aux_output_connector_output = dict(computed)
            computed.clear()
        return output

    runner.execute_model, runner.sample_tokens = execute_and_capture, sample_and_add
    layers, per_token = capturer.shape_per_token
    return RoutedExperts(layers, per_token, np.dtype(capturer.output_dtype_name).itemsize)


def _rows(
    capturer: Any, request_ids: Sequence[str], scheduler_output: Any, wanted: frozenset[str]
) -> dict[str, tuple[int, np.ndarray]]:
    """Return, for each request in `wanted`, the position of the first token that the step computed,
    and the experts of its tokens. The step has the requests in the order of `request_ids`."""
    cached = scheduler_output.scheduled_cached_reqs
    starts = {x.req_id: x.num_computed_tokens for x in scheduler_output.scheduled_new_reqs}
    starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    counts = scheduler_output.num_scheduled_tokens
    every = capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens).numpy()
    found, at = {}, 0
    for request_id in request_ids:
        count = counts.get(request_id, 0)
        if request_id in wanted:
            found[request_id] = starts[request_id], every[at : at + count].copy()
        at += count
    return found


@dataclass(slots=True)
class _Known:
    """The experts of the tokens at `start` and after."""

    start: int
    parts: list[np.ndarray] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.parts))


class ExpertsByRequest:
    """What vLLM's scheduler asks for experts (AuxOutputSchedulerConnector). State: those known and
    not returned yet, by request."""

    def __init__(self, scheduler: Any) -> None:
        self._known: dict[str, _Known] = {}
        update: Callable[..., Any] = scheduler.update_from_output

        def collect_and_update(scheduler_output: Any, model_output: Any) -> Any:
            self._collect(model_output.aux_output_connector_output or {})
            return update(scheduler_output, model_output)

        scheduler.update_from_output = collect_and_update
        scheduler.aux_output_connector = self

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> frozenset[str]:
        """Return the requests in a step whose experts are wanted."""
        wanted = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = requests[request_id]
            sampling = request.sampling_params
            if sampling is None or WANTED not in (sampling.extra_args or ()):
                continue
            wanted.append(request_id)
            if request_id not in self._known:
                # The tokens before those that were generated elsewhere have left with them.
                start = request.num_tokens - 1 if request.num_output_tokens else 0
                self._known[request_id] = _Known(start)
        return frozenset(wanted)

    def _collect(self, computed: dict[str, tuple[int, np.ndarray]]) -> None:
        """Take what a step computed. A preempted request computes tokens again."""
        for request_id, (start, rows) in computed.items():
            known = self._known.get(request_id)
            if known is not None and start <= known.end:
                known.parts.append(rows[known.end - start :])

    def take_output(self, request: Any, _: object) -> np.ndarray | None:
        """Return the experts of all tokens before the last one, without those returned before. None
        if they are not wanted, or some are not known."""
        known = self._known.get(request.request_id)
        if known is None or known.end < request.num_tokens - 1:
            return None
        rows: np.ndarray = np.concatenate(known.parts)
        self._known[request.request_id] = _Known(known.end)
        return rows

    def request_finished(self, request: Any) -> None:
        self._known.pop(request.request_id, None)

    def reset(self) -> None:
        """Called when the prefix cache is emptied, which changes nothing here."""


def joined(shape: RoutedExperts, parts: list[np.ndarray]) -> RoutedExperts:
    """Return what vLLM has collected for a delta, and empty `parts`."""
    ids = b"".join(part.astype(f"<u{shape.id_bytes}", copy=False).tobytes() for part in parts)
    parts.clear()
    return RoutedExperts(shape.layers, shape.per_token, shape.id_bytes, ids)

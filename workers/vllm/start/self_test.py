"""Self-test: the engine computes a few tokens before the worker registers.

Some settings that vLLM accepts fail in the first step, or only if several prompts share a step, for
example a gated delta net in float32 on a CPU. A worker with such settings must not get requests.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import SamplingParams

from pdserve.errors import WorkerFailed
from pdserve.observe.step_costs import StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.pooling_params import PoolingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from pdserve.observe.step_costs import StepRecorder

logger = logging.getLogger(__name__)

_SALT = "pdserve-self-test"  # no request shares a prefix with these prompts
_TOKENS = 3
_SHORT = 5
_LIMIT_S = 300.0  # kernels may be compiled
_MAX_BLOCK = 1024  # longer prompts take long on a CPU
# Lengths of measured prompts. With two workers these are enough steps to fit the router's cost
# model, which then predicts prompts up to eight times the longest.
_MEASURED = (16, 32, 64, 128, 256)
_MEASURE_S = 5.0


def check_computes(engine: LLMEngine, pooling: Callable[[int], PoolingParams] | None) -> None:
    """Compute a short prompt and, while it decodes, two prompts longer than a block in one step.
    `pooling` maps a prompt length to the parameters of a pooling model. Raises WorkerFailed with
    the reason."""
    config = engine.vllm_config
    block = config.cache_config.block_size
    more = block if block <= _MAX_BLOCK else 0
    longest = config.model_config.max_model_len - _TOKENS
    alone, *together = (min(longest, x) for x in (_SHORT, _SHORT + more, _SHORT + more + 1))
    began = time.monotonic()

    def add(name: str, length: int) -> None:
        _add(engine, name, length, None if pooling is None else pooling(length))

    try:
        add("alone", alone)
        engine.step()
        for number, length in enumerate(together):
            add(str(number), length)
        for _ in _steps(engine, began):
            pass
    except Exception as error:
        raise WorkerFailed(f"the engine cannot compute: {type(error).__name__}: {error}") from error
    engine.reset_prefix_cache()
    logger.info("the engine computed 3 prompts in %.2f s", time.monotonic() - began)


def measure_steps(engine: LLMEngine, recorder: StepRecorder) -> None:
    """Compute a few prompts alone and record their steps, so that a router can predict from the
    first request on. Ends early on a slow machine. Raises TimeoutError."""
    config, began = engine.vllm_config, time.monotonic()
    longest = min(
        config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len - _TOKENS
    )
    for length in (x for x in _MEASURED if x <= longest):
        at, tokens = time.monotonic(), 0
        if at - began > _MEASURE_S:
            break
        _add(engine, f"{length} tokens", length, None)
        for has_outputs in _steps(engine, began):
            if not has_outputs:  # as the first step with asynchronous scheduling
                continue
            now = time.monotonic()
            if tokens:
                shape = StepShape(decode_reqs=1, decode_kv_tokens=length + tokens)
            else:
                shape = StepShape(length, length**2 / 2, length)
            recorder.observe(shape, now - at, now)
            at, tokens = now, tokens + 1
    engine.reset_prefix_cache()


def _steps(engine: LLMEngine, began: float) -> Iterator[bool]:
    """Run steps until no request is left, and yield whether each returned outputs. Raises
    TimeoutError _LIMIT_S after `began`."""
    while engine.has_unfinished_requests():
        if time.monotonic() - began > _LIMIT_S:
            raise TimeoutError(f"no answer within {_LIMIT_S:g} s")
        yield bool(engine.step())


def _add(engine: LLMEngine, name: str, length: int, pooling: PoolingParams | None) -> None:
    vocab = engine.vllm_config.model_config.get_vocab_size()
    ids = [1 + 37 * i % (vocab - 1) for i in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    if not engine.vllm_config.model_config.enforce_eager:
        # Else the sampler's helpers would be compiled in the first step that needs them, while all
        # streams of the engine wait: 14 s on a CPU.
        params = SamplingParams(
            temperature=1.0, top_p=0.9, top_k=2, logprobs=1, max_tokens=_TOKENS, ignore_eos=True
        )
    # The name is in the salt, so that no prompt has a prefix of another.
    prompt = tokens_input(ids, cache_salt=f"{_SALT}/{name}")
    engine.add_request(f"self-test/{name}", prompt, pooling or params)

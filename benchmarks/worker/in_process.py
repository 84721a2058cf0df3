"""vLLM's own AsyncLLM, driven in its process: `python -m benchmarks.worker.in_process SETTINGS`.

SETTINGS is JSON: `model`, `engine_args`, `core`. Each line of standard input is a round, in JSON
its `prompts` and the `tokens` of each answer; the answer is a line of JSON with the seconds at
which each token of each came. vLLM's engine core gets `core` alone, as the worker has it; the
process that drives it may use all.
Tried with vLLM 0.32.0.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

# As the worker has them (workers/vllm_env.py).
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine core runs the model itself, as in the worker: else vLLM gives the model a process
    # more on the same core, which spins for a second after each step, and into the next round.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


async def _serve(settings: dict[str, Any], cores: set[int]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=settings["model"], disable_log_stats=False, **settings["engine_args"]
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        _spread(cores)
        _say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            _say(json.dumps(await _round(engine, **json.loads(line))))
    finally:
        engine.shutdown()


def _spread(cores: set[int]) -> None:
    """Every thread of this process may use `cores`."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


async def _round(engine: AsyncLLM, prompts: Sequence[list[int]], tokens: int) -> list[list[float]]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    begun = time.monotonic()

    async def ask(prompt: list[int]) -> list[float]:
        request_id = f"{begun}-{id(prompt)}"
        times: list[float] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, request_id):
            times += [time.monotonic() - begun] * len(output.outputs[0].token_ids)
        return times

    answers = await asyncio.gather(*map(ask, prompts))
    assert {len(times) for times in answers} == {tokens}
    return answers


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.argv[1])
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {settings["core"]})
    os.environ.update(_ENVIRONMENT)
    asyncio.run(_serve(settings, cores))


if __name__ == "__main__":
    main()

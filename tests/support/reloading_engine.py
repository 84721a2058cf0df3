"""One engine of vLLM that loads other weights in the middle of an answer, and goes on with its KV:

    python -m tests.support.reloading_engine MODEL NEW AT COUNT TARGET TOKEN...

writes the COUNT tokens after the prompt TOKEN... to TARGET. Those from AT on are sampled with the
weights in NEW. Nothing of pdserve steps it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pdserve.model.weight_deltas import find_files
from tests.support.engines import settings
from workers.vllm.start.settings import apply_environment


def main(model: str, new: str, at: str, count: str, target: str, *prompt: str) -> None:
    chosen = settings(Path(model), max_num_batched_tokens=256)
    apply_environment(chosen)
    from vllm.sampling_params import SamplingParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    from workers.vllm.patches.reload import reload_in
    from workers.vllm.start.args import make_config

    context = UsageContext.OPENAI_API_SERVER
    config, _ = make_config(chosen, context)
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False, usage_context=context)
    sampling = SamplingParams(temperature=0.0, max_tokens=int(count), ignore_eos=True)
    engine.add_request("one", {"prompt_token_ids": [int(x) for x in prompt]}, sampling)
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        if len(tokens) == int(at):
            files = find_files(Path(new), field="path")
            assert not any(engine.collective_rpc(reload_in, args=(files,)))
        for output in engine.step():
            tokens = [*output.outputs[0].token_ids]
    Path(target).write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])

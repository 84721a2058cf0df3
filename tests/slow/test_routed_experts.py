"""The experts of each token on real vLLM: through prefill and decode, after a kill, and with a
cached prefix they are those of one engine."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.support.engine_pair import CHUNK, params, prompt
from tests.support.engines import EngineAnswer
from tests.support.model_kind_checks import kind_engines
from tests.support.model_kinds import make_kind
from workers.vllm.step.routed_experts import ARGUMENT

if TYPE_CHECKING:
    from pathlib import Path

PER_TOKEN = 4 * 2  # layers and experts of the kind "Qwen3-MoE"


async def test_experts_of_a_joined_answer_are_those_of_one_engine(tmp_path: Path) -> None:
    model = await make_kind(tmp_path, "Qwen3-MoE")
    sampling = params(24, ignore_eos=True, routed_experts=True)
    # More than one chunk, so that experts of a part of the prompt wait for the rest.
    ids, other = prompt(CHUNK + 70), prompt(40, seed=1)
    async with kind_engines(model, **{ARGUMENT: True}) as engines:
        pair, reference = engines.pair, engines.reference
        expected = await reference.run(ids, sampling)
        assert len(expected.experts) == (len(ids) + 24 - 1) * PER_TOKEN
        assert len(set(expected.experts)) > 1
        # The prompt is cached there now. Without the cache, its experts are the same again.
        assert (await reference.run(ids, sampling)).experts == expected.experts
        assert (await reference.run(ids, params(4))).experts == b""

        streams = pair.submit(ids, sampling), pair.submit(other, sampling)
        answer = await pair.collect(streams[0])
        found = b"".join(part.experts for part in pair.last)
        assert (answer.token_ids, found) == (expected.token_ids, expected.experts)
        await pair.collect(streams[1])
        found = b"".join(part.experts for part in pair.last)
        assert found == (await reference.run(other, sampling)).experts

        # The decode engine is killed after some tokens. The answer continues on the other one,
        # which has a part of the prompt in its cache.
        first, second = pair.submit(ids, sampling)
        await pair.decode.until(lambda: len(pair.decode.answer(second).token_ids) >= 8)
        delivered = EngineAnswer(pair.decode.answer(second).deltas[:8])
        os.kill(pair.decode.pid, signal.SIGKILL)
        parts = [await pair.prefill.collect(first), delivered]
        tokens = tuple(x for part in parts for x in part.token_ids)
        parts.append(await pair.prefill.run(ids, sampling, resume=tokens))
        assert tuple(x for part in parts for x in part.token_ids) == expected.token_ids
        assert b"".join(part.experts for part in parts) == expected.experts

"""Prefill and decode engines with pipeline stages give the tokens of one aggregated engine, and
fail as one if a stage's process dies. A live move goes from decode to prefill: each pair shows both
directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pdserve.client import Client
from pdserve.model.tokenizer import ChatMessage
from pdserve.types import Constraint, SamplingParams, StructuredOutput
from tests.support import model_kind_checks as checks
from tests.support.engine_pair import params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import KINDS, make_kind
from tests.support.model_matrix import STAGED
from tests.support.pdserve_up import UpProcess
from tests.support.served_demo import EXPLAIN
from tests.support.served_up import ServedUp
from tests.support.tiny_models import ModelSpec, make_model

if TYPE_CHECKING:
    from pathlib import Path

TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
TWO_HEADS: dict[str, Any] = {"tensor_parallel_size": 2}
UNEVEN = {"VLLM_PP_LAYER_PARTITION": "3,1"}
# Less than a block, a window and more, and several chunks. Engines of one stage show every edge.
LENGTHS = (3, checks.WINDOW - 1, checks.WINDOW + 1, 257, 1200)


# Environment of prefill, which has two stages, and engine arguments of decode.
PAIRS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "Llama": ({}, TWO_HEADS),
    "DeepSeek-V2": ({}, {}),
    # The last stage of prefill has one layer: with full attention, so none of the windows.
    "Gemma-2": (UNEVEN, TWO_STAGES),
    # The first stage of prefill has only chunks, of which the next token may need no block.
    "Llama-4": (UNEVEN, {}),
}


@pytest.mark.parametrize("name", STAGED)
async def test_stages_hand_over_their_layers_exactly(name: str, tmp_path: Path) -> None:
    prefill_env, decode = PAIRS[name]
    model = await make_kind(tmp_path / "model", name)
    more = {**KINDS[name].engine_args, "prefill": TWO_STAGES, "decode": decode}
    async with checks.kind_engines(model, prefill_env=prefill_env, **more) as of:
        engines = of.pair.prefill.info.kv, of.pair.decode.info.kv
        assert len({kv.compatibility for kv in engines if kv is not None}) == 1
        await checks.check_lengths(of, LENGTHS)
        await checks.check_prefix_hits(of, tails=(40,))
        await checks.check_together(of)
        await checks.check_moves(of)
        await checks.check_resumed(of)
        await checks.check_cancels(of)
        if decode == TWO_STAGES:
            await check_killed_stage(of)


def last_rank(pid: int) -> psutil.Process:
    """Return the process of the last rank of this engine, which is of the last stage. Ranks are
    forks of a fork of the engine's process."""
    found = psutil.Process(pid).children(recursive=True)
    return max((rank for rank in found if rank.ppid() != pid), key=lambda rank: rank.pid)


async def check_killed_stage(of: checks.KindEngines) -> None:
    """Kill the last stage of the decode engine: the whole engine fails, and the prefill engine
    continues after its tokens."""
    pair, ids, victim = of.pair, prompt(1200, 50), last_rank(of.pair.decode.pid)
    streams = pair.submit(ids, checks.endless(ids))
    decoding = pair.decode.answer(streams[1])
    await pair.decode.until(lambda: len(decoding.token_ids) >= 5)
    victim.kill()
    await pair.decode.until(lambda: pair.decode.failure is not None)
    await checks.check_continues(of, ids, streams)
    await pair.prefill.until_empty()


async def test_stages_of_two_ranks_hand_over_both_splits_exactly(tmp_path: Path) -> None:
    model = await make_kind(tmp_path / "model", "Llama")
    async with checks.kind_engines(
        model, prefill={**TWO_STAGES, **TWO_HEADS}, decode=TWO_STAGES
    ) as of:
        await of.check(prompt(1200), "four ranks to two")
        await checks.check_moves(of)
        await checks.check_cancels(of)


@pytest.mark.parametrize("ranks", [TWO_HEADS, TWO_STAGES])
async def test_an_aggregated_engine_of_two_ranks_continues_answers(
    ranks: dict[str, Any], tmp_path: Path
) -> None:
    """It has no KV connector, whose metadata would tell the ranks the tokens so far."""
    model = make_model(tmp_path / "tiny", ModelSpec())
    engine = await EngineProcess.start(settings(model, max_num_batched_tokens=256, **ranks))
    constraint = StructuredOutput(Constraint.REGEX, "[ab]{12}")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.5, "ignore_eos": True},
        {"structured_output": constraint},
    ]
    try:
        for kind in kinds:
            ids, sampling = prompt(300, 3), params(24, **kind)
            whole = await engine.run(ids, sampling)
            assert len(whole.token_ids) > 7
            tail = await engine.run(ids, sampling, resume=whole.token_ids[:7])
            assert tail.token_ids == whole.token_ids[7:]
        await engine.until_empty()
    finally:
        await engine.close()


async def test_serve_with_two_stages_hands_over(tmp_path: Path) -> None:
    flags = ["--host", "127.0.0.1", "--port", "0", "--decode.pipeline-parallel-size", "2"]
    up = UpProcess(tmp_path, "demo", *flags, command="serve")
    try:
        stack = ServedUp(up)
        async with Client(stack.grpc) as client:
            sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            messages = [ChatMessage("user", EXPLAIN)]
            deltas = [d async for d in client.generate(messages, sampling)]
        receipt = deltas[-1].receipt
        assert receipt is not None
        assert (receipt.decode_worker, receipt.fallbacks) == ("decode-0", ())
        assert receipt.transfer_blocks > 0
        decode = await stack.status("decode-0")
        assert [list(x.layers) for x in decode.info.kv.stage_layers] == [[2], [2]]
    finally:
        up.close()

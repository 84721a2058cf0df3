"""Compiled models on a CPU: a later start reads the code of the first, and hand-overs are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.settings import ConnectorConfig
from pdserve.types import SamplingParams
from tests.support.engine_pair import prompt
from tests.support.engines import EngineProcess, settings
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = prompt(100, 1)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


async def test_a_second_start_reads_compiled_code_and_takes_over_exactly(
    tiny_model: Path, tmp_path: Path
) -> None:
    def compiled() -> dict[Path, int]:
        files = (tmp_path / "torch_compile_cache" / "torch_aot_compile").glob("*/*/model")
        return {x: x.stat().st_mtime_ns for x in files}

    engines = []
    for name in ("prefill", "decode"):
        before = compiled()
        engine = await EngineProcess.start(
            settings(
                tiny_model,
                kv=ConnectorConfig(transports=("shm",)),
                instance_id=name,
                enforce_eager=False,
            ),
            env={"VLLM_CACHE_ROOT": str(tmp_path)},
        )
        engines.append(engine)
    prefill, decode = engines
    assert before
    # A start that cannot use the file compiles and writes it again.
    assert compiled() == before
    alone = await prefill.run(PROMPT, SAMPLING)
    moving = decode.submit(PROMPT, SAMPLING, prefill.decode_phase("moved"))
    first = await prefill.run(PROMPT, SAMPLING, PrefillPhase("moved"))
    rest = await decode.collect(moving)
    assert rest.error is None
    assert (*first.token_ids, *rest.token_ids) == alone.token_ids
    for engine in engines:
        await engine.close()

"""Compiled models on a CPU: a later start reads the code of the first, and hand-overs are exact."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import psutil

from kv_transfer.settings import ConnectorConfig
from pdserve.types import SamplingParams
from tests.support.commands import ROOT
from tests.support.engine_pair import prompt
from tests.support.engines import EngineProcess, settings
from tests.support.pdserve_up import UpProcess
from tests.support.served_up import ServedUp
from tests.support.timeouts import START_S, wait_until
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextmanager
def served(model: Path, folder: Path, *options: str, **env: str) -> Iterator[ServedUp]:
    """Serve a model on real engines until the context exits, then press Ctrl-C. No process is left,
    nor one that makes code. Services in one folder share a cache."""
    usual = ROOT / "tests" / "support" / "usual_priority"
    env = {"VLLM_CACHE_ROOT": str(folder / "cache"), "PYTHONPATH": str(usual), **env}
    words = ["--model", str(model), "--http-port", "0", "--grpc-port", "0", *options]
    words += ["--set", "worker.engine_args.dtype=float32", "--set", "router.policy=least_loaded"]
    words += ["--set", f"worker.engine_args.kv_cache_memory_bytes={64 << 20}"]
    up = UpProcess(Path(mkdtemp(dir=folder)), *words, env={**os.environ, **env}, compiles=True)
    try:
        yield ServedUp(up)
        for child in psutil.Process(up.process.pid).children(recursive=True):
            with suppress(ProcessLookupError):
                up.watch([child.pid])
        up.send(signal.SIGINT)
        assert up.wait() == 0, up.output
        assert up.survivors() == []
    finally:
        up.close()


def codes(folder: Path) -> dict[Path, int]:
    """Return the times of the files with code in the cache."""
    return {x: x.stat().st_mtime_ns for x in folder.glob("cache/torch_compile_cache/*/*/*/model")}


async def answer(service: ServedUp) -> str:
    async with service.client() as client:
        done = await client.completions.create(
            model=service.ready["model"],
            prompt=list(PROMPT),
            max_tokens=12,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )
    return done.choices[0].text


async def kinds(service: ServedUp) -> set[str]:
    return {x.info.settings["enforce_eager"] for x in (await service.statuses()).values()}


async def test_a_first_start_is_eager_and_the_next_runs_the_code_that_it_made(
    tiny_model: Path, tmp_path: Path
) -> None:
    with served(tiny_model, tmp_path) as service:
        assert await kinds(service) == {"True"}
        service.up.wait_for_line("compiled code is made", within_s=START_S)
    made = codes(tmp_path)
    assert made
    with served(tiny_model, tmp_path) as service:
        service.up.wait_for_line("serves with compiled code")
        assert await kinds(service) == {"False"}
        through_both = await answer(service)
    compiled = ("--set", "worker.compilation=compiled")
    pools = ("--prefill", "0", "--decode", "0", "--aggregated", "2")
    with served(tiny_model, tmp_path, *compiled, *pools) as service:
        assert await answer(service) == through_both
    assert made.items() <= codes(tmp_path).items()  # that of an engine without KV plane is another
    # Code that is there and cannot be loaded: all start eagerly, and it is made again.
    for file in codes(tmp_path):
        file.write_bytes(bytes(file.stat().st_size))
    with served(tiny_model, tmp_path) as service:
        service.up.wait_for_line("did not start with compiled code")
        assert await kinds(service) == {"True"}
        assert await answer(service)


async def test_ctrl_c_ends_what_makes_code(tiny_model: Path, tmp_path: Path) -> None:
    began, compiler = tmp_path / "began", tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\ntouch {began}\nexec sleep infinity\n")
    compiler.chmod(0o700)
    with served(tiny_model, tmp_path, CXX=str(compiler)):
        await wait_until(began.exists, within_s=START_S)
    assert list(tmp_path.glob("cache/pdserve/*.json")) == []

"""vLLM's servers behind vllm-router as a variant: commands, reported settings, start and end."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.cli import register
from benchmarks.client import HttpTarget
from benchmarks.commands import prepare
from benchmarks.compare import vllm_stack
from benchmarks.compare.fairness import differences
from benchmarks.compare.run import CompareSettings, run_compare
from benchmarks.compare.variants import Variant, parse_variants
from benchmarks.compare.vllm_stack import (
    STACKS,
    Programs,
    StackConfig,
    VllmStack,
    check_programs,
    polling_threads,
    router_command,
    server_command,
    settings_of_servers,
    stack_config,
)
from benchmarks.errors import BenchError
from benchmarks.progress import Progress
from benchmarks.service import LocalService, with_children
from pdserve.config import load_config, to_mapping
from pdserve.demo import MODEL_DIR
from tests.support.fake_openai import FakeOpenAI
from tests.support.vllm_stand_in import BLOCKS, options_of, report

STAND_IN = (sys.executable, "-m", "tests.support.vllm_stand_in")
MARK = "VLLM_STAND_IN_OF"
ROOT = Path(__file__).resolve().parents[3]


def config(name: str = "vllm-pd", **keys: Any) -> StackConfig:
    cores = sorted(os.sched_getaffinity(0))
    changes = {f"worker.engine_args.{key}": value for key, value in keys.items()}
    worker = load_config(None, {"worker.model_names": ["smollm2"], **changes}).worker
    found = stack_config(STACKS[name], (cores[0], cores[-1]), worker)
    programs = Programs(server=(*STAND_IN, "server"), router=(*STAND_IN, "router"))
    return replace(found, programs=programs)


def compare_args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    return parser.parse_args(["bench", "compare", *words])


def reports(*configs: StackConfig) -> list[dict[str, Any]]:
    """Return what servers with these configurations report."""
    commands = [server_command(each, each.roles[0], 1) for each in configs]
    return [{**report(options_of(words)), "version": "0.32.0"} for words in commands]


def test_servers_have_the_engine_arguments_of_workers() -> None:
    stack = config(kv_cache_memory_bytes=1 << 28, enforce_eager=False)
    words = server_command(stack, "prefill", 8101)
    options = options_of(words)
    assert f"--model={MODEL_DIR}" in words
    assert {"--no-enforce-eager", "--enable-prefix-caching", "--port=8101"} <= set(words)
    assert options["kv-cache-memory-bytes"] == str(1 << 28)
    assert (options["block-size"], options["max-num-batched-tokens"]) == ("32", "2048")
    assert json.loads(options["limit-mm-per-prompt"])["image"] == 8
    assert json.loads(options["kv-transfer-config"])["kv_connector"] == "NixlConnector"
    assert "kv-transfer-config" not in options_of(server_command(stack, "aggregated", 1))


@pytest.mark.parametrize(
    ("kind", "is_eager"), [("auto", True), ("eager", True), ("compiled", False)]
)
def test_all_arms_run_the_model_alike(kind: Any, is_eager: bool, tmp_path: Path) -> None:
    whole = load_config(None, {"worker.compilation": kind})
    stack = stack_config(STACKS["vllm-pd"], (0, 1), whole.worker)
    assert stack.engine_args["enforce_eager"] is is_eager
    ours = LocalService("1P1D", to_mapping(whole), tmp_path).config["worker"]
    assert ours["compilation"] == ("eager" if is_eager else "compiled")
    args = {"worker.engine_args.enforce_eager": False}
    own = LocalService("1P1D", to_mapping(load_config(None, args)), tmp_path).config["worker"]
    assert own["compilation"] == "auto"


def test_the_router_knows_the_roles_of_the_servers() -> None:
    apart = router_command(config("vllm-pd"), ["http://a", "http://b"], (1, 2))
    assert apart[-5:] == [
        "--vllm-pd-disaggregation",
        *["--prefill", "http://a", "--decode", "http://b"],
    ]
    alike = router_command(config("vllm-2a"), ["http://a", "http://b"], (1, 2))
    assert alike[-3:] == ["--worker-urls", "http://a", "http://b"]
    assert "--vllm-pd-disaggregation" not in alike


def test_settings_are_those_that_the_servers_report() -> None:
    pair = config("vllm-2a")
    found = settings_of_servers(reports(pair, pair), pair, 2)
    vocabulary = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    assert found.kv_cache_tokens == 2 * 32 * (BLOCKS - 1)
    assert (found.workers, found.cores) == ({"aggregated": 2}, 2)
    assert found.of_workers["compilation_mode"] == ("NONE",)
    assert found.of_workers["vocab_size"] == (str(vocabulary),)
    assert differences({"a": found, "b": found}) == {}


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("dtype", "float32", {"dtype": "a bfloat16, b bfloat16/float32"}),
        ("max_num_batched_tokens", 512, {"max_num_batched_tokens": "a 2048, b 2048/512"}),
        (
            "enforce_eager",
            False,
            {
                "enforce_eager": "a True, b False/True",
                "compilation_mode": "a NONE, b DYNAMO_TRACE_ONCE/NONE",
            },
        ),
    ],
)
def test_a_server_that_differs_is_named(
    argument: str, value: object, named: dict[str, str]
) -> None:
    same, other = config(), config(**{argument: value})
    one = settings_of_servers(reports(same, same), same, 2)
    two = settings_of_servers(reports(same, other), same, 2)
    assert differences({"a": one, "b": two}) == named


def test_a_report_of_another_form_is_refused() -> None:
    with pytest.raises(BenchError, match="of another form: KeyError"):
        settings_of_servers([{"vllm_config": {}, "version": "1"}], config(), 2)


def test_threads_that_poll_are_found_but_for_the_main_one() -> None:
    assert polling_threads({1: 2.0, 2: 1.9, 3: 0.01}, 2.0, main=1) == [2]
    assert polling_threads({1: 0.2, 2: 0.19, 3: 0.0}, 2.0, main=1) == [2]
    assert polling_threads({1: 0.0, 2: 0.01}, 2.0, main=1) == []


@pytest.mark.parametrize(
    ("has_router", "package", "message"),
    [
        (False, "", "pip install vllm-router==0.1.17"),
        (True, "nixl", "has no nixl: `pip install nixl`"),
        (True, "vllm", "has no vllm: `pip install vllm`"),
    ],
)
def test_a_missing_program_is_refused_with_what_to_install(
    has_router: bool, package: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_stack, "is_cpu_build", lambda: True)
    monkeypatch.setattr(vllm_stack.shutil, "which", lambda _name: "x" if has_router else None)
    monkeypatch.setattr(vllm_stack, "find_spec", lambda name: None if name == package else "x")
    with pytest.raises(BenchError, match=message):
        check_programs("vllm-pd")


def test_a_variant_of_vllm_takes_no_other_keys_and_no_other_engine() -> None:
    with pytest.raises(BenchError, match=r"vllm-pd takes only keys of worker\.engine_args\."):
        parse_variants(["2A", "vllm-pd"], ["vllm-pd:router.policy=round_robin"])
    with pytest.raises(BenchError, match="--engine fake: vllm-2a serves with vLLM"):
        prepare(compare_args("--arms", "2A,vllm-2a", "--engine", "fake"))


@pytest.fixture
def in_this_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.chdir(ROOT)  # where the stand-in is found
    monkeypatch.setattr(vllm_stack, "_IDLE_S", 0.01)
    monkeypatch.setattr(vllm_stack, "_END_S", 0.01)  # the children of the stand-in do not end


def started_by(tmp_path: Path) -> list[psutil.Process]:
    """Return the processes of a test that run, by their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(tmp_path):
                found.append(process)
    return [x for x in found if x.pid != os.getpid()]


@pytest.mark.usefixtures("in_this_tree")
async def test_a_stack_starts_moves_its_workers_and_leaves_nothing(tmp_path: Path) -> None:
    own = config()
    stack = VllmStack("vllm-pd", own, tmp_path)
    try:
        await stack.start()
        assert (await stack.settings()).workers == {"prefill": 1, "decode": 1}
        assert await stack.problem() is None
        servers = [x["pid"] for x in stack.ready["workers"]]
        assert len(started_by(tmp_path)) == 7
        for pid, cores in zip(servers, own.cores, strict=True):
            (_, core, worker) = with_children([pid])
            assert os.sched_getaffinity(worker.pid) == set(cores)
            assert os.sched_getaffinity(core.pid) == os.sched_getaffinity(0)
    finally:
        await stack.stop()
    assert started_by(tmp_path) == []
    assert stack.ready == {}


@pytest.mark.usefixtures("in_this_tree")
async def test_a_server_that_fails_ends_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    own = config()
    server = (*own.programs.server, f"--one-fails={tmp_path / 'first'}")
    own = replace(own, programs=replace(own.programs, server=server))
    stack = VllmStack("vllm-pd", own, tmp_path)
    with pytest.raises(BenchError, match=r"(?s)did not start:.*no memory is left for the KV cache"):
        await stack.start()
    await stack.stop()
    assert started_by(tmp_path) == []
    assert stack.ready == {}


@pytest.mark.usefixtures("in_this_tree")
async def test_with_a_stack_only_one_variant_runs_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Seen(VllmStack):
        async def start(self) -> None:
            seen.append(f"{self.name} starts")
            await super().start()

        async def stop(self) -> None:
            await super().stop()
            seen.append(f"{self.name} has ended")

    monkeypatch.setattr("benchmarks.compare.run.VllmStack", Seen)
    settings = CompareSettings(
        trace="chat", baseline="peer", requests=2, rounds=1, rate_per_s=50.0, api="http"
    )
    peer = FakeOpenAI(fault=lambda _number: seen.append("peer is asked"))
    with Progress() as progress:
        async with peer.serve():
            variants = [
                Variant("pair", is_vllm=True, stack=config()),
                Variant("peer", url=peer.url),
            ]
            results = run_compare(settings, variants, HttpTarget, progress, directory=tmp_path)
            *_, last = [result async for result in results]
    turn = ["pair starts", "pair has ended"]
    assert seen[:4] == turn * 2
    assert set(seen[4:]) == {"peer is asked"}
    assert last.is_complete
    pair, _ = last.measurements
    assert [record.status for record in pair.records] == ["ok", "ok"]
    assert pair.processor.workers_s is not None
    assert pair.processor.idle_s == 0.0

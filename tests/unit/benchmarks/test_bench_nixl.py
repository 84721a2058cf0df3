"""vLLM's own P/D as an arm: how its servers are started, and what is read of their settings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.compare import nixl
from benchmarks.compare.nixl import described
from benchmarks.compare.plain_serve import command, environment, options
from benchmarks.errors import BenchError
from pdserve.config import load_config, to_mapping

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = {
    "model": "/model",
    "name": "m",
    "port": 1234,
    "kv_role": "kv_producer",
    "engine_args": {"max_num_seqs": 8, "enable_prefix_caching": False},
}
# As /server_info tells it, and more.
CONFIG: dict[str, Any] = {
    "scheduler_config": {
        "max_num_batched_tokens": 2048,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "max_num_seqs": 64,
    },
    "compilation_config": {"mode": 0, "cudagraph_mode": [2, 1]},
    "model_config": {
        "quantization": None,
        "enforce_eager": True,
        "tokenizer": "/model",
        "max_model_len": 4096,
        "dtype": "torch.bfloat16",
    },
    "cache_config": {
        "enable_prefix_caching": True,
        "cache_dtype": "auto",
        "block_size": 32,
        "num_gpu_blocks": 101,
    },
    "parallel_config": {"tensor_parallel_size": 1},
    "speculative_config": None,
    "device_config": {"device": "cpu"},
}


def test_engine_arguments_become_options() -> None:
    found = options({"a_b": 1, "on": True, "off": False, "gone": None, "deep": {"x": [1]}})
    assert found == ["--a-b", "1", "--on", "--no-off", "--deep", '{"x": [1]}']


def test_a_server_is_set_as_our_workers_are_where_nothing_else_is_asked_for() -> None:
    on_cpu, on_gpu = (command(SETTINGS, is_cpu=is_cpu) for is_cpu in (True, False))
    for words in (on_cpu, on_gpu):
        assert words[words.index("--max-num-seqs") + 1] == "8"
        assert words[words.index("--max-num-batched-tokens") + 1] == "2048"
        assert "--no-enable-prefix-caching" in words
        kv = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert (kv["kv_connector"], kv["kv_role"]) == ("NixlConnector", "kv_producer")
    assert "--enforce-eager" in on_cpu
    assert "--enforce-eager" not in on_gpu


def test_threads_are_as_many_as_cores() -> None:
    assert environment([2, 5], 9, is_cpu=True)["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in environment([], 9, is_cpu=True)
    assert environment([2], 9, is_cpu=False)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9"


def test_settings_are_told_as_our_workers_tell_them() -> None:
    found = described(CONFIG)
    settings = found.pop("settings")
    assert found == {
        "model_path": "/model",
        "max_model_len": 4096,
        "dtype": "bfloat16",
        "block_size": 32,
        "total_blocks": 100,
        "max_num_seqs": 64,
    }
    assert settings["compilation_mode"] == "NONE"
    assert settings["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert (settings["quantization"], settings["async_scheduling"]) == ("None", "False")


async def test_what_does_not_start_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    pair = nixl.NixlPair("vllms", to_mapping(load_config(None, {})), tmp_path)
    with pytest.raises(BenchError, match="package nixl is missing"):
        await pair.start()
    monkeypatch.undo()
    monkeypatch.setattr(nixl.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="vllms's prefill did not start"):
        await pair.start()
    await pair.stop()
    assert pair.ready is None


METRICS = """# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} %d
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} %d
"""


async def test_prompts_that_decode_computes_itself_spoil_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter([METRICS % (1, 99), METRICS % (2, 198), METRICS % (102, 198), None])

    async def get(url: str) -> str | None:
        assert url.endswith("/metrics")
        return next(told)

    monkeypatch.setattr(nixl, "_get", get)
    pair = nixl.NixlPair("nixl", to_mapping(load_config(None, {})), tmp_path)
    monkeypatch.setattr(pair, "_urls", {"decode": "http://here"})
    assert [await pair.changed() for _ in range(2)] == [None, None]
    assert "computed 100% of its prompt tokens" in (await pair.changed() or "")
    assert "does not answer" in (await pair.changed() or "")

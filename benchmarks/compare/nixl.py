"""The variant `nixl`: two plain vLLM servers with vLLM's NixlConnector and a small proxy.

An engine is pinned to as many cores as a worker of another variant has; its front end and the proxy
may use all cores, as our router may. Tested with vLLM 0.32.0 and nixl 1.5.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from contextlib import AsyncExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.errors import BenchError
from benchmarks.service import Child, free_port
from pdserve.config import WorkerConfig, parse

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

_SERVERS: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
_ASK_S: Final = 300.0  # a server describes itself in seconds, on a busy machine in minutes
# The last token of each prompt is computed where the first of the answer is sampled.
_MOST_COMPUTED: Final = 0.1
# As our workers have them; a comparison checks that variants are alike.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "seed": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}
_CPU_DEFAULTS: Final[Mapping[str, Any]] = {
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
}
_ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_KEEPALIVE_INTERVAL": "inf",  # it is paused while another variant is measured
    "VLLM_SERVER_DEV_MODE": "1",  # for /server_info
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_ENVIRONMENT: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # With a process of its own the model would spin for a second after each step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
# What bears on speed in vLLM's JSON, and its enumerations there (vllm/config/compilation.py).
_SETTINGS: Final = {
    "scheduler_config": ("max_num_batched_tokens", "enable_chunked_prefill", "async_scheduling"),
    "cache_config": ("enable_prefix_caching", "cache_dtype"),
    "model_config": ("quantization", "enforce_eager"),
    "parallel_config": ("tensor_parallel_size",),
}
_MODES: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_GRAPHS: Final = {
    "0": "NONE",
    "1": "PIECEWISE",
    "2": "FULL",
    "[2, 0]": "FULL_DECODE_ONLY",
    "[2, 1]": "FULL_AND_PIECEWISE",
}


class NixlPair:
    """Three processes with the interface of `Service`."""

    def __init__(self, name: str, config: Mapping[str, Any], directory: Path) -> None:
        self.name = name
        self.ready: Mapping[str, Any] = {}
        self._worker = parse(WorkerConfig, config["worker"])
        self._cores_each: int = config["up"]["cores_per_worker"]
        self._directory = directory
        self._ending = AsyncExitStack()
        self._children: dict[str, Child] = {}
        self._urls: dict[str, str] = {}
        self._prompt_tokens: Mapping[str, float] = {}

    async def start(self) -> None:
        """Return when all three serve. Raises BenchError."""
        if find_spec("nixl") is None:
            raise BenchError(f"{self.name}: the package nixl is not installed")
        allowed = sorted(os.sched_getaffinity(0))
        for place, role in enumerate(_SERVERS):
            cores = allowed[place * self._cores_each : (place + 1) * self._cores_each]
            await self._start_server(role, cores)
            # The front end's own threads may use all cores; what it started stays on its own.
            for thread in psutil.Process(self._children[role].pid).threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, allowed)
        servers = [f"--{role}={self._urls[role]}" for role in _SERVERS]
        proxy = [sys.executable, "-m", "kv_transfer.vllm.example_proxy", *servers]
        port = free_port()
        await self._run("proxy", [*proxy, "--port", str(port)], port, "/v1/models", {})
        pids = {role: child.pid for role, child in self._children.items()}
        self.ready = {
            "http": self._urls["proxy"],
            "router": {"pid": pids.pop("proxy")},
            "workers": [{"pid": pid} for pid in pids.values()],
        }

    async def _start_server(self, role: str, cores: list[int]) -> None:
        is_cpu = version("torch").endswith("+cpu")
        arguments = {
            **_DEFAULTS,
            **(_CPU_DEFAULTS if is_cpu else {}),
            **self._worker.engine_args,
            "model": str(self._worker.model_path),
            "served_model_name": self._worker.served_model_name,
            "host": "127.0.0.1",
            "port": (port := free_port()),
            "disable_uvicorn_access_log": True,
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": _SERVERS[role],
                "kv_load_failure_policy": "fail",
            },
        }
        environment = _ENVIRONMENT | (_CPU_ENVIRONMENT if is_cpu else {})
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        for pool in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
            environment[f"{pool}_NUM_THREADS"] = str(len(cores))
        # VLLM_CPU_KVCACHE_SPACE would silently override kv_cache_memory_bytes.
        words = ["env", "-u", "VLLM_CPU_KVCACHE_SPACE", "taskset", "-c", ",".join(map(str, cores))]
        words += [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in arguments.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            elif value is not None:
                text = json.dumps(value) if isinstance(value, dict | list) else str(value)
                words += [f"--{option}", text]
        await self._run(role, words, port, "/health", environment)

    async def _run(
        self, what: str, command: list[str], port: int, path: str, environment: Mapping[str, str]
    ) -> None:
        child = self._children[what] = Child(
            f"{self.name}'s {what}", self._directory / f"{what}.log"
        )
        self._ending.push_async_callback(child.stop)
        self._urls[what] = f"http://127.0.0.1:{port}"

        async def is_ready() -> bool:
            return await _get(self._urls[what] + path) is not None

        await child.start(command, is_ready, environment)

    def signal(self, sign: signal.Signals) -> None:
        """Stop or continue all processes: NIXL's threads poll even without work."""
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, sign)

    async def stop(self) -> None:
        self.ready = {}
        await self._ending.aclose()
        self._children.clear()

    async def workers(self) -> list[dict[str, Any]]:
        """Return the servers' settings, named as `Service.workers` does. Raises BenchError."""
        return [await self._describe(role) for role in _SERVERS]

    async def _describe(self, role: str) -> dict[str, Any]:
        told_version = await _get(f"{self._urls[role]}/version")
        told = await _get(f"{self._urls[role]}/server_info?config_format=json")
        if told_version is None or told is None:
            raise BenchError(f"{self.name}'s {role} server does not tell its settings")
        config = json.loads(told)["vllm_config"]
        scheduler, compilation = config["scheduler_config"], config["compilation_config"]
        model, cache = config["model_config"], config["cache_config"]
        settings = {name: config[part][name] for part, names in _SETTINGS.items() for name in names}
        settings |= {
            "cores": self._cores_each,
            "compilation_mode": _MODES[compilation["mode"]],
            "cudagraph_mode": _GRAPHS[str(compilation["cudagraph_mode"])],
            "speculative_config": (config["speculative_config"] or {}).get("method"),
            "device": config["device_config"]["device"].partition(":")[0],
        }
        return {
            "role": role,
            "engine": f"vllm {json.loads(told_version)['version']}",
            "model": model["served_model_name"],
            "model_path": model["tokenizer"],
            "max_model_len": model["max_model_len"],
            "vocab_size": self._vocab_size(),
            "dtype": str(model["dtype"]).removeprefix("torch."),
            "block_size": cache["block_size"],
            "total_blocks": cache["num_gpu_blocks"] - 1,  # one is vLLM's null block
            "max_num_seqs": scheduler["max_num_seqs"],
            "settings": {name: str(value) for name, value in settings.items()},
        }

    def _vocab_size(self) -> Any:
        path = Path(self._worker.model_path, "config.json")
        return json.loads(path.read_text(encoding="utf-8"))["vocab_size"]

    async def problem(self) -> str | None:
        """Return the name of a process that ended, or that decode computed prompts itself."""
        ended = [child.name for child in self._children.values() if not child.is_alive]
        if ended:
            return f"{ended[0]} ended"
        metrics = await _get(f"{self._urls['decode']}/metrics")
        if metrics is None:
            return f"{self.name}'s decode does not answer"
        before, self._prompt_tokens = self._prompt_tokens, _prompt_tokens(metrics)
        new = {x: n - before.get(x, 0.0) for x, n in self._prompt_tokens.items()}
        share = new.get("local_compute", 0.0) / (sum(new.values()) or 1.0)
        if share <= _MOST_COMPUTED:
            return None
        return f"{self.name}'s decode computed {share:.0%} of its prompt tokens: KV did not arrive"


def _prompt_tokens(metrics: str) -> dict[str, float]:
    """Read a server's /metrics: prompt tokens by where their KV came from."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "vllm:prompt_tokens_by_source_total":
                source = sample.labels["source"]
                found[source] = found.get(source, 0.0) + sample.value
    return found


async def _get(url: str) -> str | None:
    """Return the body of a 200 answer, else None."""
    timeout = aiohttp.ClientTimeout(total=_ASK_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None

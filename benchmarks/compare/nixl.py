"""The variant `nixl`: two plain vLLM servers with vLLM's NixlConnector and a small proxy.

`python -m benchmarks.compare.nixl SETTINGS` becomes one of the servers; SETTINGS is JSON. Its
engine is pinned to as many cores as a worker of another variant has; its front end and the proxy
may use all cores, as our router may. Tested with vLLM 0.32.0 and nixl 1.5.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.errors import BenchError
from benchmarks.service import Child, free_port

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

_SERVERS: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
_ASK_S: Final = 300.0  # a server describes itself in seconds, on a busy machine in minutes
# The last token of each prompt is computed where the first of the answer is sampled.
_MOST_COMPUTED: Final = 0.1
# vLLM's enumerations as its JSON has them (vllm/config/compilation.py).
_MODES: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_GRAPHS: Final = {
    "0": "NONE",
    "1": "PIECEWISE",
    "2": "FULL",
    "[2, 0]": "FULL_DECODE_ONLY",
    "[2, 1]": "FULL_AND_PIECEWISE",
}
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


class NixlPair:
    """Three processes with the interface of `Service`."""

    def __init__(self, name: str, config: Mapping[str, Any], directory: Path) -> None:
        self.name = name
        self.ready: Mapping[str, Any] = {}
        self._worker = config["worker"]
        self._cores_each: int = config["up"]["cores_per_worker"]
        self._directory = directory
        self._ending = AsyncExitStack()
        self._children: dict[str, Child] = {}
        self._urls: dict[str, str] = {}
        self._model_path = Path()
        self._prompt_tokens: Mapping[str, float] = {}

    async def start(self) -> None:
        """Return when all three serve. Raises BenchError."""
        from pdserve.config import WorkerConfig, parse

        if find_spec("nixl") is None:
            raise BenchError(f"{self.name}: the package nixl is not installed")
        worker = parse(WorkerConfig, self._worker)
        self._model_path = Path(worker.model_path)
        allowed = sorted(os.sched_getaffinity(0))
        for place, (role, kv_role) in enumerate(_SERVERS.items()):
            cores = allowed[place * self._cores_each : (place + 1) * self._cores_each]
            settings = {
                "model": str(worker.model_path),
                "name": worker.served_model_name,
                "port": (port := free_port()),
                "side_port": free_port(),
                "kv_role": kv_role,
                "cores": cores,
                "engine_args": dict(worker.engine_args),
            }
            self._urls[role] = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "benchmarks.compare.nixl", json.dumps(settings)]
            await self._run(role, command, "/health")
            _spread(self._children[role].pid, allowed)
        port = free_port()
        self._urls["proxy"] = f"http://127.0.0.1:{port}"
        servers = [f"--{role}={self._urls[role]}" for role in _SERVERS]
        proxy = [sys.executable, "-m", "kv_transfer.vllm.example_proxy", *servers]
        await self._run("proxy", [*proxy, "--port", str(port)], "/v1/models")
        pids = {role: child.pid for role, child in self._children.items()}
        self.ready = {
            "http": self._urls["proxy"],
            "router": {"pid": pids.pop("proxy")},
            "workers": [{"pid": pid} for pid in pids.values()],
        }

    async def _run(self, what: str, command: list[str], path: str) -> None:
        child = Child(f"{self.name}'s {what}", self._directory / f"{what}.log")
        self._ending.push_async_callback(child.stop)
        self._children[what] = child

        async def is_ready() -> bool:
            return await _get(self._urls[what] + path) is not None

        await child.start(command, is_ready)

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
        return [await self._describe(role) for role in _SERVERS]

    async def _describe(self, role: str) -> dict[str, Any]:
        version = await _get(f"{self._urls[role]}/version")
        told = await _get(f"{self._urls[role]}/server_info?config_format=json")
        if version is None or told is None:
            raise BenchError(f"{self.name}'s {role} server does not tell its settings")
        found = described(json.loads(told)["vllm_config"])
        settings = {"cores": str(self._cores_each), **found.pop("settings")}
        config = json.loads((self._model_path / "config.json").read_text(encoding="utf-8"))
        return {
            "role": role,
            "engine": f"vllm {json.loads(version)['version']}",
            "vocab_size": config["vocab_size"],
            **found,
            "settings": settings,
        }

    async def problem(self) -> str | None:
        """Return the name of a process that ended, or that decode computed prompts itself."""
        ended = [child.name for child in self._children.values() if not child.is_alive]
        if ended:
            return f"{ended[0]} ended"
        text = await _get(f"{self._urls['decode']}/metrics")
        if text is None:
            return f"{self.name}'s decode does not answer"
        before, self._prompt_tokens = self._prompt_tokens, prompt_tokens(text)
        new = {x: n - before.get(x, 0.0) for x, n in self._prompt_tokens.items()}
        share = new.get("local_compute", 0.0) / (sum(new.values()) or 1.0)
        if share <= _MOST_COMPUTED:
            return None
        return f"{self.name}'s decode computed {share:.0%} of its prompt tokens: KV did not arrive"


def _spread(pid: int, cores: list[int]) -> None:
    """Let the front end's own threads use all cores; what it started stays on its own."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def prompt_tokens(metrics: str) -> dict[str, float]:
    """Read a server's /metrics: prompt tokens by where their KV came from."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "vllm:prompt_tokens_by_source_total":
                source = sample.labels["source"]
                found[source] = found.get(source, 0.0) + sample.value
    return found


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name the settings of vLLM's JSON as our workers do."""
    scheduler, compilation = config["scheduler_config"], config["compilation_config"]
    model, cache = config["model_config"], config["cache_config"]
    settings = {
        "max_num_batched_tokens": scheduler["max_num_batched_tokens"],
        "enable_chunked_prefill": scheduler["enable_chunked_prefill"],
        "async_scheduling": scheduler["async_scheduling"],
        "enable_prefix_caching": cache["enable_prefix_caching"],
        "cache_dtype": cache["cache_dtype"],
        "quantization": model["quantization"],
        "enforce_eager": model["enforce_eager"],
        "compilation_mode": _MODES[compilation["mode"]],
        "cudagraph_mode": _GRAPHS[str(compilation["cudagraph_mode"])],
        "tensor_parallel_size": config["parallel_config"]["tensor_parallel_size"],
        "speculative_config": (config["speculative_config"] or {}).get("method"),
        "device": config["device_config"]["device"].partition(":")[0],
    }
    return {
        "model": model["served_model_name"],
        "model_path": model["tokenizer"],
        "max_model_len": model["max_model_len"],
        "dtype": str(model["dtype"]).removeprefix("torch."),
        "block_size": cache["block_size"],
        "total_blocks": cache["num_gpu_blocks"] - 1,  # one is vLLM's null block
        "max_num_seqs": scheduler["max_num_seqs"],
        "settings": {name: str(value) for name, value in settings.items()},
    }


async def _get(url: str) -> str | None:
    """Return the body of a 200 answer, else None."""
    timeout = aiohttp.ClientTimeout(total=_ASK_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def command(settings: Mapping[str, Any], *, is_cpu: bool) -> list[str]:
    """Return the command line of one vLLM server."""
    arguments = {
        **_DEFAULTS,
        **(_CPU_DEFAULTS if is_cpu else {}),
        **settings["engine_args"],
        "model": settings["model"],
        "served_model_name": settings["name"],
        "host": "127.0.0.1",
        "port": settings["port"],
        "disable_uvicorn_access_log": True,
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": settings["kv_role"],
            "kv_load_failure_policy": "fail",
        },
    }
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            words += [f"--{option}", text]
    return words


def main() -> None:
    settings = json.loads(sys.argv[1])
    cores = settings["cores"]
    if cores:
        os.sched_setaffinity(0, cores)
        for pool in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
            os.environ[f"{pool}_NUM_THREADS"] = str(len(cores))
    import torch

    is_cpu = torch.version.cuda is None and torch.version.hip is None
    os.environ.update(_ENVIRONMENT | (_CPU_ENVIRONMENT if is_cpu else {}))
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(settings["side_port"])
    # A whole number of GiB that silently overrides kv_cache_memory_bytes.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    words = command(settings, is_cpu=is_cpu)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()

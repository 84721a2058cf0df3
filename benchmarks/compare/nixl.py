"""vLLM's own P/D: two plain vLLM servers with its NixlConnector and a small proxy before them, in
the place of a `pdserve up`. Tried with vLLM 0.32.0 and nixl 1.5.1.

The proxy is `kv_transfer/vllm/example_proxy.py`, which does what vLLM's example proxies do: prefill
for one token, then decode with what prefill's answer says. Engines are pinned to their cores as our
workers are; servers' front ends and the proxy may use all cores, as our router may.
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
from benchmarks.processes import Child, free_port
from pdserve.config import WorkerConfig, parse
from pdserve.up.cores import share_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

# Role, and what vLLM calls it.
_SERVERS: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
# What a server tells of itself takes it seconds, on a busy machine minutes.
_ASK_S: Final = 300.0
# The last token of each prompt is always computed where the first of the answer is sampled.
_COMPUTED, _MOST_COMPUTED = "local_compute", 0.1
# vLLM's enumerations as its JSON has them (vllm/config/compilation.py).
_MODES: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_GRAPHS: Final = {
    "0": "NONE",
    "1": "PIECEWISE",
    "2": "FULL",
    "[2, 0]": "FULL_DECODE_ONLY",
    "[2, 1]": "FULL_AND_PIECEWISE",
}


class NixlPair:
    """Owns the three processes from :meth:`start` to :meth:`stop`; logs are in ``directory``.

    ``ready`` is as a `pdserve up`'s ready file, of which it has `http`, `router` (the proxy) and
    `workers`; None while it does not serve.
    """

    def __init__(self, name: str, config: Mapping[str, Any], directory: Path) -> None:
        self.name = name
        self.ready: Mapping[str, Any] | None = None
        self._worker = parse(WorkerConfig, config["worker"])
        self._cores_each: int = config["up"]["cores_per_worker"]
        self._directory = directory
        self._ending = AsyncExitStack()
        self._children: dict[str, Child] = {}
        self._urls: dict[str, str] = {}
        self._cores: dict[str, tuple[int, ...]] = {}
        self._prompt_tokens: Mapping[str, float] = {}

    async def start(self) -> None:
        """Return once all three serve; raises :class:`BenchError` with what they said if they do
        not."""
        if find_spec("nixl") is None:
            raise BenchError(f"{self.name}: the package nixl is missing")
        allowed = os.sched_getaffinity(0)
        shares = share_cores(len(_SERVERS), allowed, self._cores_each)
        for role, cores in zip(_SERVERS, shares, strict=True):
            await self._start_server(role, cores)
            _spread(self._children[role].pid, allowed)
        http = await self._start_proxy()
        pids = {role: child.pid for role, child in self._children.items()}
        self.ready = {
            "http": http,
            "router": {"pid": pids.pop("proxy")},
            "workers": [{"pid": pid} for pid in pids.values()],
        }

    async def _start_server(self, role: str, cores: tuple[int, ...]) -> None:
        port = free_port()
        settings = {
            "model": str(self._worker.model_path),
            "name": self._worker.served_model_name,
            "port": port,
            "side_port": free_port(),
            "kv_role": _SERVERS[role],
            "cores": cores,
            "engine_args": dict(self._worker.engine_args),
        }
        module = "benchmarks.compare.plain_serve"
        self._urls[role], self._cores[role] = f"http://127.0.0.1:{port}", cores
        await self._run(role, [sys.executable, "-m", module, json.dumps(settings)], "/health")

    async def _start_proxy(self) -> str:
        port = free_port()
        servers = [f"--{role}={self._urls[role]}" for role in _SERVERS]
        self._urls["proxy"] = f"http://127.0.0.1:{port}"
        module = "kv_transfer.vllm.example_proxy"
        command = [sys.executable, "-m", module, *servers, "--port", str(port)]
        await self._run("proxy", command, "/v1/models")
        return self._urls["proxy"]

    async def _run(self, what: str, command: list[str], path: str) -> None:
        child = Child(f"{self.name}'s {what}", self._directory / f"{what}.log")
        self._ending.push_async_callback(child.stop)
        child.start(command)
        self._children[what] = child

        async def is_ready() -> bool:
            return await _get(self._urls[what] + path) is not None

        await child.until(is_ready)

    def pause(self) -> None:
        """Stop all where they are: without work their NIXL threads would still take most of a
        core each (seen with 1.5.1) from the arm that is measured. Idempotent."""
        for child in self._children.values():
            child.pause()

    def resume(self) -> None:
        """Let them go on. Idempotent."""
        for child in self._children.values():
            child.resume()

    async def stop(self) -> None:
        """Let all end, and kill those that do not. Idempotent."""
        self.ready = None
        await self._ending.aclose()
        self._children.clear()

    async def workers(self) -> list[dict[str, Any]]:
        """What each server says of itself, as :func:`benchmarks.compare.settings.settings_of`
        takes it; raises :class:`BenchError`."""
        return [await self._describe(role) for role in _SERVERS]

    async def _describe(self, role: str) -> dict[str, Any]:
        version = await _get(f"{self._urls[role]}/version")
        told = await _get(f"{self._urls[role]}/server_info?config_format=json")
        if version is None or told is None:
            raise BenchError(f"{self.name}'s {role} does not tell its settings")
        found = described(json.loads(told)["vllm_config"])
        settings = {"cores": str(len(self._cores[role])), **found.pop("settings")}
        model = json.loads((self._worker.model_path / "config.json").read_text(encoding="utf-8"))
        return {
            "role": role,
            "engine": f"vllm {json.loads(version)['version']}",
            "model": self._worker.served_model_name,
            "vocab_size": model["vocab_size"],
            **found,
            "settings": settings,
        }

    async def changed(self) -> str | None:
        """What happened to its processes since it was ready, or that decode has computed prompts
        itself since this was last asked; None if nothing did."""
        ended = [child.name for child in self._children.values() if not child.is_alive]
        if ended:
            return f"{ended[0]} ended"
        text = await _get(f"{self._urls['decode']}/metrics")
        if text is None:
            return f"{self.name}'s decode does not answer"
        before, self._prompt_tokens = self._prompt_tokens, prompt_tokens(text)
        new = {x: n - before.get(x, 0.0) for x, n in self._prompt_tokens.items()}
        share = new.get(_COMPUTED, 0.0) / (sum(new.values()) or 1.0)
        if share <= _MOST_COMPUTED:
            return None
        return (
            f"{self.name}'s decode computed {share:.0%} of its prompt tokens: no KV came for them"
        )


def prompt_tokens(text: str) -> dict[str, float]:
    """By where their KV came from, out of a server's /metrics."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:prompt_tokens_by_source_total":
                source = sample.labels["source"]
                found[source] = found.get(source, 0.0) + sample.value
    return found


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's configuration in JSON as our workers tell theirs (workers/vllm_args.py)."""
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
        "model_path": model["tokenizer"],
        "max_model_len": model["max_model_len"],
        "dtype": str(model["dtype"]).removeprefix("torch."),
        "block_size": cache["block_size"],
        # One is vLLM's own, the null block.
        "total_blocks": cache["num_gpu_blocks"] - 1,
        "max_num_seqs": scheduler["max_num_seqs"],
        "settings": {name: str(value) for name, value in settings.items()},
    }


def _spread(pid: int, cores: set[int]) -> None:
    """Every thread of this process, but nothing that it has started, may use ``cores``."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


async def _get(url: str) -> str | None:
    """The body of a good answer, else None."""
    timeout = aiohttp.ClientTimeout(total=_ASK_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None

"""Stand-in for vLLM's server and for vllm-router: `server` or `router`, then the options.

A server reports the settings in its options, and has a child with a child, as vLLM has an engine
core and a worker. It does not end them. With `--one-fails=PATH` the server that comes second ends
with an error. The router answers by itself.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from aiohttp import web

from tests.support.fake_openai import FakeOpenAI

BLOCKS = 101


def report(options: dict[str, str]) -> dict[str, object]:
    """Return the answer of /server_info for options of a server."""
    length = int(options["max-model-len"])
    is_eager = "enforce-eager" in options
    config = {
        "model_config": {
            "served_model_name": options["served-model-name"],
            "model": options["model"],
            "max_model_len": 8192 if length < 0 else length,
            "dtype": f"torch.{options.get('dtype', 'bfloat16')}",
            "quantization": None,
            "enforce_eager": is_eager,
        },
        "cache_config": {
            "block_size": int(options["block-size"]),
            "num_gpu_blocks": BLOCKS,
            "enable_prefix_caching": "enable-prefix-caching" in options,
            "cache_dtype": "auto",
        },
        "scheduler_config": {
            "max_num_seqs": int(options["max-num-seqs"]),
            "max_num_batched_tokens": int(options["max-num-batched-tokens"]),
            "enable_chunked_prefill": True,
            "async_scheduling": False,
        },
        "compilation_config": {"mode": 0 if is_eager else 2, "cudagraph_mode": 0},
        "device_config": {"device": "cpu"},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
        },
        "speculative_config": None,
    }
    return {"vllm_config": config}


def options_of(words: list[str]) -> dict[str, str]:
    """Return options by name; a flag's value is ""."""
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def serve(options: dict[str, str]) -> None:
    async def healthy(_request: web.Request) -> web.Response:
        return web.Response()

    async def info(_request: web.Request) -> web.Response:
        return web.json_response(report(options))

    async def version(_request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    if "one-fails" in options:
        try:
            Path(options["one-fails"]).touch(exist_ok=False)
        except FileExistsError:
            sys.exit("no memory is left for the KV cache")
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # now it has its child
    app = web.Application()
    app.add_routes([web.get("/health", healthy), web.get("/server_info", info)])
    app.add_routes([web.get("/version", version)])
    web.run_app(app, host="127.0.0.1", port=int(options["port"]), print=None)


async def route(options: dict[str, str]) -> None:
    models = [{"id": "smollm2", "max_model_len": 8192}]
    async with FakeOpenAI(models=models, port=int(options["port"])).serve():
        await asyncio.Event().wait()


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "server":
        serve(options_of(words))
    else:
        asyncio.run(route(options_of(words)))

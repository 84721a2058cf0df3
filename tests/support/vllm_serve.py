"""A plain `vllm serve` process that uses only the connector of pdserve."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil

from pdserve.deploy.local.groups import free_ports
from tests.support.timeouts import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server process at `url`. `close` ends all its processes."""

    def __init__(
        self, command: list[str], log: Path, path: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> None:
        port = free_ports("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
        python_path = f"{ROOT}{os.pathsep}{path}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port)],
                cwd=log.parent,
                env={**os.environ, **threads, **quiet, "PYTHONPATH": python_path, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def until_ready(self, path: str = "/health") -> None:
        """Wait until the server answers."""
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as client:
            while True:
                assert self.process.poll() is None, self.log
                try:
                    async with client.get(self.url + path):
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.1)

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Post `body` and return status and JSON of the answer."""
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.url + path, json=body) as answer,
        ):
            return answer.status, await answer.json()

    async def metric(self, name: str, **labels: str) -> float:
        """Return one of vLLM's metrics, summed over the labels not given."""
        async with aiohttp.ClientSession() as client, client.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [x for x in lines if x.startswith(name + "{") and all(w in x for w in wanted)]
        assert found, f"{name} {labels} is no metric"
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """Kill the server and its children with SIGKILL. Python's resource trackers live a moment
        longer and remove the shared memory of the killed processes."""
        every = [*self.children(), psutil.Process(self.process.pid)]
        trackers = [x for x in every if any("resource_tracker" in word for word in x.cmdline())]
        for each in every:
            if each not in trackers:
                each.kill()
        self.process.wait(WAIT_S)
        _, left = psutil.wait_procs(every, WAIT_S)
        assert left == []

    def close(self) -> list[psutil.Process]:
        """End the server. Return those of its processes that had to be killed."""
        if self.process.poll() is not None:
            return []
        children = self.children()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(WAIT_S)
        _, left = psutil.wait_procs(children, WAIT_S)
        for each in left:
            each.kill()
        return left


def vllm_serve(
    model: Path,
    directory: Path,
    name: str,
    kv: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Start `vllm serve MODEL --kv-transfer-config ...` as in docs/kv_transfer.md, in float32."""
    # The command of the CPU package reads its version from the metadata of the GPU package.
    metadata = directory / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    config = {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": "kv_transfer.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(kv),
    }
    options = {
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--block-size": "32",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--max-num-batched-tokens": "256",
        "--kv-transfer-config": json.dumps(config),
    }
    flat = [text for option in options.items() for text in option]
    program = str(Path(sys.executable).parent / "vllm")
    command = [program, "serve", str(model), *flat, "--enforce-eager"]
    return ServerProcess(command, directory / f"{name}.log", directory, env)


def example_proxy(
    prefill: ServerProcess, decode: ServerProcess, directory: Path, *options: str
) -> ServerProcess:
    """Start the example proxy of the documentation."""
    urls = ["--prefill", prefill.url, "--decode", decode.url]
    command = ["-m", "kv_transfer.vllm.example_proxy", *urls, *options]
    return ServerProcess(command, directory / "proxy.log")

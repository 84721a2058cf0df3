"""vLLM's own servers behind vllm-router, as a variant of a comparison on CPUs.

Three things would make it slower than it is, and are corrected here (vLLM 0.32, nixl 1.5.1). vLLM's
CPU worker moves itself to the last cores that it may use, so the workers of two servers would share
them: after the start their threads are moved to cores of their own. NIXL's progress thread polls on
the worker's core all the time: it gets the lowest priority. An idle worker polls too, so nothing
else may be measured while the servers run (`benchmarks/compare/run.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import psutil

from benchmarks.compare.result import VariantSettings
from benchmarks.errors import BenchError
from benchmarks.service import LoggedProcess
from pdserve.deploy.local.groups import free_ports
from pdserve.model.hub import with_directories
from pdserve.process.gpus import is_cpu_build
from workers.vllm.start.defaults import CPU_DEFAULTS, DEFAULTS, args_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.config import WorkerConfig

# The number of prefill, decode and aggregated servers by name.
STACKS: Final = {"vllm-pd": (1, 1, 0), "vllm-2a": (0, 0, 2)}
_HOST: Final = "127.0.0.1"
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30.0)
_END_S: Final = 10.0  # for children of a server that has ended
_KILLED_S: Final = 10.0  # for the kernel to end what was killed
_POLL_S: Final = 0.2
_IDLE_S: Final = 2.0  # how long threads are watched for polling
# A thread polls if it takes this share of the time, and of what the busiest thread takes.
_POLLS: Final = (0.05, 0.2)
_LOWEST_PRIORITY: Final = 19
_KV_CONNECTOR: Final = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
# vLLM's enum CompilationMode; the report has its numbers.
_COMPILATION: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands that start a server and the router, without their options."""

    server: tuple[str, ...] = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    router: tuple[str, ...] = ("vllm-router",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """Servers by role, with the cores of each, and their model and engine arguments."""

    prefill: int
    decode: int
    aggregated: int
    cores: tuple[tuple[int, ...], ...]
    model: str
    model_name: str
    engine_args: Mapping[str, Any]
    programs: Programs = Programs()

    @property
    def roles(self) -> tuple[str, ...]:
        counts = (self.prefill, self.decode, self.aggregated)
        roles = ("prefill", "decode", "aggregated")
        return tuple(role for role, n in zip(roles, counts, strict=True) for _ in range(n))


def check_programs(name: str) -> None:
    """Raise BenchError, with what to install, if this machine cannot run the variant `name`."""
    if not is_cpu_build():
        raise BenchError(f"{name} runs on CPUs only: start vLLM yourself and add --arm NAME=URL")
    if shutil.which("vllm-router") is None:
        raise BenchError(
            f"{name}: vllm-router is not on PATH. Install it in an environment of its own (`python "
            "-m venv peers && peers/bin/pip install vllm-router==0.1.17`) and put peers/bin on PATH"
        )
    for package in ("vllm", "nixl"):
        if find_spec(package) is None:
            raise BenchError(f"{name}: {sys.executable} has no {package}: `pip install {package}`")


def stack_config(
    counts: tuple[int, int, int], cores: Sequence[int], worker: WorkerConfig
) -> StackConfig:
    """Return the configuration with the engine arguments that pdserve's workers would have. `cores`
    are divided evenly. Raises ConfigError for a model that cannot be had."""
    worker = with_directories(worker)
    each = len(cores) // sum(counts)
    prefill, decode, aggregated = counts
    return StackConfig(
        prefill=prefill,
        decode=decode,
        aggregated=aggregated,
        cores=tuple(tuple(cores[i * each : (i + 1) * each]) for i in range(sum(counts))),
        model=worker.model,
        model_name=worker.served_names[0],
        engine_args={
            **DEFAULTS,
            **CPU_DEFAULTS,
            **args_of(worker.compilation),
            **worker.engine_args,
        },
    )


def server_command(config: StackConfig, role: str, port: int) -> list[str]:
    """Return the command of a server. A server for prefill or decode hands KV over with NIXL."""
    command = [*config.programs.server, f"--model={config.model}", f"--host={_HOST}"]
    command += [f"--port={port}", f"--served-model-name={config.model_name}"]
    for name, value in config.engine_args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, (dict, list)) else value
            command.append(f"--{flag}={text}")
    if role != "aggregated":
        command.append(f"--kv-transfer-config={json.dumps(_KV_CONNECTOR)}")
    # A whole number of GiB that would silently override kv_cache_memory_bytes.
    return ["env", "-u", "VLLM_CPU_KVCACHE_SPACE", *command]


def server_environment(cores: int, nixl_port: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(cores),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": _HOST,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl_port),
        "VLLM_SERVER_DEV_MODE": "1",  # for /server_info
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }


def router_command(config: StackConfig, urls: Sequence[str], ports: tuple[int, int]) -> list[str]:
    """Return the command of the router in front of `urls`, which are in the order of the roles.
    `ports`: of the router and of its metrics."""
    command = [*config.programs.router, f"--host={_HOST}", f"--port={ports[0]}"]
    # The default, cache_aware, sent all prompts of token ids to one of two servers.
    command += [f"--prometheus-port={ports[1]}", "--policy=round_robin"]
    if config.aggregated:
        return [*command, "--worker-urls", *urls]
    command.append("--vllm-pd-disaggregation")
    for role, url in zip(config.roles, urls, strict=True):
        command += [f"--{role}", url]
    return command


class VllmStack:
    """Servers of vLLM and a router in front of them, on this machine.

    `ready`: pids and address in the form of `LocalService.ready`, empty while it is not running.
    """

    def __init__(self, name: str, config: StackConfig, directory: Path) -> None:
        self.name = name
        self.ready: Mapping[str, Any] = {}
        self._config = config
        names = [f"{role}-{i}" for i, role in enumerate(config.roles)]
        self._servers = [LoggedProcess(f"{name} {x}", directory / f"{x}.log") for x in names]
        self._router = LoggedProcess(f"{name} router", directory / "router.log")
        self._processes = [self._router, *self._servers]
        self._urls: list[str] = []

    async def start(self) -> None:
        """Start the servers, then the router, and wait until an answer comes through. Then give
        each worker its cores. Raises BenchError; `stop` ends what has started."""
        count = len(self._servers)
        ports = _ports(2 * count + 2)
        self._urls = [f"http://{_HOST}:{port}" for port in ports[:count]]
        of_nixl, of_router = ports[count : 2 * count], (ports[-2], ports[-1])
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            starts = [self._start_server(session, i, port) for i, port in enumerate(of_nixl)]
            try:
                async with asyncio.TaskGroup() as group:
                    for start in starts:
                        group.create_task(start)
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            url = await self._start_router(session, of_router)
        pids = [server.pid for server in self._servers]
        for pid, cores in zip(pids, self._config.cores, strict=True):
            for worker in _workers_of(pid):
                _move(worker, cores)
        await _deprioritise_polling([x for pid in pids for x in _workers_of(pid)])
        router, workers = {"pid": self._router.pid}, [{"pid": pid} for pid in pids]
        self.ready = {"router": router, "workers": workers, "http": url}

    async def _start_server(
        self, session: aiohttp.ClientSession, index: int, nixl_port: int
    ) -> None:
        config, url = self._config, self._urls[index]

        async def is_ready() -> bool:
            return await _is_ok(session.get(f"{url}/health"))

        port = int(url.rpartition(":")[2])
        await self._servers[index].start(
            server_command(config, config.roles[index], port),
            is_ready,
            server_environment(len(config.cores[index]), nixl_port),
        )

    async def _start_router(self, session: aiohttp.ClientSession, ports: tuple[int, int]) -> str:
        """Start the router. Return its URL when it has answered as often as there are servers, so
        that each has been asked and KV has moved."""
        url = f"http://{_HOST}:{ports[0]}"
        body = {"model": self._config.model_name, "prompt": [1, 2, 3], "max_tokens": 2}
        answered = 0

        async def is_ready() -> bool:
            nonlocal answered
            answered += await _is_ok(session.post(f"{url}/v1/completions", json=body))
            return answered >= len(self._servers)

        await self._router.start(router_command(self._config, self._urls, ports), is_ready)
        return url

    async def settings(self) -> VariantSettings:
        """Return the settings that the servers report. Raises BenchError."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            reports = [await _report(session, url) for url in self._urls]
        used = {pid["pid"]: _cores_of(pid["pid"]) for pid in self.ready["workers"]}
        return settings_of_servers(
            reports, self._config, sum(len(cores) for cores in used.values())
        )

    async def stop(self) -> None:
        """End all processes and their children. Idempotent."""
        self.ready = {}
        try:
            await asyncio.gather(*(process.stop() for process in self._processes))
            await self._wait_for_end(_END_S)
        finally:
            for each in self._left():
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        await self._wait_for_end(_KILLED_S)

    def _left(self) -> list[psutil.Process]:
        """Return all processes that run, also those of servers that have ended."""
        return [each for process in self._processes for each in process.in_session()]

    async def _wait_for_end(self, within_s: float) -> None:
        for _ in range(int(within_s / _POLL_S) + 1):
            if not self._left():
                return
            await asyncio.sleep(_POLL_S)

    async def problem(self) -> str | None:
        """Return a description if a process has ended, else None."""
        ended = [x.name for x in self._processes if not x.is_alive]
        return f"{', '.join(ended)} ended" if ended else None


def settings_of_servers(
    reports: Sequence[Mapping[str, Any]], config: StackConfig, cores: int
) -> VariantSettings:
    """Return the summary of the servers' reports, by the names of a worker's registration."""
    values: dict[str, set[str]] = {}
    tokens = 0
    try:
        for report in reports:
            cache = report["vllm_config"]["cache_config"]
            # Less the null block, as workers count.
            tokens += cache["block_size"] * (cache["num_gpu_blocks"] - 1)
            for name, value in _facts(report).items():
                values.setdefault(name, set()).add(str(value))
    except (KeyError, TypeError, IndexError) as error:
        raise BenchError(f"a report of vLLM's server is of another form: {error!r}") from None
    values["vocab_size"] = {str(_vocab_size(Path(config.model)))}
    return VariantSettings(
        workers={role: config.roles.count(role) for role in dict.fromkeys(config.roles)},
        cores=cores,
        kv_cache_tokens=tokens,
        of_workers={name: tuple(sorted(found)) for name, found in sorted(values.items())},
    )


def _facts(report: Mapping[str, Any]) -> dict[str, object]:
    whole = report["vllm_config"]
    model, cache, parallel = whole["model_config"], whole["cache_config"], whole["parallel_config"]
    scheduler, compilation = whole["scheduler_config"], whole["compilation_config"]
    device, graphs = whole["device_config"]["device"], compilation["cudagraph_mode"]
    return {
        "model": model["served_model_name"],
        "model_path": model["model"],
        "max_model_len": model["max_model_len"],
        "dtype": model["dtype"].removeprefix("torch."),
        "quantization": model["quantization"],
        "enforce_eager": model["enforce_eager"],
        "engine": f"vllm {report['version']}",
        "block_size": cache["block_size"],
        "enable_prefix_caching": cache["enable_prefix_caching"],
        "cache_dtype": cache["cache_dtype"],
        "max_num_seqs": scheduler["max_num_seqs"],
        "max_num_batched_tokens": scheduler["max_num_batched_tokens"],
        "enable_chunked_prefill": scheduler["enable_chunked_prefill"],
        "async_scheduling": scheduler["async_scheduling"],
        "compilation_mode": _COMPILATION[compilation["mode"]],
        "cudagraph_mode": graphs or "NONE",
        "tensor_parallel_size": parallel["tensor_parallel_size"],
        "pipeline_parallel_size": parallel["pipeline_parallel_size"],
        "data_parallel_size": parallel["data_parallel_size"],
        "enable_expert_parallel": parallel["enable_expert_parallel"],
        "speculative_config": (whole["speculative_config"] or {}).get("method"),
        "device": device,
        "device_name": device,  # vLLM calls every CPU so
    }


def _vocab_size(model: Path) -> int:
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(values.get("vocab_size") or values["text_config"]["vocab_size"])


async def _report(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    try:
        async with session.get(f"{url}/server_info?config_format=json") as answer:
            info = await answer.json()
        async with session.get(f"{url}/version") as answer:
            return {**info, **await answer.json()}
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise BenchError(f"{url} does not report its settings: {error!r}") from None


async def _is_ok(request: Any) -> bool:
    """Return whether a request is answered with 200. Wait a moment if not."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with request as answer:
            if answer.status == 200:
                await answer.read()
                return True
    await asyncio.sleep(_POLL_S)
    return False


def _workers_of(server: int) -> list[psutil.Process]:
    """Return the worker processes of a server: the children of its engine core."""
    found = [x for core in psutil.Process(server).children() for x in core.children()]
    if not found:
        raise BenchError(f"the server with pid {server} has no worker process")
    return found


def _ports(count: int) -> list[int]:
    """Return different free ports."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_ports(_HOST))
    return list(found)


def _threads(process: psutil.Process) -> list[int]:
    return [thread.id for thread in process.threads()]


def _move(worker: psutil.Process, cores: Sequence[int]) -> None:
    for thread in _threads(worker):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def _cores_of(server: int) -> set[int]:
    """Return the cores that the workers of a server may use."""
    found: set[int] = set()
    for worker in _workers_of(server):
        for thread in _threads(worker):
            with suppress(ProcessLookupError):
                found |= os.sched_getaffinity(thread)
    return found


async def _deprioritise_polling(workers: Sequence[psutil.Process]) -> None:
    """Give the lowest priority to the threads of idle workers that poll."""
    before = [_times(worker) for worker in workers]
    await asyncio.sleep(_IDLE_S)
    for worker, first in zip(workers, before, strict=True):
        used = {thread: s - first.get(thread, s) for thread, s in _times(worker).items()}
        for thread in polling_threads(used, _IDLE_S, main=worker.pid):
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)


def polling_threads(used_s: Mapping[int, float], window_s: float, *, main: int) -> list[int]:
    """Return the threads of an idle process that take processor time, except the main thread, which
    computes. On a busy machine a polling thread gets a share only, but as much as the main one."""
    least_s = max(_POLLS[0] * window_s, _POLLS[1] * max(used_s.values(), default=0.0))
    return [thread for thread, s in used_s.items() if s >= least_s and thread != main]


def _times(process: psutil.Process) -> dict[int, float]:
    return {x.id: x.user_time + x.system_time for x in process.threads()}

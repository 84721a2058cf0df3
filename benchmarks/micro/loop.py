"""Delay of other clients by the worst request bodies that one client can send to a router.

The service is 1P1D with fake engines. 8 streams are read throughout, and `/health` is requested
every 5 ms. Each round measures the longest `/health` and the largest delay of a token, first for an
idle second, then while a body is sent and answered. A token's delay is the time from its engine
step to its arrival. Bodies have the largest size that a router accepts, 8 MiB, or are the worst
within another limit.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp

from benchmarks.client import HttpTarget, Request
from benchmarks.errors import BenchError
from benchmarks.service import LocalService

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.progress import Progress

STREAMS: Final = 8
STEP_S: Final = 0.02
QUIET_S: Final = 1.0
_AFTER_S: Final = 0.3  # more time, for work that continues after the answer
_TIMEOUT_S: Final = 120.0
_CHAT, _TEXT, _ITEMS = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_MESSAGES, _COUNT = "/v1/messages", "/v1/messages/count_tokens"
_BATCH = "/v1/batches"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="TEXT", help="bodies with this in their name")


def _many(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def bodies() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the path and the JSON of each body."""
    user, arguments = '{"role":"user","content":"a"}', json.dumps(f'{{"a":{_many("1", 3 << 20)}}}')
    call = f'{{"id":"1","type":"function","function":{{"name":"f","arguments":{arguments}}}}}'
    words = "word " * 1_600_000
    yield "64 KB of empty messages", _CHAT, f'{{"messages":{_many(_EMPTY, 3000)}}}'
    yield "380,000 empty messages", _CHAT, f'{{"messages":{_many(_EMPTY, 380_000)}}}'
    yield "4,096 long messages", _CHAT, f'{{"messages":{_many(_LONG, 4096)}}}'
    yield "tool arguments", _CHAT, f'{{"messages":[{{"role":"assistant","tool_calls":[{call}]}}]}}'
    objects = f'{{"x":{_many("{}", 2_600_000)}}}'
    yield "template variables", _CHAT, f'{{"messages":[{user}],"chat_template_kwargs":{objects}}}'
    think = f'{{"role":"assistant","content":"a","reasoning":"{words}"}}'
    yield "reasoning", _CHAT, f'{{"messages":[{think}]}}'
    yield "long text", _TEXT, f'{{"prompt":"{words}"}}'
    yield "4,000,000 token ids", _TEXT, f'{{"prompt":{_many("1", 4_000_000)}}}'
    yield "2,000,000 prompts", _TEXT, f'{{"prompt":{_many(_A, 2_000_000)}}}'
    schema = f'{{"enum":{_many(_A, 1_900_000)}}}'
    yield "schema", _TEXT, f'{{"prompt":"a","structured_outputs":{{"json":{schema}}}}}'
    scored = f'"messages":[{user}],"logprobs":true,"top_logprobs":20,"ignore_eos":true'
    yield "32 answers with logprobs", _CHAT, f'{{{scored},"n":32,"max_tokens":390}}'
    yield "260,000 items", _ITEMS, f'{{"input":{_many(user, 260_000)}}}'
    yield "4,096 long items", _ITEMS, f'{{"input":{_many(_LONG, 4096)}}}'
    yield "260,000 turns", _MESSAGES, f'{{"max_tokens":1,"messages":{_many(user, 260_000)}}}'
    yield "count_tokens", _COUNT, f'{{"messages":[{{"role":"user","content":"{words}"}}]}}'
    yield "tokenize", "/tokenize", f'{{"prompt":"{words}"}}'
    yield "detokenize", "/detokenize", f'{{"tokens":{_many("1", 4_000_000)}}}'
    line = f'{{"a":{_many("{}", 10_000_000)}}}'
    yield "batch line of 30 MB", _BATCH, _batch_line("a", line)
    line = f'{{"a":{_many("{}", 2_700_000)}}}'
    rows = [_batch_line(name, line) for name in "abc"]
    yield "3 batch lines of 8 MB", _BATCH, "\n".join(rows)


def _batch_line(name: str, body: str) -> str:
    return f'{{"custom_id":"{name}","method":"POST","url":"{_TEXT}","body":{body}}}'


_A, _EMPTY = '"a"', '{"role":"assistant"}'
_LONG = json.dumps({"role": "user", "content": "word " * 400})


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes. Raises BenchError."""
    async with AsyncExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-")))
        engine = {"step_s": STEP_S, "max_num_seqs": 64, "total_blocks": 65_536, "clock_text": True}
        config = {
            "router": {"http": {"port": 0}, "grpc": {"port": 0}},
            "worker": {"engine": "fake", "engine_args": engine},
            "up": {},
        }
        service = LocalService("1P1D", config, folder)
        ending.push_async_callback(service.stop)
        progress.step("starting 1P1D")
        await service.start()
        watch = Watch(service.ready["http"], service.ready["model"])
        await ending.enter_async_context(watch)
        rows = []
        for name, path, body in bodies():
            if args.only not in name:
                continue
            data = body.encode() if path == _BATCH else _named(body, watch.model)
            found = []
            for number in range(args.rounds):
                progress.step(f"{name}: round {number + 1} of {args.rounds}")
                found.append(await _measure(watch, path, data))
            rows.append(_row(name, found))
    return rows, [f"worst of {STREAMS} streams and of a /health every 5 ms; times in ms"]


def _named(body: str, model: str) -> bytes:
    return f'{{"model":{json.dumps(model)},{body[1:]}'.encode()


def _row(name: str, rounds: list[tuple[int, float, list[float], list[float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"body": name, "status": rounds[-1][0]}
    row["answered after, s"] = median(x[1] for x in rounds)
    for i, what in enumerate(("/health", "token late")):
        quiet, beside = median(x[2][i] for x in rounds), median(x[3][i] for x in rounds)
        row |= {f"{what}, quiet": quiet, f"{what}, beside": beside}
        row[f"{what}, ratio"] = beside / quiet
    return row


async def _measure(
    watch: Watch, path: str, data: bytes
) -> tuple[int, float, list[float], list[float]]:
    """Return status and duration of an answer, and the worst times in ms without and with the
    body."""
    watch.forget()
    await asyncio.sleep(QUIET_S)
    quiet = watch.worst_ms()
    file = await asyncio.to_thread(_upload, watch.url, data) if path == _BATCH else ""
    watch.forget()
    begun = time.monotonic()
    if path == _BATCH:
        status = await asyncio.to_thread(_batch, watch.url, file)
    else:
        status, _ = await asyncio.to_thread(_post, watch.url, path, data)
    seconds = time.monotonic() - begun
    await asyncio.sleep(_AFTER_S)
    return status, seconds, quiet, watch.worst_ms()


class Watch:
    """Reads streams and requests `/health` while it is open. State: the times since `forget`."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self._target = HttpTarget(url)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_TIMEOUT_S))
        self._times: tuple[list[float], list[float]] = ([], [])  # of /health, and of tokens
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Watch:
        work = [self._health(), *(self._stream() for _ in range(STREAMS))]
        self._tasks = [asyncio.create_task(each) for each in work]
        await asyncio.sleep(QUIET_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._target.aclose()
        await self._session.close()

    def forget(self) -> None:
        for times in self._times:
            times.clear()

    def worst_ms(self) -> list[float]:
        """Return the longest `/health` and the largest delay of a token, in ms. Raises BenchError
        if there were none."""
        failed = [x for x in self._tasks if x.done()]
        if failed or not all(self._times):
            raise BenchError(f"streams or /health failed: {[x.exception() for x in failed]}")
        return [max(times) * 1e3 for times in self._times]

    async def _health(self) -> None:
        while True:
            begun = time.monotonic()
            async with self._session.get(f"{self.url}/health") as answer:
                await answer.read()
            self._times[0].append(time.monotonic() - begun)
            await asyncio.sleep(0.005)

    async def _stream(self) -> None:
        body = {"model": self.model, "prompt": "a", "max_tokens": 1000}
        data = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
        request = Request("", self.model, data, path=_TEXT)
        while True:
            async for piece in self._target.stream(request):
                now = time.monotonic()
                self._times[1].extend(now - float(at) for at in piece.text.split())


def _post(url: str, path: str, data: bytes, kind: str = "application/json") -> tuple[int, bytes]:
    # Runs in a thread, with blocking calls that release the GIL, so that the streams' reader is not
    # delayed.
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, data, {"content-type": kind})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _upload(url: str, line: bytes) -> str:
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    file = part % (b"file", b'; filename="f"', line)
    data = part % (b"purpose", b"", b"batch") + file + b"--b--\r\n"
    _, answer = _post(url, "/v1/files", data, "multipart/form-data; boundary=b")
    found: str = json.loads(answer)["id"]
    return found


def _batch(url: str, file: str) -> int:
    """Create a batch and wait until it has ended. Return the HTTP status of its creation."""
    wanted = {"input_file_id": file, "endpoint": _TEXT, "completion_window": "1h"}
    status, answer = _post(url, _BATCH, json.dumps(wanted).encode())
    path, until = f"{_BATCH}/{json.loads(answer)['id']}", time.monotonic() + _TIMEOUT_S
    while time.monotonic() < until:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
        connection.request("GET", path)
        if json.loads(connection.getresponse().read())["status"] in ("completed", "failed"):
            return status
        connection.close()
        time.sleep(0.2)
    raise BenchError("the batch did not end")

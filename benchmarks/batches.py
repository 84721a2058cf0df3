"""Client of a service's Batch API."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_POLL_S: Final = 0.1
_TIMEOUT_S: Final = 300.0


class BatchClient:
    """A client of the Batch API, used with `async with`. Calls are retried while the router is not
    reachable."""

    def __init__(self, url: str) -> None:
        self._session = aiohttp.ClientSession(url)

    async def __aenter__(self) -> BatchClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._session.close()

    async def begin(self, bodies: Mapping[str, Mapping[str, Any]]) -> str:
        """Start a batch with bodies of `/v1/completions` by custom id. Return its id once its first
        line is answered."""
        rows = [
            json.dumps(
                {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
            )
            for name, body in bodies.items()
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(rows).encode(), filename="in.jsonl")
        wanted = {
            "input_file_id": json.loads(await self._call("POST", "/v1/files", data=form))["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch: str = json.loads(await self._call("POST", "/v1/batches", json=wanted))["id"]
        await self.until(batch, lambda x: x["request_counts"]["completed"] > 0)
        return batch

    async def get(self, batch: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._call("GET", f"/v1/batches/{batch}"))
        return found

    async def until(self, batch: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the batch meets a condition. Raises BenchError after _TIMEOUT_S."""
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not condition(found := await self.get(batch)):  # noqa: ASYNC110 - only polling
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchError(f"the batch made no progress in {_TIMEOUT_S:g} s: {found}") from None

    async def answers(self, batch: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the custom id and the body of each answer of a completed batch."""
        file = (await self.get(batch))["output_file_id"]
        rows = map(json.loads, (await self._call("GET", f"/v1/files/{file}/content")).splitlines())
        return [(row["custom_id"], row["response"]["body"]) for row in rows]

    async def delete_files(self, batch: str) -> None:
        """Delete the input and output files of a batch that has ended."""
        found = await self.get(batch)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if file := found[name]:
                await self._call("DELETE", f"/v1/files/{file}")

    async def cancel(self, batch: str) -> None:
        await self._call("POST", f"/v1/batches/{batch}/cancel")
        await self.until(batch, lambda x: x["status"] == "cancelled")

    async def _call(self, method: str, path: str, **send: Any) -> bytes:
        until = asyncio.get_running_loop().time() + _TIMEOUT_S
        while True:
            try:
                async with self._session.request(method, path, **send) as response:
                    answer = await response.read()
                    if response.status != 200:
                        raise BenchError(f"{method} {path}: {answer.decode()}")
                    return answer
            except aiohttp.ClientConnectionError as error:
                if method != "GET" or asyncio.get_running_loop().time() > until:
                    raise BenchError(f"{method} {path}: {error}") from None
                await asyncio.sleep(_POLL_S)

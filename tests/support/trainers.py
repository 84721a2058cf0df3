"""The calls of trainers at an update of weights, in their order, as their public repositories have
them: prime-rl (src/prime_rl/utils/client.py) and slime (in slime/backends/,
sglang_utils/sglang_engine.py and megatron_utils/update_weight/update_weight_from_disk.py). Both
make each call at every address of an engine at once."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.support.timeouts import START_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Engines:
    """What a trainer takes for engines. An asynchronous context manager."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Engines:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, **body: object) -> list[dict[str, Any]]:
        """Make a call at each address, and return the answers. Raises ClientResponseError."""
        return await asyncio.gather(*(self._call(x, method, path, body) for x in self._addresses))

    async def _call(
        self, address: str, method: str, path: str, body: dict[str, object]
    ) -> dict[str, Any]:
        url, data = f"http://{address}{path}", body if method == "POST" and body else None
        async with self._session.request(method, url, json=data) as reply:
            reply.raise_for_status()
            answer: dict[str, Any] = await reply.json()
            return answer

    # -- prime-rl

    async def prime_rl_ready(self, model: str) -> None:
        await self.call("GET", "/health")
        for answer in await self.call("GET", "/v1/models"):
            assert model in [x["id"] for x in answer["data"]]

    async def prime_rl_update(self, directory: Path) -> None:
        await self.call("POST", "/pause?mode=keep&clear_cache=false")
        try:
            (directory / "NCCL_READY").touch()
            await self.call("POST", "/update_weights", weight_dir=directory.as_posix())
        finally:
            await self.call("POST", "/resume")

    # -- slime

    async def slime_ready(self) -> None:
        await self.call("GET", "/health_generate")
        await self.call("GET", "/flush_cache")

    async def slime_update(self, directory: Path, version: int, *, keeps_files: bool) -> None:
        # slime sends no mode; miles sends `retract`.
        await self.call("POST", "/pause_generation", mode="retract")
        await self.call("GET", "/flush_cache")
        await self.call("GET", "/health_generate")
        await self.call(
            "POST",
            "/update_weights_from_disk",
            model_path=str(directory),
            load_format="auto",
            weight_version=str(version),
            torch_empty_cache=True,
        )
        if not keeps_files:
            shutil.rmtree(directory)
        await self.call("POST", "/continue_generation")

    async def slime_versions(self) -> set[str]:
        return {x["weight_version"] for x in await self.call("GET", "/get_weight_version")}

"""LoRA adapters: their files, and the adapters loaded in an engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, PermissionDenied
from pdserve.security.directories import resolved_within
from pdserve.types import Adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.engine import Engine

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
# Pickles, which vLLM would load if there are no safetensors.
_REFUSED = ("adapter_model.bin", "adapter_model.pt")
_DIGITS = 12
# Pause between two checks whether streams still use an adapter.
_POLL_S = 0.02


def directory_within(allowed: Sequence[str], path: str) -> str:
    """Return the resolved directory of an adapter that a client names. It and its files must be
    below an allowed directory. Raises PermissionDenied, which reveals nothing about other paths."""
    if not allowed:
        text = "adapters cannot be loaded while workers run: see worker.adapter_directories"
        raise PermissionDenied(text, field="lora_path")
    directory = resolved_within(allowed, path, (_CONFIG, _WEIGHTS))
    if directory is None:
        text = f"{path!r} is not below worker.adapter_directories, or its files are not"
        raise PermissionDenied(text, field="lora_path")
    return str(directory)


def read_adapter(name: str, path: str, model: str) -> Adapter:
    """Return the adapter in the directory `path`. Raises InvalidRequest if files are missing. Reads
    all of them, so call it in a thread."""
    directory = Path(path).expanduser().resolve()
    if not ((directory / _WEIGHTS).is_file() and (directory / _CONFIG).is_file()):
        text = f"{directory} holds no LoRA adapter: {_CONFIG} and {_WEIGHTS} are not both there"
        if found := [name for name in _REFUSED if (directory / name).is_file()]:
            text = f"{found[0]} in {directory} can run code when it is loaded: save {_WEIGHTS}"
        raise InvalidRequest(text, field="lora_path")
    digest = hashlib.sha256()
    for file in (_CONFIG, _WEIGHTS):
        with (directory / file).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return Adapter(name, digest.hexdigest()[:_DIGITS], str(directory), model)


class LoadedAdapters:
    """The LoRA adapters of one engine. State: `usable` by new requests, and the number of open
    streams of each, by key."""

    def __init__(self, engine: Engine, renew: Callable[[], None]) -> None:
        """`renew` reports the worker's state to routers."""
        self.usable: dict[str, Adapter] = {}
        self._engine = engine
        self._renew = renew
        self._streams = Counter[str]()
        self._lock = asyncio.Lock()

    def acquire(self, key: str) -> None:
        """Keep an adapter loaded for one more stream."""
        self._streams[key] += 1

    def release(self, key: str) -> None:
        self._streams[key] -= 1
        if not self._streams[key]:
            del self._streams[key]

    async def load(self, name: str, path: str, model: str, digest: str = "") -> Adapter:
        """Load the adapter in the directory `path`, and report it to routers. Raises InvalidRequest
        if it cannot be loaded, or has another digest."""
        async with self._lock:
            adapter = await asyncio.to_thread(read_adapter, name, path, model)
            if digest and adapter.digest != digest:
                text = f"the files in {adapter.path} are not those of other workers ({digest})"
                raise InvalidRequest(text, field="lora_path")
            if adapter.key not in self.usable:
                await self._engine.load_adapter(adapter)
                if await asyncio.to_thread(read_adapter, name, path, model) != adapter:
                    await self._engine.unload_adapter(adapter.key)
                    text = f"the files in {adapter.path} changed while they were loaded"
                    raise InvalidRequest(text, field="lora_path")
                self.usable[adapter.key] = adapter
                self._renew()
            return adapter

    async def unload(self, key: str) -> None:
        """Refuse an adapter to new requests, and unload it when no stream uses it. Ignore an
        unknown adapter."""
        self.usable.pop(key, None)
        self._renew()
        while self._streams[key]:  # noqa: ASYNC110 - streams end in many places
            await asyncio.sleep(_POLL_S)
        async with self._lock:
            if key not in self.usable:  # not loaded again meanwhile
                await self._engine.unload_adapter(key)

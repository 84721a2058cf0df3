"""Faults inside worker processes that no signal can cause.

The service under test starts with `PYTHONPATH` set so that each of its Python processes imports
this module (`environment`), which changes modules of the product as they are imported. A process
does what the file `PID.order` says: break the KV link at each chunk, delay the chunk, send another
block in its place, or stop renewing the lease. It adds a byte to `PID.hits` for each time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

DIRECTORY: Final = "PDSERVE_CHAOS_DIRECTORY"
DELAY_S: Final = 0.5


def environment(directory: Path) -> Mapping[str, str]:
    """Prepare a directory and return the variables that a service needs to read orders in it."""
    start = directory / "python"
    start.mkdir(parents=True, exist_ok=True)
    module = "import benchmarks.chaos.hooks as hooks\nhooks.install()\n"
    (start / "sitecustomize.py").write_text(module, encoding="ascii")
    paths = [str(start), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), DIRECTORY: str(directory)}


def give(directory: Path, pid: int, order: str) -> None:
    """Tell a process what to do wrong from now on; "" for nothing."""
    partial = directory / f"{pid}.partial"
    partial.write_text(order, encoding="ascii")
    partial.replace(directory / f"{pid}.order")


def hits(directory: Path, pid: int) -> int:
    """Return how often a process did as ordered."""
    path = directory / f"{pid}.hits"
    return path.stat().st_size if path.exists() else 0


def _ordered(*orders: str) -> str:
    """Return the order of this process if it is one of `orders`, and count it."""
    path = Path(os.environ[DIRECTORY]) / f"{os.getpid()}.order"
    order = path.read_text(encoding="ascii") if path.exists() else ""
    if order not in orders:
        return ""
    with path.with_suffix(".hits").open("ab") as file:
        file.write(b".")
    return order


def install() -> None:
    """Change modules of the product when they are imported."""
    if os.environ.get(DIRECTORY):
        sys.meta_path.insert(0, _Importer())


class _Importer(MetaPathFinder):
    """Runs a patch after the import of the module that it is for."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in PATCHES:
            return None
        spec: Any = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            PATCHES[fullname](module)

        spec.loader.exec_module = execute_and_patch
        return spec


def _patch_supervisor(module: Any) -> None:
    # A process that is killed on purpose is restarted at once, however often.
    module.LONGEST_PAUSE_S = module.FIRST_PAUSE_S


def _patch_registration(module: Any) -> None:
    pause = module.Registration._pause

    async def faulty_pause(self: Any, seconds: float) -> None:
        await pause(self, seconds)
        while _ordered("no renewal"):  # noqa: ASYNC110 - the order is a file
            await asyncio.sleep(0.05)

    module.Registration._pause = faulty_pause


def _patch_fake_link(module: Any) -> None:
    answer = module._answer

    async def faulty_answer(request: Any, lend: Any, writer: Any) -> None:
        order = _ordered("drop", "delay")
        if order == "drop":
            writer.close()
            return
        if order == "delay":
            await asyncio.sleep(DELAY_S)
        await answer(request, lend, writer)

    module._answer = faulty_answer


def _patch_producer(class_name: str, module: Any) -> None:
    producer = getattr(module, class_name)
    send = producer.send

    def faulty_send(self: Any, chunk: Any, block_ids: list[int], part: Any) -> None:
        order = _ordered("drop", "delay", "corrupt")
        if order == "drop":
            raise ConnectionAbortedError("the link breaks, as ordered")
        if order == "delay":
            time.sleep(DELAY_S)
        if order == "corrupt":
            block_ids = [0, *block_ids[1:]]  # vLLM's unused block
        send(self, chunk, block_ids, part)

    producer.send = faulty_send


PATCHES: Final[Mapping[str, Callable[[ModuleType], None]]] = {
    "pdserve.local.supervisor": _patch_supervisor,
    "workers.registration": _patch_registration,
    "workers.fake.link": _patch_fake_link,
    "kv_transfer.transport.mapped": partial(_patch_producer, "MappedProducer"),
    "kv_transfer.transport.tcp": partial(_patch_producer, "TcpProducer"),
}

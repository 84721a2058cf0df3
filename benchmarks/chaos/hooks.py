"""Faults in a producer's KV link, which no signal can cause.

The service under test starts with `PYTHONPATH` set so that each of its Python processes imports
this module (`environment`), which changes modules of the product as they are imported. A process
does what the file `PID.order` says at each chunk: `drop` breaks the link, `corrupt` sends another
block in its place. It adds a byte to `PID.hits` for each time.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

DIRECTORY: Final = "PDSERVE_CHAOS_DIRECTORY"
SUPERVISOR: Final = "pdserve.local.supervisor"
PRODUCERS: Final[Mapping[str, str]] = {
    "kv_transfer.transport.mapped": "MappedProducer",
    "kv_transfer.transport.tcp": "TcpProducer",
}


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


def install() -> None:
    """Change modules of the product when they are imported."""
    if os.environ.get(DIRECTORY):
        sys.meta_path.insert(0, _Importer())


class _Importer(MetaPathFinder):
    """Changes a module after its import."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != SUPERVISOR and fullname not in PRODUCERS:
            return None
        spec: Any = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def patch(module: Any) -> None:
    if module.__name__ == SUPERVISOR:
        # A process that is killed on purpose is restarted at once, however often.
        module.LONGEST_PAUSE_S = module.FIRST_PAUSE_S
        return
    producer = getattr(module, PRODUCERS[module.__name__])
    send = producer.send

    def faulty_send(self: Any, chunk: Any, block_ids: list[int], part: Any) -> None:
        path = Path(os.environ[DIRECTORY]) / f"{os.getpid()}.order"
        order = path.read_text(encoding="ascii") if path.exists() else ""
        if order:
            with path.with_suffix(".hits").open("ab") as file:
                file.write(b".")
        if order == "drop":
            raise ConnectionAbortedError("the link breaks, as ordered")
        # Block 0 is vLLM's unused one.
        send(self, chunk, [0, *block_ids[1:]] if order == "corrupt" else block_ids, part)

    producer.send = faulty_send

"""What cannot be caused from outside with a signal: faults in a producer's KV link, and copies of
cached KV, which the cost model never finds worth it for tiny models.

The service under test starts with `PYTHONPATH` set so that each of its Python processes imports
this module (`environment`). It patches modules of pdserve when they are imported. At each chunk, a
process reads its fault from the file `PID.order`: `drop` breaks the link, `corrupt` sends another
block instead. It appends a byte to `PID.hits` for each injected fault. With COPIES set, a router
copies a cached prefix whenever another worker has more of it.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

DIRECTORY: Final = "PDSERVE_CHAOS_DIRECTORY"
COPIES: Final = "PDSERVE_CHAOS_COPIES"
PRODUCERS: Final[Mapping[str, str]] = {
    "kv_transfer.transport.mapped": "MappedProducer",
    "kv_transfer.transport.tcp": "TcpProducer",
}


def environment(directory: Path, *, copies_always: bool = False) -> Mapping[str, str]:
    """Prepare a directory for orders. Return the environment variables that make a service read
    them."""
    start = directory / "python"
    start.mkdir(parents=True, exist_ok=True)
    module = "import benchmarks.chaos.hooks as hooks\nhooks.install()\n"
    (start / "sitecustomize.py").write_text(module, encoding="ascii")
    paths = [str(start), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    copies = {COPIES: "1"} if copies_always else {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), DIRECTORY: str(directory), **copies}


def give(directory: Path, pid: int, order: str) -> None:
    """Set the fault that a process injects from now on; "" for none."""
    partial = directory / f"{pid}.partial"
    partial.write_text(order, encoding="ascii")
    partial.replace(directory / f"{pid}.order")


def hits(directory: Path, pid: int) -> int:
    """Return the number of faults that a process has injected."""
    path = directory / f"{pid}.hits"
    return path.stat().st_size if path.exists() else 0


def install() -> None:
    """Install the import hook, if the variable that `environment` sets is present."""
    if os.environ.get(DIRECTORY):
        sys.meta_path.insert(0, _Importer())


class _Importer(MetaPathFinder):
    """An import hook that patches modules after their import."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        apply: Callable[[Any], None] | None = patch if fullname in PRODUCERS else None
        if fullname == "router.placement.policies" and os.environ.get(COPIES):
            apply = copy_always
        if apply is None:
            return None
        spec: Any = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            apply(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def patch(module: Any) -> None:
    producer = getattr(module, PRODUCERS[module.__name__])
    send = producer.send

    def faulty_send(self: Any, chunk: Any, block_ids: list[int], part: Any) -> Any:
        path = Path(os.environ[DIRECTORY]) / f"{os.getpid()}.order"
        order = path.read_text(encoding="ascii") if path.exists() else ""
        if order:
            with path.with_suffix(".hits").open("ab") as file:
                file.write(b".")
        if order == "drop":
            raise ConnectionAbortedError("the link breaks, as ordered")
        # Replace the first block by block 0, vLLM's null block.
        return send(self, chunk, [0, *block_ids[1:]] if order == "corrupt" else block_ids, part)

    producer.send = faulty_send


def copy_always(_policies: ModuleType) -> None:
    """Find every copy worth it. `_policies` has its own name of the function, and stays as it
    is."""
    cost: Any = sys.modules["router.placement.cost"]
    cost.is_clearly_cheaper = lambda _copy_s, _compute_s: True

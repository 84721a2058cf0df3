"""The ready file of `pdserve up`: what serves, where, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.deploy.local.restarts import SupervisedProcess


class ReadyFile:
    """The file at a path, or nothing without one."""

    def __init__(self, path: str, run_dir: Path) -> None:
        self._path = Path(path) if path else None
        self._run_dir = run_dir

    def write(
        self,
        model: str,
        routers: Sequence[SupervisedProcess],
        workers: Mapping[str, SupervisedProcess],
        roles: Mapping[str, str],
    ) -> None:
        """Replace the file at once. `roles`: of the workers when they started, by name."""
        if self._path is None:
            return
        listed = [_entry(child) for child in routers]
        content = {
            "pid": os.getpid(),
            "http": listed[0]["http"],
            "grpc": listed[0]["grpc"],
            "model": model,
            "run_dir": str(self._run_dir),
            "router": listed[0],
            "routers": listed,
            "workers": [
                {**_entry(child), "worker_id": name, "role": roles[name]}
                for name, child in workers.items()
            ],
        }
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._path)

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _entry(child: SupervisedProcess) -> dict[str, object]:
    return {**child.facts, "pid": child.pid, "log": str(child.log)}

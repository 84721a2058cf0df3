"""The ready file: where everything listens and which processes there are, for scripts."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pdserve.up.process import ChildProcess


def describe(
    routers: Sequence[ChildProcess],
    workers: Sequence[ChildProcess],
    facts: Mapping[str, Mapping[str, str]],
    model: str,
    run_dir: Path,
) -> dict[str, object]:
    """The file's content. `facts` is what each process said of itself when it became ready. A role
    is the one of the start: `pdserve status` has the one of now. `http`, `grpc` and `router` are
    those of the first router."""
    listed = [
        {
            "http": facts[router.spec.name]["http"],
            "grpc": facts[router.spec.name]["grpc"],
            "pid": router.pid,
            "log": str(router.log_path),
        }
        for router in routers
    ]
    first = listed[0]
    return {
        "pid": os.getpid(),
        "http": first["http"],
        "grpc": first["grpc"],
        "model": model,
        "run_dir": str(run_dir),
        "router": {"pid": first["pid"], "log": first["log"]},
        "routers": listed,
        "workers": [
            {
                "worker_id": worker.spec.name,
                "role": worker.spec.name.rpartition("-")[0],
                "pid": worker.pid,
                "address": facts[worker.spec.name]["address"],
                "debug": facts[worker.spec.name]["debug"],
                "log": str(worker.log_path),
            }
            for worker in workers
        ],
    }


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write the file so that a reader sees all of it or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)

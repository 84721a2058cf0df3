"""The ready file: where everything listens and which processes there are, for scripts."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pdserve.up.process import ChildProcess


def describe(
    children: Mapping[str, ChildProcess],
    facts: Mapping[str, Mapping[str, str]],
    model: str,
    run_dir: Path,
) -> dict[str, object]:
    """The file's content. `facts` is what each process said of itself when it became ready. A role
    is the one of the start: `pdserve status` has the one of now."""
    router, *workers = children
    return {
        "pid": os.getpid(),
        "http": facts[router]["http"],
        "grpc": facts[router]["grpc"],
        "model": model,
        "run_dir": str(run_dir),
        "router": {"pid": children[router].pid, "log": str(children[router].log_path)},
        "workers": [
            {
                "worker_id": name,
                "role": name.rpartition("-")[0],
                "pid": children[name].pid,
                "address": facts[name]["address"],
                "debug": facts[name]["debug"],
                "log": str(children[name].log_path),
            }
            for name in workers
        ],
    }


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write the file so that a reader sees all of it or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)

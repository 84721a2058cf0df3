"""The memory of this machine, and the share of a CPU worker."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

# KV cache of a CPU worker: this share of its part of the machine's memory, at most
# _CONTEXTS full contexts or LARGEST_CACHE, at least _SMALLEST_CACHE.
_CACHE_SHARE = 0.25
_CONTEXTS = 16
_SMALLEST_CACHE = 64 << 20
_USUAL_CACHE = 256 << 20
LARGEST_CACHE = 1 << 30
# Memory of an engine besides weights and KV cache, per process that runs the model.
ENGINE_BYTES = 512 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class _Group(NamedTuple):
    """A control group that limits the memory. `used`: file with the usage. `cache`: name of the
    counter of cache that the kernel can drop."""

    folder: Path
    limit: int
    used: str
    cache: str


def _groups(groups: Path, root: Path) -> Iterator[_Group]:
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, file, names = root, "memory.max", ("memory.current", "inactive_file")
            elif controllers == "memory":
                top, file = root / "memory", "memory.limit_in_bytes"
                names = ("memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            folder = top / path.strip("/")
            # A parent group, such as a Kubernetes pod's, may have a lower limit.
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # "max": no limit
                    # v1 shows a number near 2^63 where there is no limit.
                    if (limit := int((each / file).read_text())) < 1 << 60:
                        yield _Group(each, limit, *names)
                if each == top:
                    break


_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cgroup_limit_bytes(groups: Path = _GROUPS, root: Path = _ROOT) -> int:
    """Return the lowest memory limit of this process's control groups (v2 or v1), above which the
    kernel kills the process. Return 0 if there is none."""
    return min((x.limit for x in _groups(groups, root)), default=0)


def free_bytes(groups: Path = _GROUPS, root: Path = _ROOT) -> int:
    """Return the memory available to new processes: of the machine, or of a control group if
    less."""
    free = int(psutil.virtual_memory().available)
    for each in _groups(groups, root):
        with suppress(OSError, ValueError):
            used = int((each.folder / each.used).read_text())
            stats = dict(x.split() for x in (each.folder / "memory.stat").read_text().splitlines())
            free = min(free, each.limit - used + int(stats.get(each.cache, 0)))
    return free


def memory_bytes() -> int:
    """Return the memory of the machine, or of the control group if that has less."""
    total = int(psutil.virtual_memory().total)
    return min(total, cgroup_limit_bytes() or total)


def cpu_cache_bytes(model_path: str, threads: int | None) -> int:
    """Return the default size of a worker's KV cache in host memory. A worker's part of the
    machine's memory is its share of all cores, or everything if it is not pinned."""
    cores = os.cpu_count() or 1
    share = int(memory_bytes() * _CACHE_SHARE * min(1.0, (threads or cores) / cores))
    wanted = max(_USUAL_CACHE, _CONTEXTS * _context_bytes(Path(model_path)))
    return max(_SMALLEST_CACHE, min(share, wanted, LARGEST_CACHE))


def _context_bytes(model: Path) -> int:
    """Estimate the KV of one full context with full attention in 16 bits; 0 if unknown."""
    try:
        values = json.loads((model / "config.json").read_text())
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        kv_heads = values.get("num_key_value_heads") or heads
        token = 2 * 2 * values["num_hidden_layers"] * kv_heads * head_dim
        return int(token * values["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def weights_bytes(model_path: str) -> int:
    """Return the size of the files with the weights of a model; 0 if there are none."""
    with suppress(OSError):
        return sum(x.stat().st_size for x in Path(model_path).iterdir() if x.suffix in _WEIGHTS)
    return 0

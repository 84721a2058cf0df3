"""GGUF files as model directories, converted once into a cache beside the hub's (HF_HOME)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pdserve.config import refuse
from pdserve.errors import printable
from pdserve.process.entry_points import process_command

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = "worker.model"
_MAGIC = b"GGUF"
# Part of the names of converted models. Increase it when the output of workers/gguf.py changes.
_REVISION = 2
_PACKAGES = ("transformers", "gguf", "accelerate")
_QUIET_S = 2.0  # a conversion that takes longer is announced
# Limits of a conversion. Weights of 2 bits are 8 times as large in bfloat16, and the largest tensor
# is in memory twice more in float32.
_BASE_S, _BYTES_PER_S = 300.0, 1 << 20
_BASE_BYTES, _BYTES_PER_BYTE = 3 << 30, 16
_LOCK_POLL_S = 0.1
_MAX_REASON = 500


def converted(file: Path) -> Path:
    """Return the model directory that `file` was converted to. Its name contains the digest of the
    file and the versions of the conversion and transformers. Raises ConfigError if the file cannot
    be read."""
    from huggingface_hub import constants

    if not file.is_file():
        refuse(_KEY, f"{file} is not a file")
    try:
        name = f"{file.stem}-{_digest(file)}-{_REVISION}-transformers-{version('transformers')}"
        for package in _PACKAGES:
            version(package)
        cache = Path(constants.HF_HOME, "pdserve", "gguf")
        cache.mkdir(parents=True, exist_ok=True)
        directory, limit_s = cache / name, _BASE_S + file.stat().st_size / _BYTES_PER_S
        with _locked(cache / f"{name}.lock", limit_s):
            if not directory.exists():
                partial = cache / f"{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
                try:
                    _convert(file, partial, limit_s)
                    partial.rename(directory)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except PackageNotFoundError as error:
        needed = "pip install 'pdserve[gguf]'"
        refuse(_KEY, f"{file} cannot be read without the package {error.name}: {needed}")
    except OSError as error:
        refuse(_KEY, f"cannot convert {file}: {error}")
    return directory


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            refuse(_KEY, f"{file} is not a GGUF file")
        content.seek(0)
        return hashlib.file_digest(content, "sha256").hexdigest()[:32]


@contextlib.contextmanager
def _locked(path: Path, limit_s: float) -> Iterator[None]:
    """Hold the lock of one conversion, so that one process converts and the others wait."""
    until = time.monotonic() + limit_s
    with path.open("a") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until:
                refuse(_KEY, f"another process has converted the model for {limit_s:.0f} s: {path}")
            time.sleep(_LOCK_POLL_S)
        yield


def _convert(file: Path, directory: Path, limit_s: float) -> None:
    """Convert `file` in a separate process (workers/gguf.py). Raises ConfigError."""
    most = _BASE_BYTES + _BYTES_PER_BYTE * file.stat().st_size
    most = min(most, psutil.virtual_memory().available)
    words = (*process_command("gguf"), str(file), str(directory), f"--max-memory={most}")
    words += ("--report-fd=1", f"--parent-pid={os.getpid()}")
    reports = b""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                reports, _ = process.communicate(timeout=_QUIET_S)
            if process.returncode is None:
                sys.stderr.write(f"converting {file.name} to bfloat16 for vLLM, once\n")
                reports, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            refuse(_KEY, f"{file} was not converted within {limit_s:.0f} s")
        finally:
            process.kill()
    if process.returncode == 0:
        return
    reason = f"the process that read it ended with {process.returncode}"
    with contextlib.suppress(ValueError, KeyError, IndexError):
        reason = str(json.loads(reports.splitlines()[-1])["failed"])
    # The reason may contain any text of the file.
    plain = printable(reason[:_MAX_REASON])
    refuse(_KEY, f"cannot read {file} with {most >> 20} MiB of memory: {plain}")

"""Compiled code of models on CPUs: which starts of `pdserve up` run it.

To compile takes a minute. So the first start serves eagerly, and a spare process makes the code
meanwhile (spare_compiler.py). The next start of the same model with the same settings finds a
record of it, and starts the workers compiled. All workers of a model are of one kind for the whole
life of a service, because the two kinds round differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pdserve import __version__
from pdserve.config import ranks_of
from pdserve.deploy.local.specs import kv_cache_bytes
from pdserve.process.cpu import cpu_digest
from pdserve.process.entry_points import PROCESSES, entry_point
from pdserve.security.local import write_private
from pdserve.types import GENERATING, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from pdserve.config import WorkerConfig

_ENVIRONMENT = ("VLLM_", "TORCH", "CXX")  # variables that vLLM's compilers read
_KEPT = 8  # records, each with its code of a few MiB
_LOOK_S = 1.0  # between two looks at another service's lock
_MAKING = "serves eagerly; compiled code is being made, used from the next start"
# Engine arguments with which compiled code is not tested.
_UNTESTED = (
    *("speculative_config", "enable_lora", "enable_return_routed_experts", "quantization"),
    *("compilation_config", "runner"),
)


class Record(NamedTuple):
    """What is known of one code. Neither: it has to be made. `files`: sizes by path, if it is
    complete. `refused`: why the model is not compiled."""

    files: Mapping[str, int] = {}
    refused: str = ""


class CodeRecords:
    """The records of the codes in vLLM's cache. Files of this user, shared by all services."""

    def __init__(self, cache: Path | None = None) -> None:
        default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vllm"
        cache = cache or Path(os.environ.get("VLLM_CACHE_ROOT") or default)
        self._folder = cache.expanduser() / "pdserve"

    def look(self, key: str) -> Record:
        """Return the record, without files if one of them is missing or has another size."""
        path = self._path(key)
        try:
            found = Record(**json.loads(path.read_text()))
            is_there = all(Path(x).stat().st_size == size for x, size in found.files.items())
        except (OSError, ValueError, TypeError, AttributeError):
            return Record()
        with contextlib.suppress(OSError):
            os.utime(path)  # the code is in use
        return found if is_there else Record()

    def write(self, key: str, record: Record) -> None:
        """Replace a record. Remove the oldest ones with their code. Raises OSError."""
        write_private(self._path(key), json.dumps(record._asdict()))
        by_age = sorted(self._folder.glob("*.json"), key=lambda x: x.stat().st_mtime)
        for path in by_age[:-_KEPT]:
            for file in self.look(path.stem).files:
                shutil.rmtree(Path(file).parents[1], ignore_errors=True)
            path.unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until no other service makes code in this cache. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("wb") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOOK_S)
            yield

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def key_of(worker: WorkerConfig) -> str:
    """Return a digest of everything that determines the code of a worker. `worker.model` is a
    directory."""
    args = worker.engine_args
    model = [(x.name, x.stat()) for x in sorted(Path(worker.model).iterdir()) if x.is_file()]
    sources = hashlib.sha256()
    for path in sorted(_folder_of(entry_point(PROCESSES, "vllm-preload").module).rglob("*.py")):
        sources.update(path.read_bytes())
    # The package with vLLM has another name in some builds.
    vllm = (_folder_of("vllm") / "_version.py").read_text()
    facts = (
        (__version__, sources.hexdigest(), sys.version, vllm, version("torch")),
        (worker.model, [(name, x.st_size, x.st_mtime_ns) for name, x in model]),
        sorted((name, json.dumps(x, sort_keys=True, default=str)) for name, x in args.items()),
        # The size of the KV cache determines the longest context.
        (len(worker.cores), kv_cache_bytes(worker)),
        worker.role is Role.AGGREGATED,  # vLLM keeps the code of engines with a KV connector apart
        cpu_digest(),
        sorted(x for x in os.environ.items() if x[0].startswith(_ENVIRONMENT)),
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _folder_of(module: str) -> Path:
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@dataclass(slots=True)
class ModelCode:
    """How the workers of one model run, decided once for a service. `names`: of these workers.
    `kind`: "auto" if their configuration decides. `codes`: those that they would run, each with the
    name of a worker that would. `missing`: keys of those to be made. `text`: for the operator."""

    model: str
    names: tuple[str, ...] = ()
    kind: Literal["auto", "eager", "compiled"] = "auto"
    codes: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    text: str = ""


def decide(model: str, workers: Mapping[str, WorkerConfig], records: CodeRecords) -> ModelCode:
    """Decide for a model on a CPU. `workers`: all of the model that may run, by name."""
    generating = {name: x for name, x in workers.items() if x.role in GENERATING}
    found = ModelCode(model, tuple(generating))
    is_set = any(
        x.compilation != "auto" or "enforce_eager" in x.engine_args for x in generating.values()
    )
    if is_set or not generating:
        return found
    found.kind = "eager"
    if why := next(filter(None, map(_unsupported, generating.values())), ""):
        found.text = f"serves eagerly: {why}"
        return found
    found.codes = {key_of(x): name for name, x in generating.items()}
    known = {key: records.look(key) for key in found.codes}
    if why := next((x.refused for x in known.values() if x.refused), ""):
        found.text = f"serves eagerly: {why}"
        return found
    found.missing = tuple(key for key, record in known.items() if not record.files)
    if found.missing:
        found.text = _MAKING
    else:
        found.kind, found.text = "compiled", "serves with compiled code"
    return found


def without_code(code: ModelCode, records: CodeRecords) -> None:
    """Change a decision because code that is recorded cannot be loaded."""
    for key in code.codes:
        records.forget(key)
    code.kind, code.missing, code.text = "eager", tuple(code.codes), _MAKING


def _unsupported(worker: WorkerConfig) -> str:
    """Return why no code is made for a worker, or ""."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "there is no C++ compiler for compiled code (g++)"
    reasons = {
        **{f"engine_args.{x}": worker.engine_args.get(x) for x in _UNTESTED},
        "adapters": worker.adapters,
        "weights_directories": worker.weights_directories,
        # Its KV connector is not that of the engine that makes the code.
        "kv.tiers": worker.role is Role.AGGREGATED and worker.kv.tiers.host_gib,
        "several ranks": ranks_of(worker.engine_args) > 1 or worker.data_parallel.size > 1,
    }
    why = next((name for name, is_set in reasons.items() if is_set), "")
    return why and f"compiled code is not made with {why}"

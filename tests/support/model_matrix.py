"""Try each kind of model, and write the results into the table of docs/models.md.

`python -m tests.support.model_matrix [KIND ...]` tries these kinds, or all; it keeps other rows.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import model_kind_checks
from tests.support.image_checks import check_images
from tests.support.model_kinds import KINDS, make_kind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.model_kind_checks import KindEngines

CHECKS = {
    "one at a time": model_kind_checks.check_lengths,
    "prefix hits": model_kind_checks.check_prefix_hits,
    "four at once": model_kind_checks.check_together,
    "moved": model_kind_checks.check_moves,
    "resumed": model_kind_checks.check_resumed,
    "cancelled": model_kind_checks.check_cancels,
}
IMAGES = "images"  # the check of models with a processor
EXACT, FAILED = "exact", "fails"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
_LIMIT_S = 600.0
# Kinds that tests/slow/test_pipeline.py checks with two stages.
STAGED = ("Llama", "DeepSeek-V2", "Gemma-2", "Llama-4")
_COLUMNS = ["model", "KV cache", *CHECKS, IMAGES, "two stages", "limits of vLLM's CPU build"]


def check_kind(name: str) -> dict[str, str]:
    """Return the result of each check: EXACT, or FAILED and the reason. Raises CalledProcessError
    if a multimodal model needs torchvision and the package index does not have it."""
    with tempfile.TemporaryDirectory() as folder:
        if not KINDS[name].processor or find_spec("torchvision"):
            return asyncio.run(_run(Path(folder) / "model", name))
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--json", name],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": install_torchvision(folder)},
            stdout=subprocess.PIPE,
            check=True,
            timeout=_LIMIT_S,
        )
        found: dict[str, str] = json.loads(done.stdout)
        return found


def install_torchvision(folder: str) -> str:
    """Install torchvision into a folder, and return the PYTHONPATH with which it can be imported
    with a torch without CUDA. Raises CalledProcessError if the package index does not have it."""
    lock = (ROOT / "requirements" / "torchvision-cpu.lock").read_text("utf-8")
    version = re.search(r"^torchvision==([\d.]+)", lock, re.MULTILINE)
    assert version is not None
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*pip, f"torchvision=={version[1]}"], check=True, timeout=_LIMIT_S)
    return os.pathsep.join(
        [str(ROOT / "tests" / "support" / "torchvision_without_cuda"), folder, str(ROOT)]
    )


async def _run(directory: Path, name: str) -> dict[str, str]:
    model, found, kind = await make_kind(directory, name), {}, KINDS[name]
    checks: dict[str, Callable[[KindEngines], Awaitable[None]]] = dict(CHECKS)
    if kind.processor:
        checks[IMAGES] = partial(check_images, kind=kind)
    async with model_kind_checks.kind_engines(model, **kind.engine_args) as of:
        for what, check in checks.items():
            if what in kind.skips:
                continue
            try:
                await check(of)
                found[what] = EXACT
            except (AssertionError, TimeoutError) as error:
                found[what] = f"{FAILED}: {str(error).splitlines()[0] if str(error) else error!r}"
    return found


def row(name: str, found: dict[str, str]) -> str:
    kind = KINDS[name]
    tried = (found.get(what, "-") for what in (*CHECKS, IMAGES))
    cells = [name, kind.cache, *tried, EXACT if name in STAGED else "-", kind.limits]
    return f"| {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    if names[:1] == ["--json"]:
        json.dump(check_kind(names[1]), sys.stdout)
        return
    text, _, table = PAGE.read_text("utf-8").partition("\n| model |")
    rows = {match[1]: match[0] for match in re.finditer(r"^\| ([^|]+) \|.*$", table, re.MULTILINE)}
    for name in names or KINDS:
        rows[name] = row(name, check_kind(name))
        sys.stdout.write(rows[name] + "\n")
    heads = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    lines = [text, *heads, *(rows[name] for name in KINDS if name in rows), ""]
    PAGE.write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

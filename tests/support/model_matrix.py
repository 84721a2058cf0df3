"""Try each kind of model, and write the results into the table of docs/models.md.

`python -m tests.support.model_matrix [KIND ...]` tries these kinds, or all, and keeps other rows.
With `--only COLUMN` it tries what is in that column, and keeps other columns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
STAGES = "two stages"  # all checks, with a prefill engine of two pipeline stages
EXPERTS = "shared experts"  # all checks, with decode in a data-parallel group of two
SPLITS: dict[str, dict[str, Any]] = {
    STAGES: {"prefill": {"pipeline_parallel_size": 2}},
    EXPERTS: {"shares_experts": True},
}
EXACT, FAILED, UNTRIED = "exact", "fails", "-"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
_LIMIT_S = 600.0
# Kinds that tests/slow/test_pipeline.py checks with two stages.
STAGED = ("Llama", "DeepSeek-V2", "Gemma-2", "Llama-4")
# Kinds that tests/slow/test_data_parallel.py checks with shared experts: one with MLA and an expert
# for all tokens, one whose router's weights are in the input of the experts.
SHARED = ("DeepSeek-V2", "Llama-4")
_COLUMNS = ["model", "KV cache", *CHECKS, IMAGES, *SPLITS, "limits of vLLM's CPU build"]


def check_kind(name: str, only: str = "") -> dict[str, str]:
    """Return the result of each check with whole engines, or those of the split `only`: EXACT, or
    FAILED and the reason. Raises CalledProcessError if a multimodal model needs torchvision and the
    package index does not have it."""
    with tempfile.TemporaryDirectory() as folder:
        if not KINDS[name].processor or find_spec("torchvision"):
            return asyncio.run(_run(Path(folder) / "model", name, only))
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--json", "--only", only, name],
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


async def _run(directory: Path, name: str, only: str) -> dict[str, str]:
    model, found, kind = await make_kind(directory, name), {}, KINDS[name]
    checks: dict[str, Callable[[KindEngines], Awaitable[None]]] = dict(CHECKS)
    if kind.processor:
        checks[IMAGES] = partial(check_images, kind=kind)
    try:
        more = {**kind.engine_args, **SPLITS.get(only, {})}
        async with model_kind_checks.kind_engines(model, **more) as of:
            for what, check in checks.items():
                if what in kind.skips:
                    continue
                try:
                    await check(of)
                    found[what] = EXACT
                except (AssertionError, TimeoutError) as error:
                    found[what] = f"{FAILED}: {_first_line(error)}"
    except RuntimeError as error:
        if not only:
            raise
        print(error, file=sys.stderr)  # noqa: T201
        is_missing = "is not supported for this model" in str(error)
        return {only: "not in vLLM" if is_missing else "vLLM does not start"}
    if not only:
        return found
    failed = [f"{what} {result}" for what, result in found.items() if result != EXACT]
    return {only: "; ".join(failed) or EXACT}


def _first_line(error: BaseException) -> str:
    """Return what an error says, or where it was raised if it says nothing."""
    if str(error):
        return str(error).splitlines()[0]
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{last.line} in {last.name}"


def row(name: str, found: dict[str, str]) -> str:
    kind = KINDS[name]
    tried = (found.get(what, UNTRIED) for what in (*CHECKS, IMAGES, *SPLITS))
    return f"| {' | '.join([name, kind.cache, *tried, kind.limits])} |"


def rows_of(page: str) -> dict[str, dict[str, str]]:
    """Return the cells of each row of the table by column."""
    _, _, table = page.partition("\n| model |")
    lines = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    columns = [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: dict(zip(("model", *columns), row, strict=True)) for row in cells}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", choices=("", *SPLITS), default="")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.json:
        json.dump(check_kind(args.names[0], args.only), sys.stdout)
        return
    for name in args.names or KINDS:
        tried = check_kind(name, args.only)
        page = PAGE.read_text("utf-8")
        rows = rows_of(page)
        rows[name] = {**rows.get(name, {}), **tried}
        sys.stdout.write(row(name, rows[name]) + "\n")
        heads = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
        table = [*heads, *(row(each, rows[each]) for each in KINDS if each in rows), ""]
        PAGE.write_text("\n".join([page.partition("\n| model |")[0], *table]), "utf-8")


if __name__ == "__main__":
    main()

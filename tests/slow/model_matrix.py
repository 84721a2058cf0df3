"""Try each kind of model, and write what came of it into the table of docs/models.md.

`python -m tests.slow.model_matrix [KIND ...]`: all kinds, or these; rows of others are kept.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.e2e import kind_checks
from tests.e2e.kinds import KINDS, make_kind

CHECKS = {
    "one at a time": kind_checks.check_lengths,
    "prefix hits": kind_checks.check_prefix_hits,
    "four at once": kind_checks.check_together,
    "moved": kind_checks.check_moves,
    "resumed": kind_checks.check_resumed,
    "cancelled": kind_checks.check_cancels,
}
EXACT, FAILED = "exact", "fails"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
_LIMIT_S = 600.0
_COLUMNS = ["model", "KV cache", *CHECKS, "limits of vLLM's CPU build"]


def tried(name: str) -> dict[str, str]:
    """Return what came of each check: EXACT, or FAILED and why. Raises CalledProcessError if a
    multimodal model needs torchvision, and the package index does not have it."""
    with tempfile.TemporaryDirectory() as folder:
        if not KINDS[name].processor or find_spec("torchvision"):
            return asyncio.run(_run(make_kind(Path(folder) / "model", name), name))
        version = re.search(r"^TORCHVISION := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert version is not None
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        subprocess.run([*pip, f"torchvision=={version[1]}"], check=True, timeout=_LIMIT_S)
        path = os.pathsep.join([str(ROOT / "tests" / "vision"), folder])
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--json", name],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            check=True,
            timeout=_LIMIT_S,
        )
        found: dict[str, str] = json.loads(done.stdout)
        return found


async def _run(model: Path, name: str) -> dict[str, str]:
    found = {}
    async with kind_checks.subject(model, **KINDS[name].engine_args) as of:
        for what, check in CHECKS.items():
            if what in KINDS[name].skips:
                continue
            try:
                await check(of)
                found[what] = EXACT
            except (AssertionError, TimeoutError) as error:
                found[what] = f"{FAILED}: {str(error).splitlines()[0] if str(error) else error!r}"
    return found


def row(name: str, found: dict[str, str]) -> str:
    kind = KINDS[name]
    cells = [name, kind.cache, *(found.get(what, "-") for what in CHECKS), kind.limits]
    return f"| {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    if names[:1] == ["--json"]:
        json.dump(tried(names[1]), sys.stdout)
        return
    text, _, table = PAGE.read_text("utf-8").partition("\n| model |")
    rows = {match[1]: match[0] for match in re.finditer(r"^\| ([^|]+) \|.*$", table, re.MULTILINE)}
    for name in names or KINDS:
        rows[name] = row(name, tried(name))
        sys.stdout.write(rows[name] + "\n")
    heads = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    lines = [text, *heads, *(rows[name] for name in KINDS if name in rows), ""]
    PAGE.write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

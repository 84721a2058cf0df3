"""Commands that tests run to their end: `pdserve`, and other programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]


def run_cli(
    *args: str, stdin: str = "", within_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *args],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


def run(
    *command: object,
    within_s: float = WAIT_S,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program, assert that it succeeds, and return its output."""
    words = [str(word) for word in command]
    ended = subprocess.run(
        words,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-8000:]
    return ended.stdout


def copy_sources(into: Path) -> None:
    """Copy the files of this checkout that git does not ignore."""
    listed = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    for name in filter(lambda x: (ROOT / x).is_file(), listed.splitlines()):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, into / name)

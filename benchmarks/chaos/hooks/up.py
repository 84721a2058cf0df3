"""`pdserve up` whose processes take orders, and are started again however often they die."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.chaos.hooks import clock
from pdserve import cli
from pdserve.up import process, supervision


def main() -> int:
    """As `pdserve`."""
    process.PROGRAM = (sys.executable, "-m", "benchmarks.chaos.hooks.child")
    # Killed on purpose, a process is not to blame.
    supervision.LONGEST_PAUSE_S = supervision.FIRST_PAUSE_S
    clock.preload(os.environ, Path(sys.argv[sys.argv.index("--config") + 1]).parent)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

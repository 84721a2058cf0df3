"""`python -m benchmarks.chaos.hooks.child`: `pdserve router` or `pdserve worker`, taking orders."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.chaos.hooks import clock, logs
from benchmarks.chaos.orders import Orders


def main() -> int:
    """As `pdserve`, whose configuration file is named after the process."""
    config = Path(sys.argv[sys.argv.index("--config") + 1])
    orders = Orders(config.parent, config.stem)
    clock.install(orders)
    logs.install(orders)
    if sys.argv[1] == "worker":
        from benchmarks.chaos.hooks import worker

        worker.install(orders)
    from pdserve import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

"""Where commands print tables."""

from __future__ import annotations

import sys

from rich.console import Console

_WIDTH = 160


def open_console() -> Console:
    """Return a console. Without a terminal rich assumes 80 columns and folds tables."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)

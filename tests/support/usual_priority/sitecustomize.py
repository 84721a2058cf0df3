"""Python without lower priorities: tests run side by side, and one would wait for all the others.

Python imports this file as it starts, from a PYTHONPATH that names this folder.
"""

from __future__ import annotations

import os


def _stay(_more: int) -> int:
    return 0


os.nice = _stay

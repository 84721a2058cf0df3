"""`python -m pdserve` with tests/e2e/corrupt.py loaded first."""

from __future__ import annotations

import sys

import tests.e2e.corrupt  # noqa: F401 - puts itself in place
from pdserve.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Results that come from the CUDA shim say so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SHIM = "on the CUDA shim: kernels and times are not real"


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if "tests.gpu.shim.preload" not in sys.modules or report.when != "call" or report.skipped:
        return None
    if report.failed:  # pytest shows why for its own category only
        return "failed", "F", f"FAILED {SHIM}"
    return f"passed {SHIM}", ".", f"PASSED {SHIM}"

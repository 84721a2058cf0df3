"""Import of the generator in deploy/dashboards, which is a program outside any package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "dashboards"

_spec = importlib.util.spec_from_file_location("dashboards_generate", FOLDER / "generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = generate
_spec.loader.exec_module(generate)

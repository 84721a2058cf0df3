"""How long a test waits for what must happen: long enough for a machine that is ten times slower
than a developer's, and busy. Nothing is slower because of it; a test that fails takes longer."""

from __future__ import annotations

WAIT_S = 120.0

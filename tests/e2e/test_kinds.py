"""Windows and states beside full attention: exact through prefill and decode, and when they move.

tests/slow/test_models.py tries every kind of model, with more prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e import kind_checks
from tests.e2e.kinds import KINDS, WINDOW, make_kind

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["Gemma-2", "Granite-hybrid"])
async def test_windows_and_states_are_handed_over_and_moved(name: str, tmp_path: Path) -> None:
    model = make_kind(tmp_path / "model", name)
    async with kind_checks.subject(model, has_aggregated=False, **KINDS[name].engine_args) as of:
        await kind_checks.check_lengths(of, [3, 32, WINDOW - 1, 97, 300])
        await kind_checks.check_prefix_hits(of, [128])
        await kind_checks.check_moves(of, [100])
        await kind_checks.check_resumed(of)

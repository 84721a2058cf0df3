"""Every order of events of image features from an encode worker; docs/failures.md says what is
covered. Planted defects are found."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer import image_features
from kv_transfer.image_features import FetchEnded, ImageFeatureSource
from kv_transfer.vllm.ec_connector import PdEcConnector
from tests.support.encode_model import FAULTS, EncodeWorld
from tests.support.explorer import assert_finds, explore

if TYPE_CHECKING:
    from tests.support.explorer import Defect

DEEP = bool(os.environ.get("PDSERVE_EXPLORE_DEEP"))
WORLDS: list[tuple[int, tuple[str, ...], int, int, bool]] = [
    (1, FAULTS, 1, 1, False),
    (1, FAULTS, 1, 1, True),
    (1, ("kill_p",), 2, 2, False),
]
DEEPER: list[tuple[int, tuple[str, ...], int, int, bool]] = [
    (1, ("late", "kill_p"), 2, 1, True),  # the pool of the encode worker is full
    (2, FAULTS, 1, 1, False),
    (1, FAULTS, 2, 2, False),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kv_transfer.vllm.ec_connector", "kv_transfer.protocol.consumer"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.mark.parametrize(
    ("faults", "kinds", "images", "blocks", "is_pull"), WORLDS + (DEEPER if DEEP else [])
)
def test_no_order_of_events_breaks_a_promise(
    faults: int, kinds: tuple[str, ...], images: int, blocks: int, is_pull: bool
) -> None:
    world = EncodeWorld(faults, kinds, images=images, blocks=blocks, is_pull=is_pull)
    explored = explore(world)
    assert explored.states > 300
    assert explored.ends > 1


def without_number(self: ImageFeatureSource, index: int) -> str:
    """Give all images of a request one transfer."""
    return f"{self.transfer_id}/{0 * index}"


def waits_on(self: Any, fetches: Any) -> None:
    """Wait for features also after their deadline."""


def without_reason(transfer_id: str, _reason: str) -> FetchEnded:
    """Report a failed fetch as one that succeeded."""
    return FetchEnded(transfer_id)


@pytest.mark.parametrize(
    ("defect", "images", "said"),
    [
        ((ImageFeatureSource, "transfer_of", without_number), 2, "KeyError|another image"),
        ((PdEcConnector, "_abandon", waits_on), 1, "no order of events ends this"),
        ((image_features, "FetchEnded", without_reason), 1, "KeyError|counted what was not"),
    ],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch,
    defect: Defect,
    images: int,
    said: str,
) -> None:
    assert_finds(
        monkeypatch,
        defect,
        said,
        EncodeWorld(1, ("kill_p", "lose"), images=images, blocks=images, is_pull=False),
    )

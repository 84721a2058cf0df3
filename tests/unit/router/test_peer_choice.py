"""The choice of another region: a pure function of what the regions publish and of the request."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pdserve.config import RouterConfig, parse
from pdserve.errors import ConfigError
from pdserve.types import Adapter, GenerateRequest, SamplingParams
from router.placement.peers import SPILL_GAIN, ModelLoad, PeerView, choose_peer
from router.placement.values import may_hold
from tests.support.router_stack import MODEL, PROMPT

OWN = ModelLoad(MODEL, 1, {})
POINTS = {1: 0.1, 128: 0.2, 1024: 1.0}


def request(**changes: Any) -> GenerateRequest:
    values = {"prompt_token_ids": PROMPT, "sampling": SamplingParams(max_tokens=8), **changes}
    return GenerateRequest(request_id="r1", model="demo", **values)


def peer(region: str, *, ttft_s: float | None = 0.1, **changes: Any) -> PeerView:
    """Return a region near by that serves the model `demo`."""
    points = {} if ttft_s is None else {1: ttft_s, 1024: ttft_s}
    load = ModelLoad(MODEL, workers=2, ttft_s=points)
    view = PeerView(region, f"{region}:1", "", 0.01, {"demo": load}, {})
    return structs.replace(view, **changes)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0.1), (128, 0.2), (576, 0.6), (2048, 1.9142857142857144)]
)
def test_ttft_between_and_beyond_the_published_lengths(tokens: int, expected: float) -> None:
    load = ModelLoad(MODEL, 1, POINTS)
    assert load.predicted_s(tokens) == pytest.approx(expected)
    assert ModelLoad(MODEL, 1, {}).predicted_s(tokens) is None
    assert ModelLoad(MODEL, 1, {1: 0.5}).predicted_s(tokens) == 0.5


def test_the_link_and_the_prompts_on_their_way_count() -> None:
    far, near = peer("far", delay_s=0.08), peer("near", ttft_s=0.15)
    assert choose_peer([far, near], request(), OWN).region == "near"
    busy = structs.replace(near, models={"demo": ModelLoad(MODEL, 2, POINTS)}, sent={"demo": 2000})
    assert choose_peer([far, busy], request(), OWN).region == "far"


def test_regions_without_a_prediction_are_last() -> None:
    unknown, slow = peer("unknown", ttft_s=None), peer("slow", ttft_s=9.0)
    assert choose_peer([unknown, slow], request(), OWN).region == "slow"
    near = structs.replace(unknown, region="near", delay_s=0.001)
    assert choose_peer([unknown, near], request(), OWN).region == "near"


@pytest.mark.parametrize(
    ("changes", "asked", "reason"),
    [
        ({"reason": "it drains"}, {}, "it drains"),
        ({"models": {}}, {}, "no worker is ready for model demo"),
        ({"models": {"demo": ModelLoad(MODEL, 0, {})}}, {}, "no worker is ready"),
        ({}, {"regions": frozenset({"eu"})}, "may be in eu alone"),
        ({}, {"adapter": Adapter("a", "d", "/a", "demo")}, "adapter a@d is not loaded"),
        ({}, {"prompt_token_ids": (1,) * 4096}, "has a context of 4096 tokens"),
        (
            {"models": {"demo": ModelLoad(replace(MODEL, tokenizer="x"), 1, {})}},
            {},
            "another tokenizer",
        ),
        ({"models": {"demo": ModelLoad(MODEL, 1, {}, weights="w")}}, {}, "has other weights"),
        (
            {"models": {"demo": ModelLoad(replace(MODEL, dtype="bfloat16"), 1, {})}},
            {"resume": (1, 2)},
            "has begun in float32",
        ),
    ],
)
def test_a_region_that_cannot_take_a_request_says_why(
    changes: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    choice = choose_peer([peer("us", **changes)], request(**asked), OWN)
    assert choice.region == ""
    assert reason in choice.reasons["us"]


def test_a_request_leaves_for_speed_only_if_that_is_clear_and_wanted() -> None:
    here_s = 1.0
    enough = here_s * (1 - SPILL_GAIN) - 0.011
    for ttft_s, spill_over, expected in (
        (enough, True, "us"),
        (enough, False, ""),
        (enough + 0.002, True, ""),
        (None, True, ""),
    ):
        view = peer("us", ttft_s=ttft_s, spill_over=spill_over)
        assert choose_peer([view], request(), OWN, here_s=here_s).region == expected
        assert choose_peer([view], request(), OWN).region == "us"


def test_no_choice_is_outside_the_regions_of_a_request_or_was_tried() -> None:
    chance, names = random.Random(1), ("ap", "eu", "us")
    for _ in range(500):
        views = [
            peer(
                x,
                ttft_s=chance.choice((None, 0.1, 2.0)),
                delay_s=chance.random(),
                reason=chance.choice(("", "", "it drains")),
            )
            for x in names
        ]
        regions = chance.choice((None, *(frozenset(chance.sample(names, n)) for n in (1, 2))))
        tried = set(chance.sample(names, chance.randrange(3)))
        here_s = chance.choice((None, 1.0))
        asked = request(regions=regions)
        found = choose_peer(views, asked, OWN, without=tried, here_s=here_s).region
        open_to = [x for x in views if may_hold(regions, {"region": x.region}) and not x.reason]
        assert found not in tried
        if found:
            assert found in [x.region for x in open_to]
        elif here_s is None:
            assert {x.region for x in open_to} <= tried


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({"peers": [{"region": "us", "address": "us:1"}]}, "topology.region", "is required"),
        (
            {"topology": {"region": "us"}, "peers": [{"region": "us", "address": "us:1"}]},
            "peers[0].region",
            "the region of this router",
        ),
        (
            {"topology": {"region": "eu"}, "peers": [{"region": "us", "address": "us"}]},
            "peers[0].address",
            "is not host:port",
        ),
        (
            {"topology": {"region": "eu"}, "peers": [{"address": "us:1"}]},
            "peers[0].region",
            "must not be empty",
        ),
        (
            {
                "topology": {"region": "eu"},
                "residency": {"regions": ["eu"]},
                "peers": [{"region": "us", "address": "us:1"}],
            },
            "peers[0].region",
            "is not one of residency.regions: eu",
        ),
        (
            {
                "topology": {"region": "eu"},
                "peers": [{"region": "us", "address": x} for x in ("us:1", "us:2")],
            },
            "peers[1].region",
            "named twice",
        ),
        (
            {
                "topology": {"region": "eu"},
                "access": {"worker_token_file": "/token"},
                "peers": [{"region": "us", "address": "us:1"}],
            },
            "access.peer_token_file",
            "must authenticate",
        ),
    ],
)
def test_a_configuration_that_cannot_be_right_is_refused(
    values: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        parse(RouterConfig, values)
    assert error.value.field == key

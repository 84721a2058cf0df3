"""Tenants pay for bodies before they are read."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import AccessConfig, TenantConfig
from pdserve.security.keys import hash_key
from router.admission import Tenants
from router.api.auth import Keys
from router.dialects import fields
from tests.support.images import png
from tests.support.router_apis import CHAT, COMPLETIONS, MODEL, completion

if TYPE_CHECKING:
    from tests.support.router_apis import RouterApis, ScriptedGenerator

KEY = "pds-" + "k" * 43
CONFIG = TenantConfig(
    name="acme", keys=(hash_key(KEY),), tokens_per_minute=1000.0, requests_per_minute=2.0
)


@pytest.fixture
def keys() -> Keys:
    return Keys((CONFIG,), AccessConfig())


@pytest.fixture
def tenants() -> Tenants:
    return Tenants([CONFIG])


async def ask(apis: RouterApis, path: str, body: object) -> tuple[int, str]:
    status, answer = await apis.post(path, body, {"authorization": f"Bearer {KEY}"})
    return status, answer.get("error", {}).get("reason", "")


async def test_a_refused_body_is_paid_for_and_the_next_one_is_not_read(
    apis: RouterApis, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = b"[" * 3000
    assert await ask(apis, COMPLETIONS, wrong) == (400, "")
    monkeypatch.setattr(fields, "read", None)
    assert await ask(apis, COMPLETIONS, wrong) == (429, "tenant_token_rate")


async def test_a_request_for_an_answer_is_charged_by_admission_alone(apis: RouterApis) -> None:
    body = completion(user="u" * 3000)
    for _ in range(5):
        assert await ask(apis, COMPLETIONS, body) == (200, "")


async def test_the_bytes_of_an_image_are_not_charged_as_text(
    apis: RouterApis, generator: ScriptedGenerator
) -> None:
    generator.served[MODEL] = replace(generator.served[MODEL], modalities={"image": 1})
    image = base64.b64encode(png(3, 4) + bytes(15_000)).decode()
    url = {"url": f"data:image/png;base64,{image}"}
    content = [{"type": "image_url", "image_url": url}]
    body = {"messages": [{"role": "user", "content": content}]}
    wrong = {"messages": [{"role": "user", "content": [*content, *content]}]}
    assert await ask(apis, CHAT, wrong) == (400, "")
    assert await ask(apis, CHAT, body) == (200, "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [70]}),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": "a"}]},
        ),
    ],
)
async def test_tokenising_counts_as_a_request(apis: RouterApis, path: str, body: Any) -> None:
    for _ in range(2):
        assert (await ask(apis, path, body))[0] == 200
    assert (await ask(apis, path, body))[0] == 429

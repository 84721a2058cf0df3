"""Both apis where API keys are asked for."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import openai
import pytest
from scripted import ANSWER_TEXT, CHAT, chat

from pdserve.client import Client
from pdserve.config import TenantConfig
from pdserve.errors import Unauthenticated
from pdserve.security.keys import hash_key, new_key
from router.api.auth import Keys

if TYPE_CHECKING:
    from scripted import Apis

KEY = new_key()


@pytest.fixture
def keys() -> Keys:
    return Keys([TenantConfig("a", (hash_key(KEY),)), TenantConfig("b")])


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}])
async def test_http_without_a_known_key(
    apis: Apis, header: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/demo")):
        data = json.dumps(chat()) if method == "POST" else None
        async with apis.session.request(
            method, apis.url + path, data=data, headers=header
        ) as response:
            error = (await response.json())["error"]
            assert response.status == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert apis.generator.requests == []
    assert KEY not in caplog.text
    assert "wrong" not in caplog.text


async def test_what_says_nothing_of_requests_is_open(apis: Apis) -> None:
    for path in ("/health", "/ready", "/metrics"):
        async with apis.session.get(apis.url + path) as response:
            assert response.status == 200


async def test_http_with_a_key_is_served_as_its_tenant(apis: Apis) -> None:
    async with openai.AsyncOpenAI(base_url=f"{apis.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == ["demo"]
        answer = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}]
        )
    assert answer.choices[0].message.content == ANSWER_TEXT
    assert apis.generator.requests[0].tenant == "a"
    async with openai.AsyncOpenAI(base_url=f"{apis.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_grpc_without_a_known_key(apis: Apis, key: str) -> None:
    async with Client(apis.grpc_address, api_key=key) as client:
        with pytest.raises(Unauthenticated, match="API key"):
            await client.list_models()
        with pytest.raises(Unauthenticated, match="API key"):
            await anext(client.generate("hi"))
    assert apis.generator.requests == []


async def test_grpc_with_a_key_is_served_as_its_tenant(apis: Apis) -> None:
    async with Client(apis.grpc_address, api_key=KEY) as client:
        assert [card.name for card in await client.list_models()] == ["demo"]
        assert "".join([delta.text async for delta in client.generate("hi")]) == ANSWER_TEXT
    assert apis.generator.requests[0].tenant == "a"

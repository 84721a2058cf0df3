"""API keys: whose they are, on both APIs, and that no key is told to anyone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import openai
import pytest

from pdserve.client import Client
from pdserve.config import AccessConfig, TenantConfig
from pdserve.errors import ConfigError, PermissionDenied, Unauthenticated
from pdserve.security.keys import hash_key, is_hash, new_key
from router.api.auth import EVERYONE, Keys
from tests.support.router_apis import ANSWER_TEXT, CHAT, HELLO, chat

if TYPE_CHECKING:
    from tests.support.router_apis import RouterApis

KEY, OTHER = new_key(), "a key that somebody chose"


@pytest.fixture
def keys() -> Keys:
    tenants = ("a", (hash_key(KEY), hash_key(new_key()))), ("b", (hash_key(OTHER),)), ("keyless",)
    return Keys(TenantConfig(*tenant) for tenant in tenants)


@pytest.mark.parametrize(
    ("header", "tenant"), [(f"Bearer {KEY}", "a"), (f"BEARER  {OTHER} ", "b")], ids=["a", "b"]
)
def test_a_key_is_its_tenants(keys: Keys, header: str, tenant: str) -> None:
    assert keys.tenant_of(header) == tenant


@pytest.mark.parametrize(
    "header",
    [None, "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {hash_key(KEY)}"],
    ids=["none", "space", "bare", "basic", "longer", "hash"],
)
def test_anything_else_is_refused_without_a_retry(keys: Keys, header: str | None) -> None:
    with pytest.raises(Unauthenticated, match="API key") as caught:
        keys.tenant_of(header)
    assert KEY[:8] not in str(caught.value)


def test_without_tenants_everyone_is_let_in() -> None:
    assert EVERYONE.tenant_of(None) == EVERYONE.tenant_of(f"Bearer {KEY}") == ""


def test_only_administrators_load_adapters(keys: Keys) -> None:
    EVERYONE.check_admin(None)
    with pytest.raises(PermissionDenied, match=r"http\.host: set router\.access\.admin_keys"):
        Keys(http_host="0.0.0.0").check_admin(None)
    access = AccessConfig(admin_keys=(hash_key(OTHER),), worker_token_file="token")
    Keys((), access).check_admin(f"Bearer {OTHER}")
    for closed in (keys, Keys((), access)):
        with pytest.raises(PermissionDenied, match=r"access\.admin_keys"):
            closed.check_admin(f"Bearer {KEY}")


async def test_http_does_not_load_adapters_for_tenants(apis: RouterApis) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"lora_name": "red", "lora_path": "/red"}
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        url = f"{apis.url}/v1/{path}"
        async with apis.session.post(url, json=body, headers=headers) as response:
            assert response.status == 403
    assert not apis.generator.loaded


def test_the_configuration_has_hashes_only() -> None:
    with pytest.raises(ConfigError, match=r"keys\[1\]: must be a hash") as caught:
        TenantConfig("a", (hash_key(KEY), OTHER))
    assert OTHER not in str(caught.value)
    assert hash_key("abc") == (
        "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert not is_hash(hash_key(KEY) + "0")


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}])
async def test_http_without_a_known_key(
    apis: RouterApis, header: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/demo")):
        body = chat() if method == "POST" else None
        url = apis.url + path
        async with apis.session.request(method, url, json=body, headers=header) as response:
            error = (await response.json())["error"]
            assert response.status == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert apis.generator.requests == []
    assert "wrong" not in caplog.text
    for path in ("/health", "/ready", "/metrics"):
        async with apis.session.get(apis.url + path) as response:
            assert response.status == 200


async def test_http_with_a_key_is_served_as_its_tenant(apis: RouterApis) -> None:
    async with openai.AsyncOpenAI(base_url=f"{apis.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == ["demo"]
        answer = await client.chat.completions.create(model="demo", messages=HELLO)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == ANSWER_TEXT
    assert apis.generator.requests[0].tenant == "a"


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_grpc_without_a_known_key(apis: RouterApis, key: str) -> None:
    async with Client(apis.grpc_address, api_key=key) as client:
        with pytest.raises(Unauthenticated, match="API key"):
            await client.list_models()
        with pytest.raises(Unauthenticated, match="API key"):
            await anext(client.generate("hi"))
    assert apis.generator.requests == []


async def test_grpc_with_a_key_is_served_as_its_tenant(apis: RouterApis) -> None:
    async with Client(apis.grpc_address, api_key=KEY) as client:
        assert [card.name for card in await client.list_models()] == ["demo"]
        assert "".join([delta.text async for delta in client.generate("hi")]) == ANSWER_TEXT
    assert apis.generator.requests[0].tenant == "a"


async def test_the_key_may_come_as_anthropics_clients_send_it(apis: RouterApis) -> None:
    body = {**chat(), "max_tokens": 3}
    for key, status in ((KEY, 200), ("wrong", 401)):
        found, answer = await apis.post("/v1/messages", body, {"x-api-key": key})
        assert found == status
        if status == 401:
            assert answer["error"]["type"] == "authentication_error"

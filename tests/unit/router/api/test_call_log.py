"""What an operator sees of calls that were refused, and of who changed what."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.security.keys import name_of
from pdserve.types import SamplingParams
from tests.support.router_apis import CHAT, JSON, Hold, chat
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.router_apis import RouterApis


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counted(apis: RouterApis, name: str = "api_responses") -> set[str]:
    text = apis.metrics.render()[0].decode()
    head = f"pdserve_{name}_total"
    return {line.removeprefix(head) for line in text.splitlines() if line.startswith(head)}


async def test_a_refused_request_is_counted_logged_and_shown(
    apis: RouterApis, tmp_path: Path
) -> None:
    secret = "the prompt"
    body = chat(messages=[{"role": "user", "content": secret}], no_such_field=1)
    status, _ = await apis.post(CHAT, body, {"x-request-id": "mine", "user-agent": "sdk/2"})
    assert status == 400
    (line,) = lines(tmp_path / "access.log")
    shown = {name: line[name] for name in ("id", "route", "status", "code", "field", "user_agent")}
    assert shown == {
        "id": "mine",
        "route": CHAT,
        "status": "400",
        "code": "unknown_parameter",
        "field": "no_such_field",
        "user_agent": "sdk/2",
    }
    assert secret not in (tmp_path / "access.log").read_text()
    labels = f'{{code="unknown_parameter",route="{CHAT}",status="400"}} 1.0'
    assert counted(apis) == {labels}
    assert counted(apis, "refusals") == {'{code="unknown_parameter",model="",reason=""} 1.0'}
    (record,) = apis.log.ended
    assert (record.request_id, record.outcome, record.admitted) == ("mine", "unknown_parameter", 0)
    assert not apis.log.open


async def test_a_refused_grpc_call_is_logged_like_an_http_request(
    apis: RouterApis, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest):
        async for _ in apis.client.generate("hi", SamplingParams(max_tokens=10_000)):
            pass
    (line,) = lines(tmp_path / "access.log")
    route, code = "/pdserve.v1.Generation/Generate", "context_length_exceeded"
    assert (line["route"], line["status"], line["code"]) == (route, "INVALID_ARGUMENT", code)
    assert [x.outcome for x in apis.log.ended] == [code]


async def test_paths_that_clients_make_up_are_no_labels(apis: RouterApis, tmp_path: Path) -> None:
    for path in ("/a", "/b"):
        async with apis.session.get(apis.url + path) as response:
            assert response.status == 404
    async with apis.session.get(apis.url + CHAT) as response:
        assert response.status == 405
    assert counted(apis) == {
        '{code="not_found",route="",status="404"} 2.0',
        f'{{code="method_not_allowed",route="{CHAT}",status="405"}} 1.0',
    }
    assert not apis.log.ended


async def test_a_client_that_leaves_is_logged_and_health_checks_are_not(
    apis: RouterApis, tmp_path: Path
) -> None:
    async with apis.session.get(f"{apis.url}/health") as response:
        assert response.status == 200
    apis.generator.script = (Hold.FOR_EVER,)
    async with apis.session.request("POST", apis.url + "/v1/models") as response:
        assert response.status == 405
    request = apis.session.post(apis.url + CHAT, data=json.dumps(chat()), headers=JSON)
    asking = asyncio.create_task(request.__aenter__())
    await apis.generator.waiting.wait()
    asking.cancel()
    await apis.generator.left.wait()
    await wait_until(lambda: len(lines(tmp_path / "access.log")) == 2)
    assert [x["status"] for x in lines(tmp_path / "access.log")] == ["405", "499"]


async def test_actions_on_adapters_are_in_the_audit_log(apis: RouterApis, tmp_path: Path) -> None:
    key = {"authorization": "Bearer pd-operator", **JSON}
    for name, body in (
        ("load", {"lora_name": "a", "lora_path": "/a"}),
        ("unload", {"lora_name": "a"}),
    ):
        url = f"{apis.url}/v1/{name}_lora_adapter"
        async with apis.session.post(url, json=body, headers=key) as response:
            assert response.status == 200
    found = lines(tmp_path / "audit.log")
    assert [(x["action"], x["by"], x["result"]) for x in found] == [
        ("load_adapter", f"key {name_of('pd-operator')}", "ok"),
        ("unload_adapter", f"key {name_of('pd-operator')}", "ok"),
    ]

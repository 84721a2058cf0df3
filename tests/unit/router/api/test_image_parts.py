"""Images in the bodies of all APIs, small and large."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.model.tokenizer import ChatMessage, MessageImage
from pdserve.types import SamplingParams
from router.intake.charge import image_bytes
from tests.support.images import png
from tests.support.router_apis import CHAT, MODEL, FakeRenderer, RouterApis

if TYPE_CHECKING:
    from tests.support.router_apis import ScriptedGenerator

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
RED, BLUE = png(3, 4), png(5, 6)
LARGE = 2000  # bytes; a small body with two images has less


@pytest.fixture
def large() -> int:
    return LARGE


@pytest.fixture(autouse=True)
def sees(generator: ScriptedGenerator) -> None:
    """Make the served model take two images."""
    generator.served[MODEL] = replace(generator.served[MODEL], modalities={"image": 2})


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def part(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


TEXT = {"type": "text", "text": "a"}
SAME = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]
BLOCKS = [
    TEXT,
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "RED"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "BLUE"}},
]
for _block, _data in zip(BLOCKS[1:], (RED, BLUE), strict=True):
    _block["source"]["data"] = base64_of(_data)  # type: ignore[index]
ITEMS = [
    {"type": "input_text", "text": "a"},
    {"type": "input_image", "image_url": url_of(RED)},
    {"type": "input_image", "image_url": url_of(BLUE), "detail": "low"},
]
BODIES = {
    CHAT: chat(TEXT, part(url_of(RED)), part(url_of(BLUE), detail="low")),
    MESSAGES: {"messages": [{"role": "user", "content": BLOCKS}], "max_tokens": 4},
    RESPONSES: {"input": [{"role": "user", "content": ITEMS}]},
}


def padded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b" " * LARGE


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_images_are_rendered_in_their_places(
    apis: RouterApis, rendered: FakeRenderer, path: str, is_large: bool
) -> None:
    body = BODIES[path]
    status, answer = await apis.post(path, padded(body) if is_large else body)
    assert status == 200, answer
    (prompt,) = rendered.prompts
    (message,) = json.loads(prompt.chat.messages_json)
    assert (message["role"], message["content"]) == ("user", SAME)
    assert prompt.chat.add_generation_prompt
    assert [x.data for x in prompt.images] == [RED, BLUE]
    assert [x.detail for x in prompt.images] == ["auto", "auto" if path == MESSAGES else "low"]
    (made,) = apis.generator.requests
    assert (made.prompt_token_ids, len(made.media)) == ((9, 9, 9, 9), 2)
    assert made.sampling.max_tokens <= 60, "the context is 64, of which the images take 4"


async def test_a_stored_response_keeps_its_images(apis: RouterApis, rendered: FakeRenderer) -> None:
    _, first = await apis.post(RESPONSES, BODIES[RESPONSES])
    await apis.post(RESPONSES, {"input": "b", "previous_response_id": first["id"]})
    assert [x.data for x in rendered.prompts[1].images] == [RED, BLUE]


@pytest.mark.parametrize("is_large", [False, True])
async def test_grpc_takes_parts(apis: RouterApis, rendered: FakeRenderer, is_large: bool) -> None:
    text = "a" * 2100 if is_large else "a"
    generator = apis.generator
    generator.served[MODEL] = replace(generator.served[MODEL], max_model_len=4096)
    parts = ["b", MessageImage(RED, "", ""), MessageImage("http://a.b/c.png", "high", "")]
    messages = [ChatMessage("system", text), ChatMessage("user", "", parts=parts)]
    async for _ in apis.client.generate(messages, SamplingParams(max_tokens=4), model=MODEL):
        pass
    (prompt,) = rendered.prompts
    assert [(x.data, x.detail) for x in prompt.images] == [(RED, "auto"), (b"", "high")]
    assert rendered.urls == ["http://a.b/c.png"]


AT = "messages[0].content[0].image_url.url"
BAD: list[tuple[dict[str, Any], str, str]] = [
    (chat(part("data:image/png,abc")), AT, "base64"),
    (chat(part("data:image/png;base64,????")), AT, "not base64"),
    (chat(part(url_of(b"GIF89a"))), AT, "cut off"),
    (chat(part(url_of(b"hello"))), AT, "not a PNG"),
    (chat(part(url_of(png(1 << 16, 1 << 16)))), AT, "pixels"),
    (chat(part(url_of(RED, "video/mp4"))), AT, "video/mp4 is no image"),
    (chat(part("file:///etc/passwd")), AT, "data URL"),
    (chat(part("http://a/" + "b" * 5000)), AT, "4096"),
    (chat(*[part(url_of(RED))] * 3), AT.replace("content[0]", "content[2]"), "takes 2"),
    (chat({"type": "input_audio", "input_audio": {}}), "messages[0].content[0].type", "'inp"),
    (chat({"type": "file", "file": {}}), "messages[0].content[0].type", "'file' is not sup"),
]


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_bad_image_is_refused_by_its_place(apis: RouterApis, is_large: bool) -> None:
    for body, field, reason in BAD:
        status, answer = await apis.post(CHAT, padded(body) if is_large else body)
        error = answer["error"]
        assert (status, error["param"]) == (400, field)
        assert reason in error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_without_eyes_refuses_images(apis: RouterApis, path: str) -> None:
    served = apis.generator.served
    served[MODEL] = replace(served[MODEL], modalities={})
    status, answer = await apis.post(path, BODIES[path])
    assert status == 400
    assert "model demo takes no images" in answer["error"]["message"]


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("path", "field"), [("/tokenize", "count"), (f"{MESSAGES}/count_tokens", "input_tokens")]
)
async def test_images_are_counted(
    apis: RouterApis, rendered: FakeRenderer, path: str, field: str, is_large: bool
) -> None:
    body = {"messages": BODIES[MESSAGES if path.startswith("/v1") else CHAT]["messages"]}
    status, answer = await apis.post(path, padded(body) if is_large else body)
    assert (status, answer[field]) == (200, 4), answer
    (prompt,) = rendered.prompts
    assert [x.data for x in prompt.images] == [RED, BLUE]


async def test_grpc_refuses_a_message_with_content_and_parts(apis: RouterApis) -> None:
    message = ChatMessage("user", "a", parts=["b"])
    with pytest.raises(InvalidRequest, match="both content and parts"):
        async for _ in apis.client.generate([message], SamplingParams(max_tokens=4), model=MODEL):
            pass


@pytest.mark.parametrize("separators", [None, (",", ":")])
@pytest.mark.parametrize("path", BODIES)
def test_bytes_of_images_are_counted_before_a_body_is_read(
    path: str, separators: tuple[str, str] | None
) -> None:
    body = json.dumps({**BODIES[path], "user": "base64"}, separators=separators).encode()
    assert image_bytes(body) == len(base64_of(RED)) + len(base64_of(BLUE))

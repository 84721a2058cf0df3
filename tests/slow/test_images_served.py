"""Images over HTTP to a tiny vision model on real engines: `pdserve serve` with one prefill and one
decode worker answers as it does with one aggregated worker."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, closing
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import pytest
from PIL import Image

from tests.support.commands import ROOT
from tests.support.engine_pair import prompt
from tests.support.image_checks import picture
from tests.support.images import png
from tests.support.model_matrix import install_torchvision
from tests.support.pdserve_up import UpProcess
from tests.support.served_up import ServedUp
from tests.support.timeouts import START_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    Body = dict[str, Any]

# The kind that starts fastest. Its positions are of three dimensions, so an answer is wrong without
# the metadata of its image.
KIND, MODEL = "Qwen2.5-VL", "tiny-vision"
TEMPLATE = """
{%- for message in messages -%}
{{ message.role }} :{{ " " }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %} assistant :{%- endif -%}
"""
IMAGES = [picture(seed) for seed in range(12)]
TEXT = "what is in the picture"
TOKENS = 16


class Served(NamedTuple):
    """The model served by one prefill and one decode worker, and by one aggregated worker."""

    pair: ServedUp
    reference: ServedUp


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., UpProcess]:
    """Make the model. Return a function that serves it by workers of the given roles."""
    folder, env = tmp_path_factory.mktemp("images"), dict(os.environ)
    if not find_spec("torchvision"):
        try:
            env["PYTHONPATH"] = install_torchvision(str(folder / "packages"))
        except subprocess.CalledProcessError:
            pytest.skip("the package index has no torchvision")
    model = folder / "model"
    make = [sys.executable, "-m", "tests.support.model_kinds", str(model), KIND]
    subprocess.run(make, check=True, cwd=ROOT, env=env, timeout=START_S)
    (model / "chat_template.jinja").write_text(TEMPLATE)

    def start(name: str, *roles: str) -> UpProcess:
        (directory := folder / name).mkdir()
        flags = ["--host", "127.0.0.1", "--port", "0", "--served-model-name", MODEL]
        flags += ["--dtype", "float32", "--max-model-len", "1024", *roles]
        for key in ("router.weights.directories", "worker.weights_directories"):
            flags += ["--set", f"{key}=[{model}]"]
        return UpProcess(directory, str(model), *flags, command="serve", env=env)

    return start


@pytest.fixture(scope="module")
def served(start: Callable[..., UpProcess]) -> Iterator[Served]:
    with (
        closing(start("pair", "--prefill", "1", "--decode", "1")) as pair,
        closing(start("one", "--aggregated", "1", "--prefill", "0", "--decode", "0")) as one,
    ):
        yield Served(ServedUp(pair), ServedUp(one))


@pytest.fixture(scope="module")
def with_encoder(start: Callable[..., UpProcess]) -> Iterator[ServedUp]:
    roles = ("--encode", "1", "--prefill", "1", "--decode", "1")
    # The policy of the default sends prompts past a busy prefill worker, to decode alone.
    pairs = ("--set", "router.policy=least_loaded")
    with closing(start("trio", *roles, *pairs)) as trio:
        yield ServedUp(trio)


def url_of(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def chat(image: bytes, text: str = TEXT, **more: Any) -> Body:
    parts = [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": url_of(image)}},
    ]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": TOKENS, **more}


async def post(stack: ServedUp, path: str, body: Body) -> tuple[int, Body]:
    body = {"model": MODEL, "temperature": 0, **body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/{path}", json=body) as answer,
    ):
        return answer.status, await answer.json()


async def chat_text(stack: ServedUp, body: Body) -> str:
    status, answer = await post(stack, "chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def hostile() -> dict[str, bytes]:
    """Return images that must be refused: by the router, or only by the process that decodes."""
    cut, bomb = IMAGES[0][: len(IMAGES[0]) // 2], BytesIO()
    Image.new("1", (7000, 7000)).save(bomb, "PNG")
    return {
        "no image": b"<svg/>",
        "too many pixels for the router": png(1 << 15, 1 << 15),
        "too many pixels for the model's process": bomb.getvalue(),
        "damaged": cut,
    }


async def test_each_answer_is_about_its_own_image_while_others_are_refused(served: Served) -> None:
    expected = [await chat_text(served.reference, chat(image)) for image in IMAGES]
    assert len(set(expected)) == len(IMAGES)
    answers = [asyncio.create_task(chat_text(served.pair, chat(image))) for image in IMAGES]
    bad = hostile()
    found = await asyncio.gather(
        *(post(served.pair, "chat/completions", chat(image)) for image in bad.values())
    )
    for name, (status, answer) in zip(bad, found, strict=True):
        assert status == 400, (name, answer)
        assert answer["error"]["param"] == "messages[0].content[1].image_url.url", (name, answer)
    assert await asyncio.gather(*answers) == expected
    status, again = await post(served.pair, "chat/completions", chat(IMAGES[3]))
    receipt = again["pdserve"]["receipt"]
    assert (status, receipt["images"], receipt["transfer_blocks"] > 0) == (200, 1, True), again
    assert again["choices"][0]["message"]["content"] == expected[3]
    await served.pair.until_empty()


async def test_images_are_encoded_again_after_an_update_of_the_weights(served: Served) -> None:
    before = await chat_text(served.pair, chat(IMAGES[2]))
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{served.pair.url}/weight_info") as info:
            path = (await info.json())["model_path"]
        update = {"weight_dir": path, "mode": "keep"}
        async with session.post(f"{served.pair.url}/update_weights", json=update) as done:
            assert done.status == 200, await done.text()
    assert await chat_text(served.pair, chat(IMAGES[2])) == before


async def test_all_apis_give_the_engine_the_same_image(served: Served) -> None:
    data = base64.b64encode(IMAGES[1]).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "text", "text": TEXT}, {"type": "image", "source": source}]
    items = [
        {"type": "input_text", "text": TEXT},
        {"type": "input_image", "image_url": url_of(IMAGES[1])},
    ]
    message = {"messages": [{"role": "user", "content": blocks}], "max_tokens": TOKENS}
    response = {"input": [{"role": "user", "content": items}], "max_output_tokens": TOKENS}
    expected = await chat_text(served.reference, chat(IMAGES[1]))
    status, answer = await post(served.pair, "messages", message)
    assert status == 200, answer
    assert answer["content"][0]["text"] == expected
    status, answer = await post(served.pair, "responses", response)
    assert status == 200, answer
    assert answer["output"][-1]["content"][0]["text"] == expected


async def test_an_answer_goes_on_when_its_decode_worker_is_killed(served: Served) -> None:
    """The prompt is computed again, from the image that the router has kept."""
    body = chat(IMAGES[2], max_tokens=400, stream=True)
    expected = await chat_text(served.reference, {**body, "stream": False})
    workers = {x["worker_id"]: x["pid"] for x in served.pair.ready["workers"]}
    pieces, receipt, is_killed = [], None, False
    # Stopped, it does not end the answer before it is killed, however fast the machine is.
    os.kill(workers["decode-0"], signal.SIGSTOP)
    async with served.pair.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, temperature=0, stream_options={"include_usage": True}, **body
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                if not is_killed:
                    os.kill(workers["decode-0"], signal.SIGKILL)
                    is_killed = True
            if chunk.usage is not None:
                receipt = (chunk.model_extra or {})["pdserve"]["receipt"]
    assert "".join(pieces) == expected
    assert receipt is not None
    assert receipt["fallbacks"]


async def check_at_once(served: Served, with_encoder: ServedUp, text: str) -> asyncio.Task[int]:
    """Ask about all images at once. Return a task that compares the answers with the reference, and
    counts the images that were encoded by the encode worker."""
    asked = [chat(image, text) for image in IMAGES]
    expected = [await chat_text(served.reference, each) for each in asked]

    async def check() -> int:
        answers = await asyncio.gather(*(post(with_encoder, "chat/completions", x) for x in asked))
        for (status, answer), right in zip(answers, expected, strict=True):
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"] == right
        receipts = [answer["pdserve"]["receipt"] for _, answer in answers]
        assert not any(x["fallbacks"] for x in receipts)
        return sum(x["fetched_images"] for x in receipts)

    return asyncio.create_task(check())


@asynccontextmanager
async def prompts_wait(stack: ServedUp) -> AsyncIterator[None]:
    """Keep the prefill worker busy with prompts of text: encoding elsewhere pays only where prompts
    wait, and whether those with images alone do depends on how fast they are rendered."""
    seeds = itertools.count(1)

    async def ask() -> None:
        while True:
            body = {"prompt": prompt(900, next(seeds)), "max_tokens": 1}
            status, answer = await post(stack, "completions", body)
            assert status == 200, answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(3)]
        yield
        for task in tasks:
            task.cancel()


async def test_an_encode_worker_changes_no_answer_and_may_be_killed(
    served: Served, with_encoder: ServedUp
) -> None:
    """Prefill gets embeddings while it is busy. Without its encode worker it makes them itself,
    until the next one is there."""
    rounds, text = itertools.count(), f"{TEXT} " * 40

    async def is_used() -> bool:
        return await (await check_at_once(served, with_encoder, f"{next(rounds)} {text}")) > 0

    async with prompts_wait(with_encoder):
        await wait_until(is_used, within_s=START_S)
        (pid,) = [x["pid"] for x in with_encoder.ready["workers"] if x["role"] == "encode"]
        checking = await check_at_once(served, with_encoder, f"now {text}")
        os.kill(pid, signal.SIGKILL)
        await checking
        await wait_until(is_used, within_s=START_S)
    with_encoder.ready = json.loads(with_encoder.up.ready_path.read_text())  # of the new worker
    await with_encoder.until_empty()

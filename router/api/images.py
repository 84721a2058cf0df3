"""Images in requests: where they come from, and the prompts that have them. Nothing is decoded
here: each file's header is read (pdserve/model/images.py), and a worker does the rest."""

from __future__ import annotations

import binascii
import json
import re
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from pdserve.errors import InvalidRequest, UnsupportedField
from pdserve.model.images import MAX_IMAGE_BYTES, read_header
from pdserve.model.tokenizer import MessageImage, plain_messages
from pdserve.v1 import worker_pb2 as w
from router.operations.rendering import ImagePrompt

if TYPE_CHECKING:
    from pdserve.model.tokenizer import Conversation
    from pdserve.types import ModelInfo

DETAILS = ("auto", "low", "high")
Detail = Annotated[
    Literal["auto", "low", "high"] | None,
    Meta(description="Passed to the model's image processor."),
]
Address = Annotated[
    str,
    Meta(
        description="A data URL with a PNG, JPEG, WebP or GIF file in base64, or an http(s) URL if "
        "router.images.url_hosts has its host."
    ),
]
MAX_URL_CHARS = 4096
# More images than any model takes; they bound the search for the images of a body.
_MOST_COUNTED = 64
# Before the data of an image in Messages' blocks, after "base64".
_BLOCK = re.compile(rb'"[^{}"]*"media_type"\s*:\s*"[\w/.+-]*"\s*,\s*"data"\s*:\s*"', re.ASCII)
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.=+-]+)*?(;base64)?,", re.ASCII)


def image_at(url: str, detail: str | None, field: str) -> MessageImage:
    """Return the image of a data URL or an address. Raises InvalidRequest naming `field`."""
    if url.startswith("data:"):
        head = _DATA_URL.match(url, 0, 256)
        if head is None or not head[2]:
            raise InvalidRequest(f"'{field}' is not a data URL in base64", field=field)
        if head[1] is not None and not head[1].startswith("image/"):
            text = f"'{field}' is not supported: {head[1]} is no image"
            raise UnsupportedField(text, field=field)
        return image_of_base64(url[head.end() :], detail, field)
    if not url.startswith(("http://", "https://")) or len(url) > MAX_URL_CHARS:
        text = f"'{field}' must be a data URL, or an http(s) URL of at most {MAX_URL_CHARS} chars"
        raise InvalidRequest(text, field=field)
    return _image(url, detail, field)


def image_of_base64(text: str, detail: str | None, field: str) -> MessageImage:
    """Return the image of a file in base64. Raises InvalidRequest naming `field`."""
    if len(text) > (MAX_IMAGE_BYTES + 2) // 3 * 4:
        reason = f"has more than {MAX_IMAGE_BYTES} bytes"
        raise InvalidRequest(f"'{field}' {reason}", field=field)
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequest(f"'{field}' is not base64", field=field) from None
    return image_of(data, detail, field)


def image_of(data: bytes, detail: str | None, field: str) -> MessageImage:
    """Return the image of a file. Raises InvalidRequest naming `field`."""
    try:
        read_header(data)
    except ValueError as error:
        raise InvalidRequest(f"'{field}' {error}", field=field) from None
    return _image(data, detail, field)


def _image(source: bytes | str, detail: str | None, field: str) -> MessageImage:
    if detail not in (None, "", *DETAILS):
        text = f"the detail of '{field}' must be one of {', '.join(DETAILS)}"
        raise InvalidRequest(text, field=field)
    return MessageImage(source, detail or "auto", field)


def image_bytes(body: bytes) -> int:
    """Return about how many bytes of a JSON body are images in base64, without reading the body. A
    text can look like an image; only its charge before it is read is lower then."""
    found = end = 0
    for _ in range(_MOST_COUNTED):
        at = body.find(b"base64", end)
        if at < 0:
            break
        start = at + len(b"base64,")
        if body[start - 1 : start] != b",":
            block = _BLOCK.match(body, start - 1, start + 256)
            if block is None:
                end = start
                continue
            start = block.end()
        end = body.find(b'"', start)
        if end < 0:
            break
        found += end - start
    return found


def image_prompt(
    chat: Conversation, model: ModelInfo, *, add_special_tokens: bool | None
) -> ImagePrompt:
    """Return the prompt of a conversation that has images. Raises InvalidRequest naming the image
    that the model does not take."""
    images, most = chat.images, model.modalities.get("image", 0)
    field = images[min(most, len(images) - 1)].field
    if not most:
        text = f"'{field}' is not supported: model {model.name} takes no images"
        raise UnsupportedField(text, field=field)
    if len(images) > most:
        text = f"'{field}' is one image too many: model {model.name} takes {most} in a prompt"
        raise InvalidRequest(text, field=field)
    if chat.continue_final_message and chat.messages[-1].parts:
        text = "the last message has images, so the answer cannot continue it"
        raise InvalidRequest(text, field=field)
    request = w.RenderRequest(
        chat=w.ChatPrompt(
            messages_json=json.dumps(plain_messages(chat)),
            tools_json=json.dumps(chat.tools) if chat.tools else "",
            variables_json=json.dumps(chat.variables) if chat.variables else "",
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            add_special_tokens=bool(add_special_tokens),
        )
    )
    urls = {}
    for index, image in enumerate(images):
        if isinstance(image.source, str):
            urls[index] = image.source
        data = b"" if isinstance(image.source, str) else image.source
        request.images.append(w.EncodedImage(data=data, detail=image.detail))
    return ImagePrompt(request.SerializeToString(), urls, [image.field for image in images])

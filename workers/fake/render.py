"""Renders prompts with images for the fake engine, as deterministic tokens. No image is decoded."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest
from pdserve.v1 import worker_pb2 as w
from workers.fake.model import FIRST_WORD

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE_TOKEN = 3
IMAGE_TOKENS = 24  # of each image
# Where an image is in a text prompt, and in the text of a conversation.
PLACEHOLDER = "<image>"
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")


def render(request: w.RenderRequest, vocab_size: int) -> w.RenderResponse:
    """Return a token for each word and IMAGE_TOKENS for each image. Raises InvalidRequest."""
    response, images = w.RenderResponse(), list(request.images)
    for word in _words(request):
        if word != PLACEHOLDER:
            number = int.from_bytes(sha256(word.encode()).digest()[:4], "little")
            response.prompt_token_ids.append(FIRST_WORD + number % (vocab_size - FIRST_WORD))
            continue
        if len(response.media) == len(images):
            raise InvalidRequest("the prompt has more placeholders than images", field="images")
        index = len(response.media)
        response.media.append(_item(images[index], index, len(response.prompt_token_ids)))
        response.prompt_token_ids.extend([IMAGE_TOKEN] * IMAGE_TOKENS)
    if len(response.media) != len(images):
        raise InvalidRequest("the prompt has fewer placeholders than images", field="images")
    return response


def _words(request: w.RenderRequest) -> Iterator[str]:
    """Yield the words of the prompt, and PLACEHOLDER for each image."""
    if request.WhichOneof("prompt") == "text":
        yield from re.findall(rf"{PLACEHOLDER}|\S+?(?={PLACEHOLDER}|\s|$)", request.text)
        return
    for message in json.loads(request.chat.messages_json):
        content = message.get("content") or ""
        yield message["role"]
        for part in [{"text": content}] if isinstance(content, str) else content:
            is_image = part.get("type") == "image"
            yield from (PLACEHOLDER,) if is_image else part.get("text", "").split()


def _item(image: w.EncodedImage, index: int, offset: int) -> w.MediaItem:
    if not image.data.startswith(_MAGIC):
        field = f"images[{index}]"
        raise InvalidRequest(f"{field} is not a PNG, JPEG, WebP or GIF file", field=field)
    return w.MediaItem(
        modality="image",
        hash=sha256(image.detail.encode() + b"\0" + image.data).hexdigest(),
        offset=offset,
        length=IMAGE_TOKENS,
        metadata=b"fake",
        data=image.data,
    )

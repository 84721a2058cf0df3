"""Prompts with images, as a worker renders them (render_images.py)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.errors import InvalidRequest, UnsupportedField
from pdserve.model.tokenizer import plain_messages
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.model.tokenizer import Conversation, MessageImage
    from pdserve.types import ModelInfo


class ImagePrompt(Struct, frozen=True):
    """A prompt with images, checked against the model. `request`: a RenderRequest message.
    `urls`: addresses of the images that it lacks, by index. `fields`: the images' places in the
    client's request, for errors."""

    request: bytes
    urls: dict[int, str]
    fields: list[str]


def image_prompt(
    chat: Conversation,
    images: Sequence[MessageImage],
    model: ModelInfo,
    *,
    add_special_tokens: bool | None,
) -> ImagePrompt:
    """Return the prompt of a conversation that has `images`. Raises InvalidRequest naming the image
    that the model does not take."""
    most = model.modalities.get("image", 0)
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

"""Converts prompts with images to tokens and processed images, as `vllm serve` does. Runs in forks
of render_pool.py.

Used: vllm/renderers (BaseRenderer, ChatParams), vllm/multimodal/media/image.py (ImageMediaIO).
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from vllm.exceptions import VLLMClientError
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import renderer_from_config
from vllm.renderers.params import ChatParams

from pdserve.errors import InvalidRequest
from pdserve.v1 import worker_pb2 as w
from workers.vllm.images.tensors import items_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import VllmConfig

# Decoders of Pillow that may read untrusted images.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_NAMES = "PNG, JPEG, WebP or GIF"
MAX_PIXELS = 1 << 25  # total of a prompt


class PromptRenderer:
    """The renderer and image processor of one model."""

    def __init__(self, config: VllmConfig) -> None:
        """Load both, and process one image, so that forks need not import anything."""
        self._renderer: Any = renderer_from_config(config)
        processor = self._renderer.get_mm_processor()
        parser = processor.info.data_parser
        self._metadata_fields = parser.placeholder_metadata_fields("image")
        multimodal = config.model_config.multimodal_config
        self._decoder = ImageMediaIO(**multimodal.media_io_kwargs.get("image", {}))
        # The part of an image's hash that does not depend on its content.
        options = (multimodal.media_io_kwargs, multimodal.mm_processor_kwargs)
        self._options = json.dumps(options, sort_keys=True, default=str).encode()
        buffer = BytesIO()
        Image.new("RGB", (64, 64)).save(buffer, "PNG")
        text = processor.dummy_inputs.get_dummy_text({"image": 1})
        self.render(w.RenderRequest(text=text, images=[w.EncodedImage(data=buffer.getvalue())]))

    def render(self, request: w.RenderRequest) -> w.RenderResponse:
        """Render a prompt. Raises InvalidRequest naming a bad image."""
        media = self._decoded([image.data for image in request.images])
        uuids = [sha256(self._options + image.data).hexdigest() for image in request.images]
        try:
            if request.WhichOneof("prompt") == "text":
                rendered = self._render_text(request.text, media, uuids)
            else:
                rendered = self._render_chat(request.chat, media, uuids)
        except (VLLMClientError, ValueError) as error:
            text = str(next(iter(error.args), error)) or type(error).__name__
            raise InvalidRequest(text, field="messages") from error
        items = list(items_of(rendered, self._metadata_fields))
        if len(items) != len(media):
            text = f"the prompt has {len(items)} images, and images has {len(media)}"
            raise InvalidRequest(text, field="images")
        return w.RenderResponse(prompt_token_ids=rendered["prompt_token_ids"], media=items)

    def _decoded(self, images: Sequence[bytes]) -> list[Any]:
        pixels = 0
        for index, data in enumerate(images):
            with _naming(index), Image.open(BytesIO(data), formats=_FORMATS) as image:
                pixels += image.width * image.height
                if pixels > MAX_PIXELS:
                    raise ValueError(f"the images have over {MAX_PIXELS} pixels")
        found = []
        for index, data in enumerate(images):
            with _naming(index):
                found.append(self._decoder.load_bytes(convertible(data)))
        return found

    def _render_text(self, text: str, media: list[Any], uuids: list[str]) -> Any:
        prompt: dict[str, Any] = {"prompt": text}
        if media:
            prompt["multi_modal_data"] = {"image": media}
            prompt["multi_modal_uuids"] = {"image": uuids}
        (rendered,) = self._renderer.render_cmpl([prompt])
        return rendered

    def _render_chat(self, chat: w.ChatPrompt, media: list[Any], uuids: list[str]) -> Any:
        left = iter(zip(media, uuids, strict=True))
        messages = json.loads(chat.messages_json)
        for message in messages:
            if isinstance(message.get("content"), list):
                message["content"] = [_with_image(part, left) for part in message["content"]]
        variables = json.loads(chat.variables_json or "{}")
        if chat.tools_json:
            variables["tools"] = json.loads(chat.tools_json)
        variables |= {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
        }
        tokens = replace(
            self._renderer.default_chat_tok_params, add_special_tokens=chat.add_special_tokens
        )
        _, (rendered,) = self._renderer.render_chat(
            [messages], ChatParams(chat_template_kwargs=variables), tokens
        )
        return rendered


def convertible(data: bytes) -> bytes:
    """Return the file, or a PNG file of the image if vLLM's decoder would change its colours: it
    turns 16-bit values over 255 white, and shows the transparent colour of RGB images."""
    with Image.open(BytesIO(data), formats=_FORMATS) as image:
        transparent = image.info.get("transparency")
        if image.mode.startswith("I"):
            pixels = np.asarray(image)
            plain = Image.fromarray((pixels // 257).astype(np.uint8))
            if transparent is not None:
                plain.putalpha(
                    Image.fromarray(np.where(pixels == transparent, 0, 255).astype("u1"))
                )
        elif image.mode == "RGB" and transparent is not None:
            plain = image.convert("RGBA")
        else:
            return data
        buffer = BytesIO()
        plain.save(buffer, "PNG", exif=image.getexif(), compress_level=1)
    return buffer.getvalue()


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Refuse the image with this index if Pillow raises."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        field = f"images[{index}]"
        if isinstance(error, UnidentifiedImageError):
            raise InvalidRequest(f"{field} is not a {_NAMES} file", field=field) from error
        raise InvalidRequest(f"{field} cannot be read: {error}", field=field) from error


def _with_image(part: dict[str, Any], left: Iterator[tuple[Any, str]]) -> dict[str, Any]:
    """Return the content part, with the next image if it is one."""
    if part.get("type") != "image":
        return part
    image, uuid = next(left, (None, ""))
    if image is None:
        raise InvalidRequest("the prompt has more images than there are in images", field="images")
    return {"type": "image_pil", "image_pil": image, "uuid": uuid}

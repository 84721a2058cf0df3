"""Images in the messages of requests. Nothing is decoded here: each file's header is read
(pdserve/model/images.py), and a worker does the rest."""

from __future__ import annotations

import binascii
import re
from typing import Annotated, Literal

from msgspec import Meta

from pdserve.errors import InvalidRequest, UnsupportedField
from pdserve.model.images import MAX_IMAGE_BYTES, read_header
from pdserve.model.tokenizer import MessageImage

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

"""Image files before they are decoded: their format, size and dimensions, read from the header.

Decoders are native code, which a hostile file can exploit. They run in a limited process of a
worker. Router and worker use this module to reject files by their header before that.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# Limit of one encoded file.
MAX_IMAGE_BYTES = 16 << 20
# Limit of one decoded image; accepts photographs of 48 megapixels. One pixel takes 3 bytes or more.
MAX_PIXELS = 50_000_000

_PNG, _JPEG, _GIFS = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", (b"GIF87a", b"GIF89a")
# JPEG: frame headers, which have the dimensions, and markers without a length.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_BARE = {0x01, *range(0xD0, 0xD9)}


class ImageHeader(NamedTuple):
    """`kind`: png, jpeg, gif or webp."""

    kind: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """Return the header of an image file. Raises ValueError, with the reason, for a file that
    cannot be an accepted image."""
    size = len(data)
    if size > MAX_IMAGE_BYTES:
        raise ValueError(f"has {size} bytes; the limit is {MAX_IMAGE_BYTES}")
    try:
        header = _header(data)
    except (struct.error, IndexError):
        raise ValueError("is cut off in its header") from None
    if header is None:
        raise ValueError("is not a PNG, JPEG, WebP or GIF file")
    if not header.width or not header.height:
        raise ValueError("has no pixels")
    if header.width * header.height > MAX_PIXELS:
        raise ValueError(f"has {header.width} x {header.height} pixels; the limit is {MAX_PIXELS}")
    return header


def _header(data: bytes) -> ImageHeader | None:
    if data.startswith(_PNG):
        return ImageHeader("png", *struct.unpack_from(">II", data, 16))
    if data.startswith(_GIFS):
        return ImageHeader("gif", *struct.unpack_from("<HH", data, 6))
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    return _jpeg(data) if data.startswith(_JPEG) else None


def _webp(data: bytes) -> ImageHeader | None:
    match data[12:16]:
        case b"VP8 ":  # lossy: 14 bits each
            width, height = struct.unpack_from("<HH", data, 26)
            return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF)
        case b"VP8L":  # lossless: 14 bits each, less 1
            (bits,) = struct.unpack_from("<I", data, 21)
            return ImageHeader("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        case b"VP8X":  # extended: 24 bits each, less 1
            width, high, height, top = struct.unpack_from("<HBHB", data, 24)
            return ImageHeader("webp", (high << 16 | width) + 1, (top << 16 | height) + 1)
    return None


def _jpeg(data: bytes) -> ImageHeader:
    at = 2
    while True:
        while data[at] == 0xFF and data[at + 1] == 0xFF:  # padding
            at += 1
        if data[at] != 0xFF:
            raise ValueError("is a damaged JPEG file")
        marker = data[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return ImageHeader("jpeg", width, height)
        at += 2
        if marker not in _BARE:
            (length,) = struct.unpack_from(">H", data, at)
            at += max(2, length)

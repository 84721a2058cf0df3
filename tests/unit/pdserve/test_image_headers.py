from __future__ import annotations

import io
import struct

import pytest
from PIL import Image

from pdserve.model.images import MAX_IMAGE_BYTES, read_header
from tests.support.images import png

SIZE = (37, 52)


def encoded(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(SIZE, 9).convert("RGB").save(file, kind, **options)
    return file.getvalue()


def thumbnail_jpeg() -> bytes:
    """Return a JPEG with another one in its EXIF segment, and padding between segments."""
    inner = b"Exif\0\0" + encoded("jpeg")[:60000]
    segment = b"\xff\xe1" + struct.pack(">H", len(inner) + 2) + inner
    whole = encoded("jpeg", progressive=True)
    return whole[:2] + segment + b"\xff\xff" + whole[2:]


FILES = {
    "png": encoded("png"),
    "gif": encoded("gif"),
    "jpeg": thumbnail_jpeg(),
    "webp": encoded("webp"),
}
EXTENDED = encoded("webp", exif=b"Exif\0\0", lossless=True)


@pytest.mark.parametrize(
    ("kind", "data"),
    [*FILES.items(), ("webp", encoded("webp", lossless=True)), ("webp", EXTENDED)],
)
def test_the_header_has_the_size_of_the_image(kind: str, data: bytes) -> None:
    assert read_header(data) == (kind, *SIZE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a PNG"),
        (b"<svg/>", "not a PNG"),
        (b"RIFF\0\0\0\0WAVEfmt ", "not a PNG"),
        (png(30_000, 30_000), "30000 x 30000 pixels"),
        (png(0, 5), "no pixels"),
        (b"\xff\xd8\xff\xe0\x00\x00" * 9, "cut off"),
        (b"\xff\xd8abc", "damaged"),
        (bytes(MAX_IMAGE_BYTES + 1), "the limit is"),
        *((data[:20], "cut off") for data in FILES.values() if data[:3] != b"GIF"),
    ],
)
def test_a_file_that_no_model_can_see_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_header(data)

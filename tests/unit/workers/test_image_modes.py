"""Images of each kind of PNG, JPEG, WebP and GIF file look to the model as they do to people."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.media.image import ImageMediaIO

from workers.vllm.images.renderer import convertible

RED, WHITE, GRAY, BLACK = (255, 0, 0), (255, 255, 255), (128, 128, 128), (0, 0, 0)
SIZE = (16, 16)


def gray16(value: int) -> Image.Image:
    return Image.fromarray(np.full(SIZE, value, np.uint16))


def palette(colour: tuple[int, int, int]) -> Image.Image:
    image = Image.new("P", SIZE, 0)
    image.putpalette(bytes(colour) + bytes(765))
    return image


@pytest.mark.parametrize(
    ("image", "options", "expected"),
    [
        (gray16(0), {}, BLACK),
        (gray16(128 * 257), {}, GRAY),
        (gray16(65535), {}, WHITE),
        (gray16(700), {"transparency": 700}, WHITE),
        (gray16(128 * 257), {"transparency": 700}, GRAY),
        (Image.new("RGB", SIZE, RED), {}, RED),
        (Image.new("RGB", SIZE, RED), {"transparency": RED}, WHITE),
        (Image.new("RGB", SIZE, RED), {"transparency": BLACK}, RED),
        (palette(RED), {}, RED),
        (palette(RED), {"transparency": 0}, WHITE),
        (Image.new("L", SIZE, 128), {}, GRAY),
        (Image.new("L", SIZE, 128), {"transparency": 128}, WHITE),
        (Image.new("LA", SIZE, (128, 0)), {}, WHITE),
        (Image.new("RGBA", SIZE, (*RED, 0)), {}, WHITE),
        (Image.new("1", SIZE, 1), {}, WHITE),
        (Image.new("CMYK", SIZE, (0, 255, 255, 0)), {"format": "JPEG", "quality": 100}, RED),
        (Image.new("RGBA", SIZE, (*RED, 0)), {"format": "WEBP", "lossless": True}, WHITE),
        (palette(RED), {"format": "GIF", "transparency": 0}, WHITE),
    ],
)
def test_colours_are_kept_and_what_is_transparent_is_white(
    image: Image.Image, options: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    buffer = BytesIO()
    image.save(buffer, **{"format": "PNG", **options})
    seen = ImageMediaIO().load_bytes(convertible(buffer.getvalue())).media
    assert (seen.mode, seen.size) == ("RGB", SIZE)
    np.testing.assert_allclose(np.asarray(seen)[0, 0], expected, atol=2)


def test_shades_of_16_bits_are_scaled_and_turned_as_the_file_says() -> None:
    ramp = Image.fromarray(np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    buffer = BytesIO()
    ramp.save(buffer, "PNG", exif=exif)
    seen = ImageMediaIO().load_bytes(convertible(buffer.getvalue())).media
    assert np.asarray(seen)[..., 0].ravel().tolist() == [x * 4096 // 257 for x in range(15, -1, -1)]

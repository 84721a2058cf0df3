"""Prompts with images for the benchmark of single requests."""

from __future__ import annotations

from io import BytesIO
from random import Random
from typing import TYPE_CHECKING, cast

from PIL import Image

from benchmarks.micro.serving import Serving
from pdserve.model.tokenizer import MessageImage

if TYPE_CHECKING:
    from benchmarks.client import GrpcTarget, ServedModel


def test_images_are_files_that_differ() -> None:
    serving = Serving({}, cast("GrpcTarget", None), cast("ServedModel", None))
    (message,) = serving.message(Random(1), 3, 2)
    text, *images = message.parts
    assert len(str(text).split()) == 3
    pixels = []
    for image in images:
        assert isinstance(image, MessageImage)
        assert isinstance(image.source, bytes)
        with Image.open(BytesIO(image.source)) as picture:
            assert picture.size == (448, 448)
            pixels.append(picture.tobytes())
    assert pixels[0] != pixels[1]

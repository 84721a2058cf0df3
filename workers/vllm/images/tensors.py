"""Conversion of processed images between vLLM's objects and messages: fields in vLLM's msgpack
encoding, without pickle.

Used: vllm/v1/serial_utils.py (MsgpackEncoder, MsgpackDecoder), vllm/multimodal/inputs.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder, MsgpackEncoder

from pdserve.errors import InvalidRequest
from pdserve.types import MODALITIES
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from vllm.v1.engine.llm_engine import LLMEngine

    from pdserve.types import MediaItem
    from workers.engine import Work


class _Decoder(MsgpackDecoder):  # type: ignore[misc]
    """vLLM's decoder without pickle, regardless of VLLM_ALLOW_INSECURE_SERIALIZATION."""

    def ext_hook(self, code: int, data: memoryview) -> Any:
        if code != CUSTOM_TYPE_RAW_VIEW:
            raise ValueError(f"extension type {code}")
        return data


def limits_of(engine: LLMEngine) -> dict[str, int]:
    """Return the limit of items in a prompt by modality."""
    processor = engine.renderer.mm_processor
    if processor is None:
        return {}
    limits = processor.info.allowed_mm_limits
    return {x: limits[x] for x in MODALITIES if limits.get(x)}


def to_engine_input(work: Work) -> Any:
    """Return vLLM's input for the prompt of `work`. Raises InvalidRequest if an item of its media
    has no processed fields. An item without `data` gets the fields of its metadata, which suffice
    if the prompt is not computed."""
    token_ids, salt = list(work.prompt_token_ids), work.cache_salt or None
    if not work.media:
        return tokens_input(token_ids, cache_salt=salt)
    kwargs: dict[str, list[MultiModalKwargsItem]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[PlaceholderRange]] = {}
    for index, item in enumerate(work.media):
        kwargs.setdefault(item.modality, []).append(_fields_of(item, index))
        hashes.setdefault(item.modality, []).append(item.hash)
        place = PlaceholderRange(item.offset, item.length, _mask_of(item))
        places.setdefault(item.modality, []).append(place)
    return mm_input(token_ids, MultiModalKwargsItems(kwargs), hashes, places, cache_salt=salt)


def _fields_of(item: MediaItem, index: int) -> MultiModalKwargsItem:
    try:
        decoder = _Decoder(MultiModalKwargsItem, share_mem=False)
        return decoder.decode(item.data or item.metadata)
    except Exception as error:  # a decoder of untrusted bytes may raise any error
        field = f"media[{index}]"
        text = f"{field} has no processed fields: {type(error).__name__}"
        raise InvalidRequest(text, field=field) from error


def _mask_of(item: MediaItem) -> torch.Tensor | None:
    if not item.is_embed:
        return None
    bits = np.unpackbits(
        np.frombuffer(item.is_embed, np.uint8), count=item.length, bitorder="little"
    )
    return torch.from_numpy(bits.astype(bool))


def items_of(engine_input: Any, metadata_fields: Collection[str]) -> Iterator[w.MediaItem]:
    """Yield the images of a rendered prompt by their offset. `metadata_fields`: names of fields
    that determine the number of an image's tokens, besides fields that vLLM keeps on the CPU."""
    if engine_input["type"] != "multimodal":
        return
    modality = "image"
    each = (engine_input[x][modality] for x in ("mm_kwargs", "mm_hashes", "mm_placeholders"))
    found = sorted(zip(*each, strict=True), key=lambda x: x[2].offset)
    for fields, content_hash, place in found:
        small = {k: v for k, v in fields.items() if v.field.keep_on_cpu or k in metadata_fields}
        mask = place.is_embed
        bits = b"" if mask is None else np.packbits(mask.numpy(), bitorder="little").tobytes()
        yield w.MediaItem(
            modality=modality,
            hash=content_hash,
            offset=place.offset,
            length=place.length,
            is_embed=bits,
            metadata=_encoded(MultiModalKwargsItem(small)),
            data=_encoded(fields),
        )


def _encoded(fields: MultiModalKwargsItem) -> bytes:
    # Larger tensors would use separate buffers.
    (data,) = MsgpackEncoder(size_threshold=sys.maxsize).encode(fields)
    return bytes(data)

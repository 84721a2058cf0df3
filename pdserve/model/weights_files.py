"""The safetensors files of a checkpoint: their tensors, and a digest.

The format: 8 bytes with the length of a header, the header as JSON, the data
(https://huggingface.co/docs/safetensors). Only headers and samples of the data are read.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
# Samples of each file for the digest. All bytes of hundreds of gigabytes would take minutes.
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_DIGITS = 16


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint(NamedTuple):
    """`tensors`: type and shape by name. `digest`: of headers and samples of all files."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    digest: str


def read_checkpoint(directory: Path, *, field: str) -> Checkpoint:
    """Read the safetensors files in `directory`. Raises InvalidRequest, naming `field`, if there
    are none or they are not complete. Call it in a thread."""
    files = sorted(x for x in directory.glob(f"*{_SUFFIX}") if x.is_file())
    if not files:
        raise InvalidRequest(f"{directory} has no {_SUFFIX} files", field=field)
    tensors, digest = {}, hashlib.sha256()
    try:
        for file in files:
            found = _read_header(file, digest.update)
            tensors.update({name: (x.dtype, x.shape) for name, x in found.items()})
        _check_index(directory / _INDEX, tensors)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{directory}: {error}", field=field) from error
    return Checkpoint(tensors, digest.hexdigest()[:_DIGITS])


def check_same_shapes(new: Checkpoint, served: Checkpoint, *, field: str) -> None:
    """Raise InvalidRequest, naming a tensor, unless both have the same tensors."""
    for name in sorted(new.tensors.keys() | served.tensors.keys()):
        ours, theirs = served.tensors.get(name), new.tensors.get(name)
        if ours != theirs:
            text = f"tensor {name} is {_shown(theirs)}, and {_shown(ours)} in the served model"
            raise InvalidRequest(text, field=field)


def _read_header(file: Path, hashed: Callable[[bytes], None]) -> dict[str, _Tensor]:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise ValueError(f"{file.name} is no safetensors file, or is cut off")
        header = opened.read(length)
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        found = {x: msgspec.json.decode(data, type=_Tensor) for x, data in raw.items()}
        if 8 + length + max((x.data_offsets[1] for x in found.values()), default=0) != size:
            raise ValueError(f"{file.name} is not complete: it has {size} bytes")
        hashed(file.name.encode() + header)
        for offset in range(8 + length, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
            hashed(os.pread(opened.fileno(), _SAMPLE_BYTES, offset))
    return found


def _check_index(index: Path, tensors: Iterable[str]) -> None:
    if index.is_file():
        listed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        if missing := sorted(listed.keys() - set(tensors)):
            raise ValueError(f"{index.name} names {missing[0]}, which no file has")


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"

"""The safetensors files of a checkpoint: their tensors, and a digest.

The format: 8 bytes with the length of a header, the header as JSON, the data
(https://huggingface.co/docs/safetensors). Only headers and samples of the data are read.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
# Samples of each file for the digest. All bytes of hundreds of gigabytes would take minutes.
_SAMPLES, _SAMPLE_BYTES = 256, 4096
DIGITS = 16


class _Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(NamedTuple):
    """Where a tensor of `values` values lies: `size` bytes of `file`, from `offset`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class SafetensorsFile(NamedTuple):
    """`header`: as it is in the file."""

    tensors: dict[str, StoredTensor]
    metadata: Mapping[str, str]
    header: bytes


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint(NamedTuple):
    """`digest`: of headers and samples of all files."""

    tensors: dict[str, StoredTensor]
    digest: str


def read_checkpoint(directory: Path, *, field: str) -> Checkpoint:
    """Read the safetensors files in `directory`. Raises InvalidRequest, naming `field`, if there
    are none or they are not complete. Call it in a thread."""
    files = sorted(x for x in directory.glob(f"*{SUFFIX}") if x.is_file())
    if not files:
        raise InvalidRequest(f"{directory} has no {SUFFIX} files", field=field)
    tensors, digest = dict[str, StoredTensor](), hashlib.sha256()
    try:
        for file in files:
            found = read_file(file)
            tensors.update(found.tensors)
            digest.update(file.name.encode() + found.header)
            _sample(file, 8 + len(found.header), digest.update)
        _check_index(directory / _INDEX, tensors)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{directory}: {error}", field=field) from error
    return Checkpoint(tensors, digest.hexdigest()[:DIGITS])


def check_same_shapes(new: Checkpoint, served: Checkpoint, *, field: str) -> None:
    """Raise InvalidRequest, naming a tensor, unless both have the same tensors."""
    for name in sorted(new.tensors.keys() | served.tensors.keys()):
        ours, theirs = _shown(served.tensors.get(name)), _shown(new.tensors.get(name))
        if ours != theirs:
            text = f"tensor {name} is {theirs}, and {ours} in the served model"
            raise InvalidRequest(text, field=field)


def read_file(file: Path) -> SafetensorsFile:
    """Read the header of a file. Raises OSError, ValueError or DecodeError if it is not complete,
    or names bytes that it does not have."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise ValueError(f"{file.name} is no safetensors file, or is cut off")
        header = opened.read(length)
    raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
    found = {x: msgspec.json.decode(data, type=_Header) for x, data in raw.items()}
    if 8 + length + max((x.data_offsets[1] for x in found.values()), default=0) != size:
        raise ValueError(f"{file.name} is not complete: it has {size} bytes")
    tensors = dict[str, StoredTensor]()
    for name, tensor in found.items():
        start, end = tensor.data_offsets
        if not 0 <= start <= end or min(tensor.shape, default=0) < 0:
            raise ValueError(f"{file.name}: tensor {name} has no valid place in the file")
        tensors[name] = StoredTensor(
            file, tensor.dtype, tensor.shape, 8 + length + start, end - start
        )
    return SafetensorsFile(tensors, metadata, header)


def _sample(file: Path, start: int, hashed: Callable[[bytes], None]) -> None:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        for offset in range(start, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
            hashed(os.pread(opened.fileno(), _SAMPLE_BYTES, offset))


def _check_index(index: Path, tensors: Iterable[str]) -> None:
    if index.is_file():
        listed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        if missing := sorted(listed.keys() - set(tensors)):
            raise ValueError(f"{index.name} names {missing[0]}, which no file has")


def _shown(tensor: StoredTensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"

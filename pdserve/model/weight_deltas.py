"""Differences between two checkpoints: sparse safetensors files.

A directory with `delta.safetensors` and no other such file stands for a whole checkpoint: that of
its base, with some values replaced. For each changed tensor NAME the file has `NAME.indices`, the
increasing positions of the changed values in the flattened tensor (I32 or I64), and `NAME.values`
in the tensor's own type. Its metadata:

    format   pdserve-delta
    base     directory of the base, relative to that of the file; it may be a difference, too
    digest   of the base: that of its files, or the result of its difference
    result   sha256 of all tensors of the result, see `_hash_tensors`

Values are replaced, not added, so the result is exact in every type. Call all this in a thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from pdserve.errors import InvalidRequest
from pdserve.model.weights_files import (
    DIGITS,
    SUFFIX,
    Checkpoint,
    check_same_shapes,
    read_checkpoint,
    read_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import BinaryIO

    from pdserve.model.weights_files import StoredTensor

    # Values of a tensor as unsigned integers of their size: nothing is computed with them.
    Bits = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]

FILE = f"delta{SUFFIX}"
# Loading weights reads each difference, so a chain of them has to begin anew some time.
MAX_CHAIN = 16
_FORMAT = "pdserve-delta"
_INDICES, _VALUES = ".indices", ".values"
_INDEX_TYPES: dict[str, type[np.int32 | np.int64]] = {"I32": np.int32, "I64": np.int64}
_ITEM_SIZES = (1, 2, 4, 8)
# Values that are replaced at a time: meanwhile no other thread of the process runs.
_CHUNK = 1 << 18
_U64 = Struct("<Q")


class WeightFiles(NamedTuple):
    """The files of a checkpoint: the directory `base`, and the differences to apply in order."""

    base: str
    deltas: tuple[str, ...] = ()


class WeightDelta(NamedTuple):
    """One difference, whose header has been read. `base`: directory; `digest`: that of the base."""

    file: Path
    base: Path
    digest: str
    result: str
    tensors: Mapping[str, StoredTensor]

    @property
    def changed(self) -> set[str]:
        """Names of the changed tensors."""
        return {name.removesuffix(_INDICES) for name in self.tensors if name.endswith(_INDICES)}

    def changes(self, name: str) -> bool:
        return name + _INDICES in self.tensors

    def apply(self, name: str, flat: Bits) -> None:
        """Replace the changed values of the tensor `name`. Raises ValueError."""
        if (where := self.tensors.get(name + _INDICES)) is None:
            return
        values = _values(self.tensors[name + _VALUES], flat.itemsize)
        indices = np.fromfile(
            where.file, _INDEX_TYPES[where.dtype], where.values, offset=where.offset
        )
        last = -1
        for start in range(0, len(indices), _CHUNK):
            part = indices[start : start + _CHUNK].astype(np.int64)
            is_increasing = part[0] > last and bool(np.all(part[1:] > part[:-1]))
            if not is_increasing or part[-1] >= len(flat):
                text = f"indices of {name} must increase from 0 to {len(flat) - 1} at most"
                raise ValueError(f"{self.file}: {text}")
            flat[part] = values[start : start + _CHUNK]
            last = part[-1]


class Made(NamedTuple):
    """What `write_delta` wrote. `values`, `of`: the changed values, and all of the checkpoint.
    `size`: of the file in bytes; `whole`: of all tensors."""

    tensors: int
    values: int
    of: int
    size: int
    whole: int


def find_files(
    directory: Path, allowed: Callable[[Path], Path | None] = Path.resolve, *, field: str
) -> WeightFiles:
    """Return the files of the checkpoint in `directory`. `allowed` resolves the directory of a
    base, and returns None if it may not be read. Raises InvalidRequest, naming `field`."""
    deltas: list[str] = []
    while (directory / FILE).is_file():
        if len(deltas) == MAX_CHAIN:
            text = f"more than {MAX_CHAIN} differences in a row: write a whole checkpoint"
            raise InvalidRequest(text, field=field)
        delta = read_delta(directory, field=field)
        deltas.append(str(directory))
        if (base := allowed(delta.base)) is None:
            text = f"the base {delta.base} of {delta.file} is not below an allowed directory"
            raise InvalidRequest(text, field=field)
        directory = base
    return WeightFiles(str(directory), tuple(reversed(deltas)))


def read_delta(directory: Path, *, field: str) -> WeightDelta:
    """Read the header of a difference. Raises InvalidRequest, naming `field`."""
    file = directory / FILE
    try:
        if others := [x.name for x in directory.glob(f"*{SUFFIX}") if x.name != FILE]:
            raise ValueError(f"{others[0]} is beside it: which one is meant?")
        found = read_file(file)
        metadata = found.metadata
        if metadata.get("format") != _FORMAT or not metadata.get("base"):
            raise ValueError(f"its metadata must have format={_FORMAT} and a base")
        base = Path(os.path.normpath(directory / metadata["base"]))
        delta = WeightDelta(
            file, base, metadata.get("digest", ""), metadata.get("result", ""), found.tensors
        )
        _check_parts(delta)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{file}: {error}", field=field) from error
    return delta


def read_weights(files: WeightFiles, *, field: str) -> Checkpoint:
    """Return the checkpoint that `files` are. With differences all tensors are read and hashed.
    Raises InvalidRequest, naming `field`, if a file is not valid, or a base is another one than the
    difference was made for."""
    found = read_checkpoint(Path(files.base), field=field)
    deltas = read_deltas(files, field=field)
    if not deltas:
        return found
    digest = found.digest
    try:
        for delta in deltas:
            _check_base(delta, found, digest)
            digest = delta.result
        if (result := _hash_tensors(found.tensors, deltas)) != digest:
            text = "the result is not what it was made for: its base has other values"
            raise ValueError(f"{deltas[-1].file}: {text}")
    except (OSError, ValueError) as error:
        raise InvalidRequest(str(error), field=field) from error
    return Checkpoint(found.tensors, result[:DIGITS])


def read_deltas(files: WeightFiles, *, field: str) -> list[WeightDelta]:
    """Read the headers of the differences. Raises InvalidRequest, naming `field`."""
    return [read_delta(Path(directory), field=field) for directory in files.deltas]


def write_delta(base: Path, new: Path, target: Path) -> Made:
    """Write into the directory `target` how the checkpoint in `new` differs from that in `base`.
    Raises InvalidRequest or OSError."""
    if any(x.name != FILE for x in target.glob(f"*{SUFFIX}")):
        raise InvalidRequest(f"{target} has {SUFFIX} files already", field="--output")
    files = find_files(base.resolve(), field="--base")
    old, found = read_weights(files, field="--base"), read_checkpoint(new, field="DIR")
    check_same_shapes(found, old, field="DIR")
    deltas = read_deltas(files, field="--base")
    target.mkdir(parents=True, exist_ok=True)
    data, header = target / f"{FILE}.data", _SparseHeader()
    try:
        with data.open("w+b") as spooled:
            for name, tensor in found.tensors.items():
                before = _patched(name, old.tensors[name], deltas)
                after = _values(tensor, _item_size(name, tensor))
                header.add(name, tensor.dtype, before, after, spooled)
            metadata = {
                "format": _FORMAT,
                "base": os.path.relpath(base.resolve(), target.resolve()),
                "digest": deltas[-1].result if deltas else old.digest,
                "result": _hash_tensors(found.tensors, ()),
            }
            encoded = msgspec.json.encode({"__metadata__": metadata, **header.entries})
            spooled.seek(0)
            partial = target / f"{FILE}.partial"
            with partial.open("wb") as written:
                written.write(_U64.pack(len(encoded)) + encoded)
                shutil.copyfileobj(spooled, written, 1 << 20)
            partial.replace(target / FILE)
    finally:
        data.unlink(missing_ok=True)
    tensors = found.tensors.values()
    return Made(
        len(header.entries) // 2,
        header.values,
        sum(x.values for x in tensors),
        (target / FILE).stat().st_size,
        sum(x.size for x in tensors),
    )


class _SparseHeader:
    """Header of a difference that is being written. State: its entries, the number of changed
    values, and the length of the data."""

    def __init__(self) -> None:
        self.entries: dict[str, object] = {}
        self.values, self._end = 0, 0

    def add(self, name: str, dtype: str, before: Bits, after: Bits, out: BinaryIO) -> None:
        """Write the changed values of a tensor to `out`."""
        changed = np.flatnonzero(before != after)
        if not len(changed):
            return
        self.values += len(changed)
        kind = "I32" if len(after) <= np.iinfo(np.int32).max else "I64"
        indices = changed.astype(_INDEX_TYPES[kind])
        for key, of, array in ((_INDICES, kind, indices), (_VALUES, dtype, after[changed])):
            end = self._end + array.nbytes
            shape, offsets = [len(changed)], [self._end, end]
            self.entries[name + key] = {"dtype": of, "shape": shape, "data_offsets": offsets}
            out.write(array.tobytes())
            self._end = end


def _check_parts(delta: WeightDelta) -> None:
    """Raise ValueError unless each changed tensor has indices and as many values."""
    for key in delta.tensors:
        name = key.removesuffix(_VALUES if key.endswith(_VALUES) else _INDICES)
        indices = delta.tensors.get(name + _INDICES)
        values = delta.tensors.get(name + _VALUES)
        if indices is None or values is None or indices.shape != values.shape:
            raise ValueError(f"{name} must have as many indices as values")
        if indices.dtype not in _INDEX_TYPES or len(indices.shape) != 1:
            raise ValueError(f"indices of {name} must be I32 or I64 in one dimension")
        if indices.size != indices.values * np.dtype(_INDEX_TYPES[indices.dtype]).itemsize:
            raise ValueError(f"indices of {name} have {indices.size} bytes")


def _check_base(delta: WeightDelta, base: Checkpoint, digest: str) -> None:
    """Raise ValueError unless `base`, of that digest, is what the difference was made for."""
    if delta.digest != digest:
        text = f"its base {delta.base} has the digest {digest[:DIGITS]}"
        raise ValueError(f"{delta.file}: {text}, and it was made for {delta.digest[:DIGITS]}")
    for name in sorted(delta.changed):
        tensor, values = base.tensors.get(name), delta.tensors[name + _VALUES]
        if tensor is None or tensor.dtype != values.dtype:
            of = "missing" if tensor is None else tensor.dtype
            raise ValueError(f"{delta.file}: {name} is {values.dtype}, and {of} in its base")


def _hash_tensors(tensors: Mapping[str, StoredTensor], deltas: Sequence[WeightDelta]) -> str:
    """Return the digest of name, type, shape and data of all tensors in order of their names.
    Independent of the files in which they are."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(_patched(name, tensor, deltas).view(np.uint8).data)
    return digest.hexdigest()


def _patched(name: str, tensor: StoredTensor, deltas: Sequence[WeightDelta]) -> Bits:
    flat = _values(tensor, _item_size(name, tensor))
    for delta in deltas:
        delta.apply(name, flat)
    return flat


def _item_size(name: str, tensor: StoredTensor) -> int:
    """Return the bytes of a value. Raises ValueError for types whose values are no whole bytes."""
    size = tensor.size // max(tensor.values, 1) or 1
    if size not in _ITEM_SIZES or size * tensor.values != tensor.size:
        raise ValueError(f"{tensor.file}: values of {name} ({tensor.dtype}) cannot be replaced")
    return size


def _values(tensor: StoredTensor, item_size: int) -> Bits:
    """Read a tensor. Raises ValueError unless its values have `item_size` bytes and are all
    there."""
    flat: Bits = np.fromfile(
        tensor.file, f"<u{item_size}", tensor.size // item_size, offset=tensor.offset
    )
    if len(flat) != tensor.values or flat.nbytes != tensor.size:
        raise ValueError(f"{tensor.file} has values of another size, or has become shorter")
    return flat

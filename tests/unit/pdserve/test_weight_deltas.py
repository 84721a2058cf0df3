"""Sparse files: what they change, and which ones are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pdserve.errors import InvalidRequest
from pdserve.model.weight_deltas import (
    FILE,
    MAX_CHAIN,
    Made,
    WeightFiles,
    find_files,
    read_deltas,
    read_weights,
    write_delta,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Arrays = dict[str, "np.ndarray[Any, Any]"]
TYPES = {"<f4": "F32", "<u2": "BF16", "<i4": "I32", "<i8": "I64", "|u1": "F8_E4M3"}


def save(file: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata or {})}
    end = 0
    for name, array in arrays.items():
        offsets = [end, end + array.nbytes]
        dtype, shape = TYPES[array.dtype.str], list(array.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end += array.nbytes
    encoded = msgspec.json.encode(header)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(x.tobytes() for x in arrays.values())
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def arrays(step: int) -> Arrays:
    """Return the tensors of a step of training, in which few values change."""
    rng = np.random.default_rng(0)
    made: Arrays = {
        "a": rng.integers(0, 1 << 16, (40, 50)).astype("<u2"),
        "b": rng.random(64).astype("<f4"),
        "same": rng.integers(0, 255, 7).astype("|u1"),
    }
    for i in range(step):
        made["a"].reshape(-1)[i :: 100 + i] ^= i + 1
        made["b"][[0, 63]] = i
    return made


def checkpoints(root: Path, steps: int = 2) -> list[Path]:
    for step in range(steps):
        save(root / f"step-{step}" / "model.safetensors", arrays(step))
    return [root / f"step-{step}" for step in range(steps)]


def hashed(files: WeightFiles) -> str:
    return read_weights(files, field="path").digest


def result(files: WeightFiles, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `array` of the base with the differences."""
    flat = array.copy().reshape(-1).view(f"<u{array.itemsize}")
    for delta in read_deltas(files, field="path"):
        delta.apply(name, flat)
    return flat.view(array.dtype).reshape(array.shape)


def test_a_chain_of_differences_is_the_checkpoint_that_it_was_made_from(tmp_path: Path) -> None:
    steps = checkpoints(tmp_path, 3)
    made = write_delta(steps[0], steps[1], tmp_path / "delta-1")
    assert made == Made(2, 20 + 2, 2071, made.size, 40 * 50 * 2 + 64 * 4 + 7)
    write_delta(tmp_path / "delta-1", steps[2], tmp_path / "delta-2")
    files = find_files(tmp_path / "delta-2", field="path")
    chain = tuple(str(tmp_path / x) for x in ("delta-1", "delta-2"))
    assert files == WeightFiles(str(steps[0]), chain)
    old = arrays(0)
    for name, expected in arrays(2).items():
        assert np.array_equal(result(files, name, old[name]), expected)
    # The digest is of the result alone: another base gives the same.
    write_delta(steps[0], steps[2], tmp_path / "direct")
    assert hashed(find_files(tmp_path / "direct", field="path")) == hashed(files)
    assert hashed(files) != hashed(find_files(tmp_path / "delta-1", field="path"))


def edited(change: Callable[[Arrays, dict[str, str]], object]) -> Callable[[Path], None]:
    """Return a function that writes another `delta-1`."""

    def write(root: Path) -> None:
        changed = {
            "b.indices": np.array([0, 63], "<i4"),
            "b.values": np.array([5, 6], "<f4"),
        }
        delta = read_deltas(WeightFiles("", (str(root / "delta-1"),)), field="path")[0]
        metadata = {
            "format": "pdserve-delta",
            "base": "../step-0",
            "digest": delta.digest,
            "result": delta.result,
        }
        change(changed, metadata)
        save(root / "delta-1" / FILE, changed, metadata)

    return write


def other_base(root: Path) -> None:
    save(root / "step-0" / "model.safetensors", arrays(1))


def base_of_other_type(root: Path) -> None:
    save(root / "step-0" / "model.safetensors", {"b": np.zeros(64, "<i4")})
    digest = hashed(WeightFiles(str(root / "step-0")))
    edited(lambda _, said: said.update(digest=digest))(root)


def cut(root: Path) -> None:
    file = root / "delta-1" / FILE
    file.write_bytes(file.read_bytes()[:-1])


def beside_another(root: Path) -> None:
    save(root / "delta-1" / "model.safetensors", arrays(1))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (edited(lambda x, _: x.update({"b.indices": np.array([0, 64], "<i4")})), "to 63 at most"),
        (edited(lambda x, _: x.update({"b.indices": np.array([-1, 3], "<i8")})), "must increase"),
        (edited(lambda x, _: x.update({"b.indices": np.array([3, 3], "<i4")})), "must increase"),
        (edited(lambda x, _: x.update({"b.indices": np.array([3], "<i4")})), "as many indices"),
        (edited(lambda x, _: x.pop("b.values")), "as many indices as values"),
        (edited(lambda x, _: x.pop("b.indices")), "as many indices as values"),
        (edited(lambda x, _: x.update({"b.indices": np.zeros(2, "<f4")})), "must be I32 or I64"),
        (edited(lambda x, _: x.update({"c.indices": x["b.indices"], "c.values": x["b.values"]})),
         "c is F32, and missing in its base"),
        (edited(lambda x, _: x), "the result is not what it was made for"),
        (edited(lambda _, said: said.pop("base")), "a base"),
        (edited(lambda _, said: said.pop("format")), "format=pdserve-delta"),
        (edited(lambda _, said: said.update(base=".")), f"more than {MAX_CHAIN} differences"),
        (other_base, "and it was made for"),
        (base_of_other_type, "b is F32, and I32 in its base"),
        (cut, "is not complete"),
        (beside_another, "model.safetensors is beside it"),
    ],
)  # fmt: skip
def test_a_difference_that_does_not_fit_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    steps = checkpoints(tmp_path)
    write_delta(*steps, tmp_path / "delta-1")
    damage(tmp_path)
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_weights(find_files(tmp_path / "delta-1", field="path"), field="path")
    assert refused.value.field == "path"


def test_a_base_outside_of_the_allowed_directories_is_not_read(tmp_path: Path) -> None:
    steps = checkpoints(tmp_path)
    write_delta(*steps, tmp_path / "delta-1")
    with pytest.raises(InvalidRequest, match=r"step-0 of .* is not below an allowed directory"):
        find_files(tmp_path / "delta-1", lambda _: None, field="path")


def test_no_difference_is_made_of_checkpoints_of_two_shapes(tmp_path: Path) -> None:
    steps = checkpoints(tmp_path)
    save(steps[1] / "model.safetensors", {"a": np.zeros(3, "<f4")})
    with pytest.raises(InvalidRequest, match=r"tensor a is F32 \[3\], and BF16 \[40, 50\]"):
        write_delta(*steps, tmp_path / "delta-1")
    assert not (tmp_path / "delta-1").exists()

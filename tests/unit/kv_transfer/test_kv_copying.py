"""The two ways to copy pages do the same, byte for byte, and touch nothing else."""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kv_transfer import copying
from kv_transfer.copying import (
    MIN_DIGESTED_BYTES,
    STRIPE_BYTES,
    Pages,
    copy_digested_in_c,
    copy_in_c,
    copy_in_python,
    copy_pages,
    digest_in_c,
    digests_in_c,
)

if TYPE_CHECKING:
    from kv_transfer.copying import Copy

COMPILED = pytest.mark.skipif(
    copying.compiled is None, reason="the extension was not built: no C compiler at install"
)
DIGESTING = pytest.mark.skipif(
    not getattr(copying.compiled, "DIGESTS", False), reason="no extension, or no AVX2"
)
WAYS = [pytest.param(copy_in_python, id="python"), pytest.param(copy_in_c, id="c", marks=COMPILED)]
LAYERS, BLOCKS = 3, 6


class Memory:
    """Random bytes at an address that is no multiple of anything."""

    def __init__(self, size: int, seed: int, shift: int) -> None:
        self._size, self._shift = size, shift
        self._buffer = ctypes.create_string_buffer(size + shift)
        self._buffer[shift : shift + size] = random.Random(seed).randbytes(size)
        self.address = ctypes.addressof(self._buffer) + shift

    def write(self, content: bytes) -> None:
        """Over all of it."""
        self._buffer[self._shift : self._shift + self._size] = bytes(content)

    def content(self) -> bytearray:
        """A copy of all of it."""
        return bytearray(self._buffer[self._shift : self._shift + self._size])


def pages(draw: Any, page: int, blocks: st.SearchStrategy[list[int]]) -> tuple[Memory, Pages, int]:
    """Memory with pages of `page` bytes, and where the first one begins in it."""
    unit, start = page + draw(st.sampled_from([0, 0, 8])), draw(st.sampled_from([0, 24]))
    inside = draw(st.booleans())
    strides = (unit, LAYERS * unit) if inside else (BLOCKS * unit, unit)
    size = start + LAYERS * BLOCKS * unit
    memory = Memory(size, draw(st.integers(0, 3)), draw(st.integers(0, 64)))
    return memory, Pages(memory.address + start, *strides, draw(blocks)), start


@pytest.mark.parametrize("copy", WAYS)
@given(data=st.data(), page=st.sampled_from([8, 64, 1000, 1024, 4096, 12352]))
def test_so_many_bytes_of_each_page_are_copied_and_nothing_else(
    copy: Copy, data: Any, page: int
) -> None:
    count = data.draw(st.integers(0, BLOCKS))
    block = st.integers(0, BLOCKS - 1)
    ours, to, to_start = pages(
        data.draw, page, st.lists(block, min_size=count, max_size=count, unique=True)
    )
    theirs, source, source_start = pages(
        data.draw, page, st.lists(block, min_size=count, max_size=count)
    )
    size = data.draw(st.one_of(st.just(page), st.integers(0, page)))
    want, given_bytes = ours.content(), theirs.content()
    for layer in range(LAYERS):
        for d, s in zip(to.block_ids, source.block_ids, strict=True):
            at = to_start + layer * to.layer_stride + d * to.block_stride
            start = source_start + layer * source.layer_stride + s * source.block_stride
            want[at : at + size] = given_bytes[start : start + size]
    copy(to, source, LAYERS, size)
    assert ours.content() == want
    assert theirs.content() == given_bytes


@COMPILED
def test_the_compiled_copy_is_the_one_in_use() -> None:
    assert copy_pages is copy_in_c


@COMPILED
@pytest.mark.parametrize(
    ("to_ids", "source_ids", "size", "error"),
    [
        ([0, 1], [0], 8, ValueError),
        ([0], ["0"], 8, TypeError),
        ([2**80], [0], 8, OverflowError),
        ([0], [0], "8", TypeError),
        ([0], [0], -8, ValueError),
        ((0,), [0], 8, TypeError),
    ],
)
def test_what_is_no_list_of_blocks_is_refused(
    to_ids: Any, source_ids: Any, size: Any, error: type[Exception]
) -> None:
    memory = Memory(64, 1, 0)
    before = memory.content()
    with pytest.raises(error):
        copy_in_c(Pages(memory.address, 8, 8, to_ids), Pages(0, 8, 8, source_ids), 1, size)
    assert memory.content() == before


@DIGESTING
@given(data=st.data(), page=st.sampled_from([64, 192, 1024, 1088, 4096, 12352]))
def test_the_compiled_digest_is_that_of_the_package(data: Any, page: int) -> None:
    """Alone and with a copy, which is the same as one without."""
    ids = data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=BLOCKS, unique=True))
    ours, to, _ = pages(data.draw, page, st.just(ids[::-1]))
    theirs, source, start = pages(data.draw, page, st.just(ids))
    size = STRIPE_BYTES * data.draw(st.integers(1, page // STRIPE_BYTES))
    if not digests_in_c(len(ids), LAYERS, size):
        assert LAYERS * len(ids) * size < MIN_DIGESTED_BYTES
        return
    content = theirs.content()
    starts = [
        start + layer * source.layer_stride + block * source.block_stride
        for layer in range(LAYERS)
        for block in ids
    ]
    want = xxh3_64_intdigest(b"".join(content[at : at + size] for at in starts))
    assert digest_in_c(source, LAYERS, size) == want
    before = ours.content()
    copy_in_python(to, source, LAYERS, size)
    copied = ours.content()
    ours.write(before)
    assert copy_digested_in_c(to, source, LAYERS, size) == want
    assert ours.content() == copied


@DIGESTING
@pytest.mark.parametrize(("count", "size"), [(4, 64 + 8), (0, 64), (3, 64)])
def test_what_has_another_form_of_digest_is_refused(count: int, size: int) -> None:
    memory = Memory(4 * size, 1, 0)
    before = memory.content()
    ids = list(range(count))
    assert not digests_in_c(count, 1, size)
    some = Pages(memory.address, 0, size, ids)
    with pytest.raises(ValueError, match="whole stripes"):
        digest_in_c(some, 1, size)
    with pytest.raises(ValueError, match="whole stripes"):
        copy_digested_in_c(some, some, 1, size)
    assert memory.content() == before

"""Driver of the C module, built with AddressSanitizer at `argv[1]`: `argv[2]` rounds of random
regions and hostile ids. Memory is exactly as long as the regions, so any access beyond it ends this
process."""

from __future__ import annotations

import ctypes
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location


def load(path: str) -> None:
    """Make kv_transfer import the module at `path`."""
    spec = spec_from_file_location("kv_transfer._copy", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["kv_transfer._copy"] = module


load(sys.argv[1])
from kv_transfer.cache import host_memory as memory  # noqa: E402
from kv_transfer.cache.geometry import KvGeometry  # noqa: E402
from kv_transfer.errors import KvTransferError  # noqa: E402

HOSTILE = (-1, 1 << 62, -(1 << 63), 1 << 63, 1 << 70, "0", None, 1.5)
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.free.argtypes = [ctypes.c_void_p]
# Allocate by malloc itself, so that the sanitizer knows the bounds.


def region(dice: random.Random, layers: int, page: int) -> memory.KvRegion:
    blocks, gap, offset = dice.randint(1, 9), dice.choice((0, 0, 1, 48)), dice.choice((0, 16, 5))
    if dice.random() < 0.5:
        strides = (blocks * (page + gap), page + gap)
    else:
        strides = (page + gap, layers * (page + gap))
    geometry = KvGeometry(layers, blocks, page, *strides, offset)
    size = geometry.span_bytes
    address = LIBC.malloc(ctypes.c_size_t(size))
    ctypes.memmove(address, dice.randbytes(size), size)
    return memory.KvRegion(address, size, geometry)


def once(dice: random.Random) -> None:
    layers, page = dice.randint(1, 4), dice.choice((1, 15, 16, 17, 64, 100, 1024, 4096, 20_000))
    source, target = region(dice, layers, page), region(dice, layers, page)
    count = dice.randint(0, min(source.geometry.num_blocks, target.geometry.num_blocks))
    theirs = [dice.randrange(source.geometry.num_blocks) for _ in range(count)]
    ours = dice.sample(range(target.geometry.num_blocks), count)
    digests = target.copy_from(source, theirs, ours)
    wanted = [bytes(x) for x in source.pages(theirs)]
    assert [bytes(x) for x in target.pages(ours)] == wanted
    assert digests == memory._digests(source._array()[:, theirs]) == source.digests(theirs)
    hostile = [*theirs, dice.choice(HOSTILE)]
    for ids, places in ((hostile, [*ours, 0]), (theirs, hostile), (hostile, ours)):
        try:
            target.copy_from(source, ids, places)  # type: ignore[arg-type]
        except (KvTransferError, TypeError, ValueError, OverflowError):
            continue
        raise AssertionError(f"{ids} to {places} was copied")
    # Call the module directly: lists of unequal lengths and values that are no ids.
    module, (start, *strides, _) = sys.modules["kv_transfer._copy"], source._pages_at([])
    for ids in ([1 << 70], ["0"], [None], [0, 0]):
        try:
            module.copy(start, *strides, ids, start, *strides, [0], layers, page)
        except (TypeError, ValueError, OverflowError):
            continue
        raise AssertionError(f"{ids} was copied")
    for each in (source, target):
        LIBC.free(each.address)


def overrun() -> None:
    """Read one byte beyond a region, to show that the sanitizer detects it."""
    address = LIBC.malloc(ctypes.c_size_t(64))
    sys.modules["kv_transfer._copy"].digest(address, 64, 64, [0], 1, 65)


if __name__ == "__main__":
    if sys.argv[2] == "overrun":
        overrun()
    for number in range(int(sys.argv[2])):
        once(random.Random(number))

"""Digests of KV in GPU memory, and their reference by torch.

An element of a chunk in its one form, [layer][plane][token][head][channel], is mixed with its place
there, and all are added, modulo 2^64: so the two ends may hold the chunk in other layouts and
blocks, and thousands of threads share the work. The mixing is that of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Quick and no signature, as
kv_transfer/digest.py's, from which it differs: both ends of a link are on GPUs, or none is.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from typing import TYPE_CHECKING

import torch

from kv_transfer.device.base import StreamError
from kv_transfer.device.waiting import ASK_S, COPY_S
from kv_transfer.gather import RankCache, gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.reshard import Piece

_MASK = 2**64 - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mixed_sum(cache: RankCache, piece: Piece, block_ids: Sequence[int]) -> torch.Tensor:
    """The sum as an int64, on the cache's device. Raises KvTransferError."""
    first = cache.views[0]
    staging = torch.empty(cache.size_bytes(piece), dtype=torch.uint8, device=first.device)
    gather(cache, piece, block_ids, staging)
    item = first.element_size()
    values = staging.view(INTEGERS[item]).to(torch.int64)
    if item < 8:
        values &= (1 << 8 * item) - 1
    places = torch.arange(1, values.numel() + 1, device=first.device)
    mixed = values + places * _signed(STEP)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)).sum()


def digest_of(
    cache: RankCache, piece: Piece, block_ids: Sequence[int], after: torch.cuda.Event | None
) -> int:
    """64 bits, never 0, of what the piece holds once `after` has fired. Waits for the GPU by
    asking. Raises KvTransferError."""
    device = cache.views[0].device
    if device.type != "cuda":
        return int(mixed_sum(cache, piece, block_ids)) & _MASK or 1
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream := _stream(device)):
            if after is not None:
                stream.wait_event(after)
            total = torch.zeros((), dtype=torch.int64, pin_memory=True)
            total.copy_(_summed(cache, piece, block_ids), non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        end = time.monotonic() + COPY_S
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= end:
                raise StreamError(f"a digest on the GPU did not end in {COPY_S:g} s")
            time.sleep(ASK_S)
    except RuntimeError as error:
        raise StreamError(f"digest: {error}") from error
    return int(total) & _MASK or 1


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _summed(cache: RankCache, piece: Piece, block_ids: Sequence[int]) -> torch.Tensor:
    if importlib.util.find_spec("triton") is None:
        return mixed_sum(cache, piece, block_ids)
    from kv_transfer import digest_triton

    return digest_triton.mixed_sum(cache, piece, block_ids)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    # torch shifts signed numbers with their sign
    return (values >> count) & ((1 << 64 - count) - 1)

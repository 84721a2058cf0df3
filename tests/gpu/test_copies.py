"""Copies and digests on a GPU, against the same on the CPU."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("grpc")

from kv_transfer.cache import cuda_runtime  # noqa: E402
from kv_transfer.cache.gpu_memory import DeviceRegion, device_region  # noqa: E402
from tests.support.gpu_caches import BLOCKS, LAYOUTS, missing_gpu, on_gpu, random_cache  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu())]
FROM, TO = [3, 60, 5, 17], [9, 0, 41, 2]
LIMIT_S = 60.0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [256, 576, 10], ids=["gqa", "mla", "odd"])
@pytest.mark.parametrize("heads", [8, 2], ids=["whole", "part"])
def test_blocks_and_digests_are_those_of_the_cpu(layout: str, width: int, heads: int) -> None:
    source, target = random_cache(1, width=width), random_cache(2, width=width)
    _, ours = on_gpu(source, layout)
    view, theirs = on_gpu(target, "LBNHC")
    size = ours.geometry.page_bytes // 8 * heads
    part = range(len(source)), 0, size
    expected = device_region(list(source), BLOCKS).narrowed(*part).digests(FROM)
    assert theirs.narrowed(*part).copy_from(ours.narrowed(*part), FROM, TO) == expected
    assert theirs.narrowed(*part).digests(TO) == expected
    target[:, TO, :heads] = source[:, FROM, :heads]
    assert torch.equal(view.cpu(), target)


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("checked", [range(1, 4, 2), range(5, 4, 8)], ids=["some", "none"])
def test_digests_of_some_blocks_are_those_of_all(layout: str, checked: range) -> None:
    """The copy has ended with them, also if there are none."""
    _, ours = on_gpu(random_cache(1), layout)
    ours = DeviceRegion(ours.views, ours.split, cuda=cuda_runtime.load())
    _, theirs = on_gpu(random_cache(2), layout)
    every = ours.digests(FROM)
    made = theirs.begin_copy(ours, FROM, TO, checked).wait()
    assert theirs.digests(TO) == every
    for found in (made, ours.begin_digests(FROM, checked).wait()):
        assert len(found) == len(every)
        assert all(found[8 * n : 8 * n + 8] == every[8 * n : 8 * n + 8] for n in checked)


def test_a_copy_does_not_wait_for_the_engines_next_step() -> None:
    """The copy runs beside the step after the one that filled the blocks."""
    _, region = on_gpu(random_cache(1), "BLHNC")
    expected = device_region(list(random_cache(1)), BLOCKS).digests(FROM)
    region.digests(FROM)  # allocates pinned memory, for which CUDA may wait for all streams
    filled = region.step_end()
    assert filled is not None
    with stopped_step() as is_stopped:
        filled.synchronize()
        assert region.digests(FROM) == expected
        assert is_stopped(), "the copy waited for the next step"


@contextmanager
def stopped_step() -> Iterator[Callable[[], bool]]:
    """Enqueue a step that lasts until the end of the block, or for LIMIT_S. Yields a function that
    returns True if it has not ended."""
    end = threading.Event()
    step = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: end.wait(LIMIT_S))
    stream = torch.cuda.current_stream()
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.', 1)[0]}")
    assert runtime.cudaLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), step, None) == 0
    try:
        yield lambda: not stream.query()
    finally:
        end.set()
        stream.synchronize()

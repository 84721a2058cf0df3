"""Copies and digests on a GPU, against the same on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("grpc")

from kv_transfer.cache.gpu_memory import device_region  # noqa: E402
from tests.support.gpu_caches import BLOCKS, LAYOUTS, missing_gpu, on_gpu, random_cache  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu())]
FROM, TO = [3, 60, 5, 17], [9, 0, 41, 2]
LONG = 2_000_000_000  # cycles: about a second


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


def test_a_copy_does_not_wait_for_the_engines_next_step() -> None:
    """The copy runs beside the step after the one that filled the blocks."""
    _, region = on_gpu(random_cache(1), "BLHNC")
    filled = region.step_end()
    assert filled is not None
    torch.cuda._sleep(LONG)
    next_step = region.step_end()
    filled.synchronize()
    expected = device_region(list(random_cache(1)), BLOCKS).digests(FROM)
    assert region.digests(FROM) == expected
    assert not next_step.query(), "the copy waited for it, or the GPU runs one kernel at a time"
    next_step.synchronize()

"""Checkpoints for fake engines, and a cluster whose weights can be replaced by them. Each token of
a fake engine depends on its weights and on the KV before it, so a token from KV of other weights is
wrong."""

from __future__ import annotations

import struct
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pdserve.model.weights_files import read_checkpoint
from tests.support.cluster import LONG, PROMPT, Answer, Cluster
from tests.support.timeouts import WAIT_S
from workers.engine import AggregatedPhase, Work
from workers.fake.sequence import Sequence as FakeSequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from pdserve.types import TokenSpan


def checkpoint(directory: Path, seed: int) -> str:
    """Write a checkpoint of one tensor. Return its digest."""
    directory.mkdir(parents=True, exist_ok=True)
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = msgspec.json.encode({"weight": tensor})
    data = struct.pack("<Q", len(header)) + header + struct.pack("<f", seed)
    (directory / "model.safetensors").write_bytes(data)
    return read_checkpoint(directory, field="path").digest


@asynccontextmanager
async def trained(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Cluster, list[str]]]:
    """Start a cluster with checkpoints 1 to 3. Yield it and the digests, "" for the first."""
    digests = ["", *(checkpoint(tmp_path / str(i), i) for i in (1, 2, 3))]
    weights = {"directories": [str(tmp_path)], "timeout_s": WAIT_S, "hold_s": WAIT_S}
    weights |= {x: options.pop(x) for x in ("hold_s", "stale_kv") if x in options}
    router = {"weights": weights, **options.pop("router", {})}
    worker = {"weights_directories": (str(tmp_path),)}
    async with Cluster(router=router, worker=worker, **options) as cluster:
        yield cluster, digests


def resumed(cluster: Cluster, digest: str, tokens: Sequence[int]) -> FakeSequence:
    """Return the request on one engine that computes prompt and `tokens` with the weights
    `digest`."""
    vocab_size = next(iter(cluster.workers.values())).info.model.vocab_size
    phase, made = AggregatedPhase(), tuple(tokens)
    work = Work(1, "expected", tuple(PROMPT), LONG, phase, resume_token_ids=made)
    return FakeSequence(work, vocab_size, weights=digest)


def continued(cluster: Cluster, digest: str, tokens: Sequence[int], until: int) -> list[int]:
    """Return the first `until` tokens of the answer that continues after `tokens` with the weights
    `digest`, computed by one engine."""
    sequence = resumed(cluster, digest, tokens)
    while len(sequence.generated) < until:
        sequence.advance(0.0)
    return sequence.generated


def assert_spans(answer: Answer, digests: dict[str, str], cluster: Cluster) -> None:
    """Assert that the spans cover the answer, and that one engine, switched at the same tokens,
    gives the same answer. It keeps its KV where a span says so, and computes it again elsewhere."""
    assert answer.receipt is not None
    spans: Sequence[TokenSpan] = answer.receipt.spans
    assert spans[0].start == 0
    assert all(x.end == y.start for x, y in pairwise(spans))
    assert spans[-1].end == len(answer.token_ids)
    sequence = resumed(cluster, digests[spans[0].version], ())
    for span in spans:
        if span.stale_kv_tokens:
            assert span.stale_kv_tokens == sequence.context - 1
            sequence.weights = digests[span.version]
        else:
            sequence = resumed(cluster, digests[span.version], sequence.generated)
        while len(sequence.generated) < span.end:
            sequence.advance(0.0)
    assert answer.token_ids == sequence.generated
    assert answer.receipt.stale_kv_tokens == max(x.stale_kv_tokens for x in spans)


async def post(cluster: Cluster, path: str, **body: object) -> tuple[int, dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"http://{cluster.http}{path}", json=body) as reply,
    ):
        return reply.status, await reply.json()

"""Loaded into a prefill engine's process: the last chunk of each prompt does not end before every
earlier block has been copied. The events are written to a file.

The copies therefore have enough time on any machine. If they started only after the prompt, or
needed the step that waits for them, the step would never end.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_transfer.protocol.producer import Producer
from kv_transfer.vllm.worker_half import WorkerHalf
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from kv_transfer.protocol.producer import SendChunk
    from kv_transfer.vllm.step import StepMetadata

_EVENTS = Path(os.environ["PDSERVE_TEST_WAIT_FOR_COPIES"])
_PROMPT = int(os.environ["PDSERVE_TEST_WAIT_FOR_COPIES_TOKENS"])
_subscribe, _end_copy, _after_step = Producer.subscribe, Producer.end_copy, WorkerHalf.after_step
_copied: dict[str, int] = {}
_computed: dict[str, int] = {}


def _note(*words: object) -> None:
    with _EVENTS.open("a", encoding="ascii") as file:
        file.write(" ".join(str(word) for word in (*words, time.monotonic())) + "\n")


def _noted_subscription(
    self: Producer[Any], link: Any, subscription: Any, now: float, send_chunks: int
) -> Any:
    actions = _subscribe(self, link, subscription, now, send_chunks)
    _note("subscribed", subscription.num_blocks)
    return actions


def _noted_copy(
    self: Producer[Any], chunk: SendChunk[Any], now: float, seconds: float, sent_bytes: int
) -> Any:
    actions = _end_copy(self, chunk, now, seconds, sent_bytes)
    _copied[chunk.transfer_id] = chunk.first + len(chunk.block_ids)
    _note("copied", _copied[chunk.transfer_id])
    return actions


def _noted_step(self: WorkerHalf, metadata: StepMetadata) -> None:
    for part in metadata.progress:
        before = _computed.get(part.transfer_id, 0)
        _computed[part.transfer_id] = part.ready_tokens
        if part.ready_tokens == _PROMPT:
            end = time.monotonic() + WAIT_S
            while _copied.get(part.transfer_id, 0) < before // 32 and time.monotonic() < end:
                time.sleep(0.001)
        _note("computed", part.ready_tokens)
    _after_step(self, metadata)


Producer.subscribe = _noted_subscription  # type: ignore[method-assign]
Producer.end_copy = _noted_copy  # type: ignore[method-assign]
WorkerHalf.after_step = _noted_step  # type: ignore[method-assign]

"""Loaded into an engine's process on the CUDA shim, where no kernel runs: a model without kernels,
whose KV and tokens follow from the tokens before them.

The KV of a token is a word that follows from this token and all before it, times another factor for
each 8 bytes of the token's KV. A step fills the blocks of the tokens that it computes, and looks at
all KV of a sequence before it samples. The next token is `next_token` of the sequence, and 0 if a
single byte differs. The file that the environment names gets a line for each preemption.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from kv_transfer.vllm.connector import first_of
from tests.gpu.shim.kernels import enqueue, on_host
from tests.support.shim_engines import extended, next_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.cache.gpu_memory import DeviceRegion


_PREEMPTIONS = Path(os.environ["PDSERVE_TEST_SKIPPED_KERNELS"])


@dataclass(slots=True)
class _Sequence:
    """A request in the runner. The stream appends the tokens that it samples; `tables` has the
    blocks by group."""

    tokens: list[int]
    tables: list[list[int]]
    words: list[int] = field(default_factory=list)

    def word_array(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        self.words += extended(self.words, self.tokens)
        return np.array(self.words[:count], np.uint64)


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in one step, as it was when the step was enqueued."""

    sequence: _Sequence
    tables: list[list[int]]
    first: int
    count: int
    samples: bool


class _Cache:
    """The KV cache of one group, as numbers."""

    def __init__(self, region: DeviceRegion) -> None:
        views = [on_host(view).view(torch.int64).numpy().view(np.uint64) for view in region.views]
        # [layers][blocks, heads, tokens, words]
        self._layers, (_, heads, self._block, words) = views, views[0].shape
        shape = (len(views), heads, words)
        self._factors = (2 * np.arange(np.prod(shape), dtype=np.uint64) + 1).reshape(shape)

    def _places(self, table: list[int], first: int, last: int) -> tuple[Any, Any]:
        positions = np.arange(first, last)
        return np.array(table)[positions // self._block], positions % self._block

    def fill(self, table: list[int], words: Any, first: int) -> None:
        blocks, offsets = self._places(table, first, first + len(words))
        for layer, factors in zip(self._layers, self._factors, strict=True):
            layer[blocks, :, offsets] = words[:, None, None] * factors

    def holds(self, table: list[int], words: Any) -> bool:
        blocks, offsets = self._places(table, 0, len(words))
        return all(
            np.array_equal(layer[blocks, :, offsets], words[:, None, None] * factors)
            for layer, factors in zip(self._layers, self._factors, strict=True)
        )


_sequences: dict[str, _Sequence] = {}
_caches: list[tuple[int, _Cache]] = []  # with the number of its block table


def _compute(rows: Sequence[_Row], sampled: torch.Tensor) -> None:
    """One step, when the stream comes to it."""
    if not _caches:
        half: Any = first_of(get_kv_transfer_group())._worker
        shards, regions = half._plan.shards, half.driver.local.regions
        _caches.extend((shards[n].group.table, _Cache(x)) for n, x in regions.items())
    for number, row in enumerate(rows):
        sequence, end = row.sequence, row.first + row.count
        words = sequence.word_array(end)
        for table, cache in _caches:
            cache.fill(row.tables[table], words[row.first :], row.first)
        if row.samples:
            whole = all(cache.holds(row.tables[table], words) for table, cache in _caches)
            token = next_token(int(words[-1])) if whole else 0
            sequence.tokens.append(token)
            sampled[number] = token


def _sample(
    self: Any, _hidden: Any, batch: Any, _grammar: Any
) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
    count = batch.num_reqs
    ends = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
    samples = ends >= batch.prefill_len_np[:count]
    rows = [
        _Row(
            _sequences[name],
            [list(x) for x in _sequences[name].tables],
            int(batch.num_computed_tokens_np[i]),
            int(batch.num_scheduled_tokens[i]),
            bool(samples[i]),
        )
        for i, name in enumerate(batch.req_ids)
    ]
    sampled = torch.empty((count, 1), dtype=torch.int64, device="cuda")
    target = on_host(sampled)
    enqueue(lambda: _compute(rows, target))
    num_sampled = torch.from_numpy(samples.astype(np.int32)).to("cuda")
    num_rejected = torch.from_numpy(np.zeros(count, np.int32)).to("cuda")
    return SamplerOutput(sampled, None, None, num_sampled, num_rejected), num_sampled, num_rejected


_execute_model = GPUModelRunner.execute_model


def _noted_step(self: Any, scheduled: Any, *args: Any, **named: Any) -> Any:
    preempted = scheduled.preempted_req_ids or ()
    if preempted:
        with _PREEMPTIONS.open("a", encoding="ascii") as file:
            file.writelines(f"{name}\n" for name in preempted)
    for name in (*scheduled.finished_req_ids, *preempted):
        _sequences.pop(name, None)
    for new in scheduled.scheduled_new_reqs:
        tables = [list(ids) for ids in new.block_ids]
        _sequences[new.req_id] = _Sequence(list(new.prefill_token_ids), tables)
    cached = scheduled.scheduled_cached_reqs
    for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
        for table, ids in zip(_sequences[name].tables, added or (), strict=False):
            table.extend(ids)
    return _execute_model(self, scheduled, *args, **named)


def _embed(_self: Any, layer: Any, ids: torch.Tensor) -> torch.Tensor:
    """The kernel would run (tests/gpu/shim/kernels.py), on ids that no kernel wrote."""
    return ids.new_empty((*ids.shape, layer.weight.shape[1]), dtype=layer.weight.dtype)


def _nothing(*_args: Any, **_named: Any) -> None:
    pass


JITFunction.run = _nothing
Autotuner.run = _nothing
GPUModelRunner.execute_model = _noted_step
GPUModelRunner.sample = _sample
GPUModelRunner.profile_run = _nothing
UnquantizedEmbeddingMethod.embedding = _embed
gpu_worker.Worker.compile_or_warm_up_model = lambda self: gpu_worker.CompilationTimes(
    language_model=0.0, encoder=0.0
)

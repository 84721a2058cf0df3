"""Loaded into an engine's process on the CUDA shim, where no kernel runs: a model without kernels,
whose KV and tokens follow from the tokens before them.

The KV of a token is a word that follows from this token and all before it, times another factor for
each 8 bytes of the token's KV; a state is that of the last token. A step first looks at all KV that
its tokens need, then writes theirs. The next token is `next_token` of the sequence, and 0 if a
single byte differed. The file that the environment names gets a line for each preemption.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from kv_transfer.cache.geometry import GroupKind
from kv_transfer.vllm.connector import first_of
from tests.gpu.shim.kernels import enqueue, on_host
from tests.support.shim_engines import extended, next_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kv_transfer.cache.geometry import KvGroup
    from kv_transfer.cache.gpu_memory import DeviceRegion


Words = np.ndarray[Any, np.dtype[np.uint64]]
_PREEMPTIONS = Path(os.environ["PDSERVE_TEST_SKIPPED_KERNELS"])


@dataclass(slots=True)
class _Sequence:
    """A request in the runner, with the blocks of each table. The rest is the stream's: `tokens`
    grows by those that are sampled, the first `computed` of them have KV, the last step began at
    `first`, and `drafts` are proposed for the next one."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int
    first: int = 0
    drafts: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    is_damaged: bool = False

    def words_of(self, tokens: list[int]) -> Words:
        """Return the words of `tokens`: the first ones of the sequence, or all and more."""
        self.words += extended(self.words, self.tokens)
        return np.array((self.words + extended(self.words, tokens))[: len(tokens)], np.uint64)

    def next_after(self, drafts: list[int]) -> int:
        return 0 if self.is_damaged else next_token(int(self.words_of(self.tokens + drafts)[-1]))


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in one step, with its blocks as they were when the step was enqueued. `count`: how
    many tokens the step computes, with the drafts."""

    sequence: _Sequence
    tables: list[list[int]]
    count: int


class _Cache:
    """The cache of one group, as numbers: of each token, or with states of the last one alone."""

    def __init__(self, group: KvGroup, region: DeviceRegion) -> None:
        # [layers][blocks, heads, tokens, words]; `split` of these blocks are one of the engine.
        self._layers = [
            on_host(view).view(torch.int64).numpy().view(np.uint64) for view in region.views
        ]
        self._group, self._split = group, region.split
        _, heads, self._tokens, words = self._layers[0].shape
        self._is_state = group.kind is GroupKind.STATE
        ranks, rank = get_tp_group().world_size, get_tp_group().rank_in_group
        block = (self._tokens, words) if self._is_state else (words,)
        shape = (len(self._layers), heads * ranks, *block)
        whole = (2 * np.arange(np.prod(shape), dtype=np.uint64) + 1).reshape(shape)
        self._factors = whole[:, heads * rank : heads * (rank + 1)]

    def _parts(self, tables: list[list[int]], words: Words, first: int) -> Iterator[Any]:
        """Yield (layer, index, values) of each layer for the tokens from `first` on, all of which
        have a word."""
        table = np.array(tables[self._group.table])
        index: Any
        if self._is_state:
            index = table[self._group.needed(len(words))[-1]]
            values = words[-1]
        else:
            blocks, places = divmod(np.arange(first, len(words)), self._tokens * self._split)
            rows, places = divmod(places, self._tokens)
            index = (table[blocks] * self._split + rows, slice(None), places)
            values = words[first:, None, None]
        for layer, factors in zip(self._layers, self._factors, strict=True):
            yield layer, index, values * factors

    def fill(self, tables: list[list[int]], words: Words, first: int) -> None:
        """Write what a step computes: the tokens from `first` on."""
        for layer, index, values in self._parts(tables, words, first):
            layer[index] = values

    def holds(self, tables: list[list[int]], words: Words) -> bool:
        """Return whether everything that the token after these needs is there."""
        is_window = self._group.kind is GroupKind.WINDOW
        first = max(0, len(words) - self._group.reach) if is_window else 0
        return all(
            np.array_equal(layer[index], values)
            for layer, index, values in self._parts(tables, words, first)
        )


_sequences: dict[str, _Sequence] = {}
_caches: list[_Cache] = []


def _compute(row: _Row) -> list[int]:
    """Compute a request's part of a step. Return the tokens that are sampled: none after a part of
    a prompt."""
    sequence, first = row.sequence, row.sequence.computed
    known = len(sequence.tokens)
    tokens = (sequence.tokens + sequence.drafts)[: first + row.count]
    words = sequence.words_of(tokens)
    if first:
        sequence.is_damaged |= not all(x.holds(row.tables, words[:first]) for x in _caches)
    for cache in _caches:
        cache.fill(row.tables, words, first)
    sequence.first, sequence.computed = first, min(len(tokens), known)
    sampled: list[int] = []
    while len(tokens) >= known + len(sampled):
        sampled.append(sequence.next_after([]))
        sequence.tokens.append(sampled[-1])
        if tokens[known + len(sampled) - 1 :][:1] != sampled[-1:]:
            break  # there is no draft, or it is rejected
        sequence.computed += 1
    return sampled


def _run(rows: Sequence[_Row], tokens: Any, num_sampled: Any, num_rejected: Any) -> None:
    """Run one step, when the stream comes to it."""
    if not _caches:
        half: Any = first_of(get_kv_transfer_group())._worker
        shards, regions = half._plan.shards, half.driver.local.regions
        _caches.extend(_Cache(shards[n].group, region) for n, region in regions.items())
    for number, row in enumerate(rows):
        sampled = _compute(row)
        tokens[number, : len(sampled)] = torch.tensor(sampled)
        num_sampled[number] = len(sampled)
        num_rejected[number] = row.count - len(sampled) if len(sampled) and row.count > 1 else 0


def _rows(batch: Any) -> list[_Row]:
    counts = [int(x) for x in batch.num_scheduled_tokens]
    found = [_sequences[name] for name in batch.req_ids]
    return [_Row(x, [list(t) for t in x.tables], n) for x, n in zip(found, counts, strict=False)]


def _sample(
    self: Any, _hidden: Any, batch: Any, _grammar: Any
) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
    rows, width = _rows(batch), 1 + self.num_speculative_steps
    tokens = torch.empty((len(rows), width), dtype=torch.int64, device="cuda")
    num_sampled, num_rejected = torch.empty((2, len(rows)), dtype=torch.int32, device="cuda")
    targets = [on_host(x) for x in (tokens, num_sampled, num_rejected)]
    enqueue(lambda: _run(rows, *targets))
    return SamplerOutput(tokens, None, None, num_sampled, num_rejected), num_sampled, num_rejected


def _draft(rows: Sequence[_Row], count: int) -> None:
    """Run the draft model, when the stream comes to it: it writes KV once more, which no other
    request may have by then, and its guess is wrong after each third token."""
    for row in rows:
        sequence = row.sequence
        words = sequence.words_of(sequence.tokens[: sequence.computed])
        for cache in _caches:
            cache.fill(row.tables, words, sequence.first)
        sequence.drafts = []
        while len(sequence.drafts) < count:
            token = sequence.next_after(sequence.drafts)
            sequence.drafts.append(token + (len(sequence.tokens) % 3 == 0))


def _propose(runner: Any, batch: Any, *_args: Any, **_named: Any) -> torch.Tensor:
    rows, count = _rows(batch), runner.num_speculative_steps
    enqueue(lambda: _draft(rows, count))
    drafts: torch.Tensor = runner.req_states.draft_tokens.new_empty((len(rows), count))
    return drafts


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
        tokens, computed = list(new.prefill_token_ids), new.num_computed_tokens
        _sequences[new.req_id] = _Sequence(tokens, tables, computed)
    cached = scheduled.scheduled_cached_reqs
    for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
        for table, ids in zip(_sequences[name].tables, added or (), strict=False):
            table.extend(ids)
    if self.speculator is not None:
        self.speculator.propose = partial(_propose, self)
    return _execute_model(self, scheduled, *args, **named)


def _embed(_self: Any, layer: Any, ids: torch.Tensor) -> torch.Tensor:
    """The kernel would run (tests/gpu/shim/kernels.py), on ids that no kernel wrote."""
    return ids.new_empty((*ids.shape, layer.weight.shape[1]), dtype=layer.weight.dtype)


def _choose(self: Any, *_args: Any, **_named: Any) -> None:
    self.best_config = self.configs[0]


def _nothing(*_args: Any, **_named: Any) -> None:
    pass


class Rank(gpu_worker.Worker):  # type: ignore[misc]
    """The argument `worker_cls` of an engine with several ranks. Each rank has a process, and sees
    one GPU. What it gives to a collective, it gets back: no kernel would have added to it."""

    def init_device(self) -> None:
        self.local_rank = 0
        CudaPlatform.dist_backend = "gloo"
        super().init_device()


# vLLM looks for as many GPUs as there are ranks.
CudaPlatform.device_count = classmethod(lambda _: 2)
GroupCoordinator._all_reduce_out_place = lambda _, given: given
GroupCoordinator._all_gather_out_place = lambda self, given, dim: torch.cat(
    [given] * self.world_size, dim
)
JITFunction.run = _nothing
Autotuner.run = _choose
GPUModelRunner.execute_model = _noted_step
GPUModelRunner.sample = _sample
GPUModelRunner.profile_run = _nothing
UnquantizedEmbeddingMethod.embedding = _embed
gpu_worker.Worker.compile_or_warm_up_model = lambda self: gpu_worker.CompilationTimes(
    language_model=0.0, encoder=0.0
)

"""The transfer plan: the byte ranges that each consumer rank reads from each producer rank.

The KV cache has groups of layers (cache/geometry.py). Each group is split over tensor-parallel
ranks by its own heads. A page holds one block of one layer as [heads, tokens, channels], so a range
of heads is one contiguous byte range in each page. Over pipeline stages a group is split by layers:
each stage holds one run of them, which may be empty. A read is therefore a range of heads in a
range of layers.

Ranks are numbered as in vLLM: by stage, then by tensor-parallel rank. The ranks report the number
of layers of their stage, because users can set it (VLLM_PP_LAYER_PARTITION).

A consumer rank reads each head of each of its layers once. If several producer ranks hold the same
head (fewer KV heads than ranks, or MLA, whose one latent is on every rank), a hash of the two
workers' names selects one, so that the replicas share the load of many workers. All transfers of
the two workers use the same rank, because each further one would need a link, with a communicator
or a mapped cache.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kv_transfer.cache.geometry import PagePart
from kv_transfer.errors import KvTransferError, UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.cache.geometry import KvGroup


@dataclass(frozen=True, slots=True)
class GroupRead:
    """Heads and layers of one group to transfer, each as (first in the model's group, number,
    number before them in the consumer's page or cache), as sent to the producer. `part` is the same
    in bytes and in layers of each end."""

    heads: tuple[int, int, int]
    layers: tuple[int, int, int]
    part: PagePart


@dataclass(frozen=True, slots=True)
class Read:
    """The subscription of a consumer rank at one producer rank. `readers` counts the consumer
    ranks that read from this producer rank."""

    producer_rank: int
    groups: tuple[GroupRead, ...]
    readers: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a worker: `tp` in each pipeline stage. `stage_layers`: number of layers of each
    group, by stage."""

    tp: int
    stage_layers: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return self.tp * len(self.stage_layers)


@dataclass(frozen=True, slots=True)
class Shard:
    """KV heads and layers of a group on one rank: tensor-parallel rank `rank` of `tp` in pipeline
    stage `stage`. Raises UnsupportedLayout.

    `num_kv_heads` counts the heads of the model. MLA has one. A state that is split over the ranks
    counts as one head per rank, so only the same number of ranks can read it. `head_bytes` is the
    size of one head in a page: K and V of a block's tokens. `stage_layers` has the number of the
    group's layers on each stage.
    """

    num_kv_heads: int
    head_bytes: int
    group: KvGroup
    stage_layers: tuple[int, ...]
    tp: int = 1
    rank: int = 0
    stage: int = 0

    def __post_init__(self) -> None:
        if self.group.block_size < 1:
            raise UnsupportedLayout(f"block_size is {self.group.block_size}, must be at least 1")
        for name in ("num_kv_heads", "head_bytes", "tp"):
            if getattr(self, name) < 1:
                raise UnsupportedLayout(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_kv_heads % self.tp and self.tp % self.num_kv_heads:
            raise UnsupportedLayout(
                f"{self.num_kv_heads} KV heads cannot be split over {self.tp} ranks"
            )
        if not 0 <= self.rank < self.tp:
            raise UnsupportedLayout(f"rank {self.rank} of {self.tp} ranks")
        if not 0 <= self.stage < len(self.stage_layers):
            raise UnsupportedLayout(f"stage {self.stage} of {len(self.stage_layers)} stages")
        if min(self.stage_layers) < 0 or not any(self.stage_layers):
            raise UnsupportedLayout(f"a group of {self.stage_layers} layers")

    @property
    def heads(self) -> range:
        """Indices of the model's KV heads in each page, split over ranks as vLLM does."""
        first = self.rank * self.num_kv_heads // self.tp
        return range(first, first + max(1, self.num_kv_heads // self.tp))

    @property
    def layers(self) -> range:
        """Indices of the layers held, among the group's layers of the whole model."""
        first = sum(self.stage_layers[: self.stage])
        return range(first, first + self.stage_layers[self.stage])

    @property
    def page_bytes(self) -> int:
        return len(self.heads) * self.head_bytes


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """This rank's part of the KV cache: a shard for each group of the model."""

    shards: tuple[Shard, ...]

    @property
    def own(self) -> Ranks:
        """All ranks of this worker."""
        stages = zip(*(shard.stage_layers for shard in self.shards), strict=True)
        return Ranks(self.shards[0].tp, tuple(stages))

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.shards[0].stage * self.shards[0].tp + self.shards[0].rank

    @property
    def held(self) -> tuple[int, ...]:
        """The groups with layers on this rank."""
        return tuple(n for n, shard in enumerate(self.shards) if shard.layers)

    def whole(self, group: int) -> PagePart:
        """Return the part that covers whole pages of a group, in all layers held."""
        shard = self.shards[group]
        return PagePart(group, 0, 0, shard.page_bytes, 0, 0, len(shard.layers))

    def part_of(self, group: int, heads: Sequence[int], layers: Sequence[int]) -> PagePart:
        """Return the bytes of a subscription's `heads` and `layers` in this producer rank's pages.
        Raises KvTransferError if this rank does not hold them."""
        shard = self.shards[group]
        before_heads = _offset_in(shard.heads, heads, "heads")
        before_layers = _offset_in(shard.layers, layers, "layers")
        size = shard.head_bytes
        return PagePart(
            group,
            before_heads * size,
            heads[2] * size,
            heads[1] * size,
            before_layers,
            layers[2],
            layers[1],
        )

    def ranks_of(self, count: int, stage_layers: tuple[tuple[int, ...], ...]) -> Ranks:
        """Return the `count` ranks of a producer of the same model. Without `stage_layers` they
        form one stage. Raises UnsupportedLayout if its stages do not have the layers of this
        model."""
        layers = tuple(sum(shard.stage_layers) for shard in self.shards)
        stages = stage_layers or (layers,)
        tp, rest = divmod(count, len(stages))
        if rest or not tp:
            raise UnsupportedLayout(f"{count} ranks in {len(stages)} pipeline stages")
        is_whole = all(len(each) == len(layers) and min(each) >= 0 for each in stages)
        if not is_whole or tuple(map(sum, zip(*stages, strict=True))) != layers:
            raise UnsupportedLayout(f"stages of {stages} layers, the model has {layers}")
        return Ranks(tp, stages)

    def reads(self, producer: Ranks, names: tuple[str, str]) -> tuple[Read, ...]:
        """Return the reads of this consumer rank from a producer. `names` are the instance ids of
        both."""
        return _route(self, producer, self._spread(producer, names))[0]

    def declines(self, producer: Ranks, names: tuple[str, str]) -> tuple[int, ...]:
        """Return the producer ranks that no consumer rank reads and that this rank must notify."""
        return _route(self, producer, self._spread(producer, names))[1]

    def notifies(self, producer_ranks: int) -> range:
        """Return the producer ranks that this rank notifies on behalf of all consumer ranks."""
        return range(self.rank, producer_ranks, len(self.own))

    def _spread(self, producer: Ranks, names: tuple[str, str]) -> int:
        """Return the number that selects among producer ranks with the same head."""
        if any(producer.tp > shard.num_kv_heads for shard in self.shards):
            return zlib.crc32("\n".join(names).encode("utf-8", "surrogatepass")) % producer.tp
        return 0


def _offset_in(held: range, wanted: Sequence[int], name: str) -> int:
    """Return the offset of a subscription's range in `held`. `wanted`: (first, number, number
    before them at the consumer). Raises KvTransferError if any is not held."""
    if len(wanted) != 3 or not wanted[1]:
        raise KvTransferError(f"invalid {name} in a subscription: {list(wanted)}")
    first, count, _ = wanted
    if not held.start <= first <= first + count <= held.stop:
        raise KvTransferError(
            f"{name} {first}-{first + count - 1} are not held here"
            f" (this rank holds {held.start}-{held.stop - 1})"
        )
    return first - held.start


def _route(
    plan: CopyPlan, producer: Ranks, spread: int
) -> tuple[tuple[Read, ...], tuple[int, ...]]:
    """Return the results of (`plan.reads`, `plan.declines`)."""
    shards = tuple(replace(shard, rank=0, stage=0) for shard in plan.shards)
    of_ranks = _plan(shards, producer, spread)
    read = {each.producer_rank for reads in of_ranks for each in reads}
    declined = (rank for rank in plan.notifies(len(producer)) if rank not in read)
    return of_ranks[plan.rank], tuple(declined)


@lru_cache(maxsize=64)
def _plan(shards: tuple[Shard, ...], producer: Ranks, spread: int) -> tuple[tuple[Read, ...], ...]:
    """Return the reads of each consumer rank. `spread` selects among producer ranks with the same
    heads."""
    tp, stages = shards[0].tp, len(shards[0].stage_layers)
    found: list[dict[int, list[GroupRead]]] = [{} for _ in range(tp * stages)]
    for index, shard in enumerate(shards):
        layers_of = tuple(layers[index] for layers in producer.stage_layers)
        theirs = replace(shard, tp=producer.tp, stage_layers=layers_of)
        for stage in range(len(layers_of)):
            holders: dict[range, list[int]] = {}
            for rank in range(producer.tp):
                heads = replace(theirs, rank=rank).heads
                holders.setdefault(heads, []).append(stage * producer.tp + rank)
            held_layers = replace(theirs, stage=stage).layers
            for number, reads in enumerate(found):
                own = replace(shard, stage=number // tp, rank=number % tp)
                for held, ranks in holders.items():
                    read = _overlap(index, own, held, held_layers)
                    if read is not None:
                        rank = ranks[(own.rank + spread) % len(ranks)]
                        reads.setdefault(rank, []).append(read)
    readers = Counter(rank for reads in found for rank in reads)
    return tuple(
        tuple(Read(rank, tuple(groups), readers[rank]) for rank, groups in reads.items())
        for reads in found
    )


def _overlap(index: int, own: Shard, heads: range, layers: range) -> GroupRead | None:
    """Return the part of group `index` that a consumer rank reads from a producer rank with these
    heads and layers."""
    both, deep = _common(own.heads, heads), _common(own.layers, layers)
    if not both or not deep:
        return None
    size = own.head_bytes
    before, above = both.start - own.heads.start, deep.start - own.layers.start
    part = PagePart(
        index,
        (both.start - heads.start) * size,
        before * size,
        len(both) * size,
        deep.start - layers.start,
        above,
        len(deep),
    )
    return GroupRead((both.start, len(both), before), (deep.start, len(deep), above), part)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))

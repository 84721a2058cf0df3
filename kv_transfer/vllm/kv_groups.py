"""Groups of layers that share a KV cache, as vLLM describes them. Tested with vLLM 0.32.0 and
0.33.0 (CPU).

vLLM forms the groups for the whole model. With pipeline stages each rank has only the layers of its
stage, and perhaps none of a group. Stages exchange the data that the transfer plan needs, because
vLLM's split of the layers depends on VLLM_PP_LAYER_PARTITION and on the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kv_transfer.cache.geometry import GroupKind, KvGroup
from kv_transfer.errors import UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one stage in one group of the transfer plan. `spec` is vLLM's spec of each
    layer."""

    group: KvGroup
    layers: tuple[str, ...]
    spec: Any


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """Layers of one stage in a group, with properties of the group that only a rank with such
    layers knows. `num_kv_heads`: in the whole model. `head_bytes`: size of a head in a page.
    `fields`: of the compatibility key. `needs_equal_tp`: its KV cannot be split by heads."""

    of: LayerGroup
    num_kv_heads: int
    head_bytes: int
    fields: Mapping[str, str]
    needs_equal_tp: bool


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """A group of the transfer plan: the layers of all stages. `first`: from the first stage with
    layers of the group."""

    first: HeldGroup
    stages: tuple[tuple[str, ...], ...]

    @property
    def stage_layers(self) -> tuple[int, ...]:
        return tuple(map(len, self.stages))


def _kind_of(spec: Any) -> tuple[GroupKind, int]:
    """Return the kind and reach of vLLM's spec. Raises UnsupportedLayout naming the spec."""
    refusal = ""
    if isinstance(spec, MambaSpec):
        if not spec.num_speculative_blocks:
            return GroupKind.STATE, 0
        refusal = " with speculative decoding"
    elif type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        if not spec.prefix_replay_tokens:
            return GroupKind.WINDOW, spec.sliding_window - 1 + spec.extra_retained_tokens
        refusal = " with bounded replay"
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.CHUNK, spec.attention_chunk_size
    elif type(spec) in (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec):
        return GroupKind.FULL, 0
    raise UnsupportedLayout(f"KV of {type(spec).__name__}{refusal} cannot be handed over")


def _group_of(table: int, spec: Any) -> KvGroup:
    return KvGroup(table, spec.block_size, *_kind_of(spec))


def tables_of(config: KVCacheConfig) -> list[KvGroup]:
    """Return a group for each block table of vLLM's scheduler whose KV moves. Layers of one table
    may differ in page layout, but all need the same blocks. Raises UnsupportedLayout."""
    found = []
    for table in config.transfer_group_ids:
        spec = config.kv_cache_groups[table].kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        found.append(_group_of(table, spec))
    return found


def groups_of(config: KVCacheConfig) -> list[LayerGroup]:
    """Return vLLM's groups with layers on this stage, split further if layers differ in page
    layout. Raises UnsupportedLayout."""
    groups = []
    for table in config.transfer_group_ids:
        found = config.kv_cache_groups[table]
        by_spec: dict[Any, list[str]] = {}
        for name in found.layer_names:
            spec = found.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            by_spec.setdefault(spec, []).append(name)
        for spec, names in by_spec.items():
            groups.append(LayerGroup(_group_of(table, spec), tuple(names), spec))
    if not groups:
        raise UnsupportedLayout("the layers here have no KV cache")
    return groups


def of_all_stages(held: Sequence[HeldGroup]) -> list[list[HeldGroup]]:
    """Return the groups of each stage, in order. All stages call this together."""
    pipeline = get_pp_group()
    if pipeline.world_size == 1:
        return [list(held)]
    found: list[Any] = [None] * pipeline.world_size
    torch.distributed.all_gather_object(found, list(held), group=pipeline.cpu_group)
    return found


def joined(stages: Sequence[Sequence[HeldGroup]]) -> list[ModelGroup]:
    """Merge the stages' groups into the groups of the transfer plan; groups whose blocks can be
    sent during prefill are first. The result is the same on all ranks, and for any number of
    stages. Raises UnsupportedLayout if two stages describe a group in different ways."""
    found: dict[tuple[KvGroup, Any], list[tuple[str, ...]]] = {}
    first: dict[tuple[KvGroup, Any], HeldGroup] = {}
    for stage, groups in enumerate(stages):
        for held in groups:
            key = held.of.group, held.of.spec
            layers = found.setdefault(key, [() for _ in stages])
            layers[stage] = held.of.layers
            known = first.setdefault(key, held)
            if known.fields != held.fields:
                raise UnsupportedLayout(
                    f"stage {stage} of the pipeline has a group of {dict(held.fields)}, "
                    f"another one of {dict(known.fields)}"
                )
    # By table, because a stage may be the first with layers of an early table.
    order = sorted(found, key=lambda key: (not key[0].is_streamed, key[0].table))
    return [ModelGroup(first[key], tuple(found[key])) for key in order]

"""Expert layers on a CPU, in the processes that run the model. Tested with vLLM 0.32.0
(vllm/distributed/device_communicators/cpu_communicator.py,
vllm/model_executor/layers/fused_moe/experts/cpu_moe.py)."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Sequence


class _ExpertLoad:
    tokens = 0


_LOAD = _ExpertLoad()


def expert_tokens() -> int:
    """Return how often an expert of this process has computed a token, in all layers, since the
    start. 0 without `mend_experts`, or if the model runs in other processes."""
    return _LOAD.tokens


def mend_experts(_worker: Any) -> None:
    """Let ranks share expert layers, and count what `expert_tokens` returns. Idempotent.

    vLLM's CPU communicator lacks the two operations that send tokens to the ranks of their experts
    and back. The CPU kernel interprets global expert ids as local ones, and reads beyond its
    weights.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for name, operation in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if name not in vars(CpuCommunicator):
            setattr(CpuCommunicator, name, operation)
    apply = CPUUnquantizedExperts.apply
    if hasattr(apply, "__wrapped__"):
        return
    signature = inspect.signature(apply)

    @wraps(apply)
    def mended(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        own_of = given.arguments["expert_map"]  # by global id; -1: not on this rank
        if own_of is not None:
            ids, weights = given.arguments["topk_ids"], given.arguments["topk_weights"]
            own = own_of[ids.long()]
            _LOAD.tokens += int((own >= 0).sum())
            given.arguments["topk_ids"] = own.clamp(min=0).to(ids.dtype)
            given.arguments["topk_weights"] = weights.masked_fill(own < 0, 0.0)
        apply(*given.args, **given.kwargs)
        if own_of is not None and given.arguments["apply_router_weight_on_input"]:
            # One expert a token, whose weight is in the input, so the kernel uses no weights.
            given.arguments["output"].masked_fill_(own < 0, 0.0)

    CPUUnquantizedExperts.apply = mended


def _all_gatherv(
    self: Any,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Return the rows of all ranks. `sizes`: rows by rank."""
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]  # type: ignore[misc]
    assert dim == 0
    parts = [
        input_.new_empty((size, *input_.shape[1:]))
        for size in sizes or [len(input_)] * self.world_size
    ]
    parts[self.rank_in_group].copy_(input_)
    for rank, part in zip(self.ranks, parts, strict=True):
        distributed.broadcast(part, src=rank, group=self.device_group)
    return torch.cat(parts)


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    assert dim == 0
    counts = list(sizes or [len(input_) // self.world_size] * self.world_size)
    total = input_.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=self.device_group)
    start = sum(counts[: self.rank_in_group])
    return total[start : start + counts[self.rank_in_group]]

"""Experts on a CPU, of which a rank has a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from workers.vllm.patches.experts import expert_tokens, mend_experts

if TYPE_CHECKING:
    import pytest

# Of four experts, this rank has the last two.
MAP = torch.tensor([-1, -1, 0, 1])
IDS = torch.tensor([[3, 0], [1, 2], [0, 1]], dtype=torch.int32)


def test_a_rank_computes_with_its_own_experts_and_counts_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def apply(
        self: Any,
        output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        output.fill_(1.0)
        seen.update(ids=topk_ids.tolist(), weights=topk_weights.tolist())

    monkeypatch.setattr(CPUUnquantizedExperts, "apply", apply)
    for name in ("all_gatherv", "reduce_scatterv"):
        monkeypatch.setattr(CpuCommunicator, name, None, raising=False)
    mend_experts(None)
    mend_experts(None)
    mended: Any = CPUUnquantizedExperts.apply
    before, weights, output = expert_tokens(), torch.full((3, 2), 0.5), torch.zeros(3, 4)
    mended(None, output, weights, IDS, MAP, False)
    assert seen["ids"] == [[1, 0], [0, 0], [0, 0]]
    assert seen["weights"] == [[0.5, 0.0], [0.0, 0.5], [0.0, 0.0]]
    assert expert_tokens() - before == 2
    # The weight of a token's only expert may be in the input already.
    mended(None, output, weights[:, :1], IDS[:, :1], MAP, True)
    assert output.sum(1).tolist() == [4.0, 0.0, 0.0]
    mended(None, output, weights, IDS, None, False)
    assert seen["ids"] == IDS.tolist()
    assert expert_tokens() - before == 3

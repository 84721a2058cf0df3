"""Rotary embeddings of MLA layers on a CPU."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from workers.vllm.patches.rotary import mend_rotary

_HEAD, _NOPE, _RANK = 64, 32, 512


@pytest.mark.parametrize("is_neox", [False, True])
def test_views_of_an_mla_layer_are_rotated_by_their_own_positions(
    monkeypatch: pytest.MonkeyPatch, is_neox: bool
) -> None:
    monkeypatch.setattr(_custom_ops, "rotary_embedding", _custom_ops.rotary_embedding)
    mend_rotary(None)
    mend_rotary(None)
    positions = torch.tensor([0, 1, 2, 0, 1, 7])
    query = torch.randn(len(positions), 4, _NOPE + _HEAD)
    key = torch.randn(len(positions), _RANK + _HEAD)
    frequencies = 10_000 ** (-torch.arange(0, _HEAD, 2) / _HEAD)
    angles = torch.outer(torch.arange(8.0), frequencies)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    views = query[..., _NOPE:], key[:, _RANK:].unsqueeze(1)
    expected = RotaryEmbedding.forward_static(
        positions, *(x.clone() for x in views), _HEAD, _HEAD, cache, is_neox
    )
    before = query[..., :_NOPE].clone(), key[:, :_RANK].clone()
    _custom_ops.rotary_embedding(positions, *views, _HEAD, cache, is_neox)
    for found, right in zip(views, expected, strict=True):
        assert right is not None
        torch.testing.assert_close(found, right)
    assert torch.equal(query[..., :_NOPE], before[0])
    assert torch.equal(key[:, :_RANK], before[1])

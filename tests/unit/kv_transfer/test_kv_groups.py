"""KV-cache groups as vLLM describes them: what is planned, what is refused, what is reserved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kv_transfer.cache.geometry import GroupKind, KvGroup
from kv_transfer.errors import UnsupportedLayout
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.vllm.continuation import patch_runner_v1
from kv_transfer.vllm.kv_layout import (
    LayerGroup,
    check_model,
    describe,
    groups_of,
    weights_digest,
)
from kv_transfer.vllm.scheduler_half import SchedulerHalf
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
STATE = {"shapes": ((4, 8),), "dtypes": (torch.float32,)}


def config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s, layer_names=[f"{n}"]) for n, s in enumerate(specs)]
    return SimpleNamespace(transfer_group_ids=range(len(specs)), kv_cache_groups=groups)


def test_groups_are_planned_with_those_first_that_stream() -> None:
    window = SlidingWindowSpec(block_size=32, sliding_window=72, **SHAPE)
    state = MambaSpec(block_size=2048, **STATE)  # type: ignore[arg-type]
    found = groups_of(config(window, state, FullAttentionSpec(block_size=32, **SHAPE)))
    assert [(each.group, each.layers) for each in found] == [
        (KvGroup(2, 32), ("2",)),
        (KvGroup(0, 32, GroupKind.WINDOW, 71), ("0",)),
        (KvGroup(1, 2048, GroupKind.STATE), ("1",)),
    ]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (CrossAttentionSpec(block_size=32, **SHAPE), "CrossAttentionSpec"),
        (MambaSpec(32, **STATE, num_speculative_blocks=2), "MambaSpec with speculative decoding"),  # type: ignore[arg-type]
    ],
)
def test_a_cache_that_cannot_be_transferred_is_refused_by_name(spec: Any, name: str) -> None:
    with pytest.raises(UnsupportedLayout, match=f"KV of {name} cannot be handed over"):
        groups_of(config(spec))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"is_encoder_decoder": True},
            "encoder-decoder .* serve org/name aggregated",
        ),
        ({"hf_text_config": SimpleNamespace(model_type="glm5_next_text")}, "type glm5_next"),
        ({"has_inner_state": True}, "state-space layers and speculative decoding"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2"),
    ],
)
def test_models_are_refused_by_their_config(change: dict[str, Any], match: str) -> None:
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        **change.pop("parallel", {}),
    }
    model = {
        "model": "org/name",
        "is_encoder_decoder": False,
        "has_inner_state": False,
        "hf_config": SimpleNamespace(),
        "hf_text_config": SimpleNamespace(model_type="llama"),
    }
    made: Any = SimpleNamespace(
        model_config=SimpleNamespace(**model | change),
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=object(),
    )
    with pytest.raises(ConfigError, match=match):
        check_model(made)


@pytest.mark.parametrize(("tokens", "matched"), [(103, 103), (104, 0)])
def test_vllms_own_names_load_nothing_where_the_last_token_needs_a_block_more(
    tokens: int, matched: int
) -> None:
    """Of 104 tokens, the next one's window begins at token 33, the last one's at 32, which is in
    another block for the window of 73."""
    half = SchedulerHalf([KvGroup(0, 32), KvGroup(1, 32, GroupKind.WINDOW, 72)], "decode")
    consumer = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "producer_addresses": ["127.0.0.1:1"],
        "producer_instance_id": "p",
    }
    request: Any = SimpleNamespace(
        request_id="r",
        kv_transfer_params=consumer,
        num_tokens=tokens,
        prompt_token_ids=[1],
        structured_output_request=None,
    )
    half.on_new_request(request)
    assert half.matched_tokens(request, 0)[0] == matched


def test_equal_weights_have_one_digest_and_trained_ones_another(tmp_path: Path) -> None:
    digests = []
    for name, value in (("here", 1), ("there", 1), ("tuned", 2)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes([value]) * 300_000)
        (directory / "config.json").write_text(name)
        digests.append(weights_digest(str(directory)))
    here, there, tuned = digests
    assert here == there != tuned
    (tmp_path / "here" / "model.safetensors").write_bytes(b"\1" * 300_001)
    assert weights_digest(str(tmp_path / "here")) not in digests
    assert weights_digest("org/name") == ""


def test_two_names_of_one_cache_format_are_compatible() -> None:
    """A state's fields need no attention backend."""
    state: Any = MambaSpec(32, **STATE)  # type: ignore[arg-type]
    group = LayerGroup(KvGroup(0, 32, GroupKind.STATE), ("0",), state)
    plan = CopyPlan((Shard(1, 128, group.group),))
    text = SimpleNamespace(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = SimpleNamespace(
        model="org/name", revision=None, hf_text_config=text, get_vocab_size=lambda: 8
    )

    def keys(cache_dtype: str) -> dict[str, str]:
        config: Any = SimpleNamespace(
            model_config=model,
            speculative_config=None,
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        cache = torch.zeros(2, 1, 1, 128, dtype=torch.uint8)
        return describe(config, [group], {"0": cache}, plan)

    assert keys("fp8") == keys("fp8_e4m3") != keys("fp8_e5m2")


@pytest.mark.parametrize(("tokens", "warns"), [([7], True), ([], False)])
def test_a_seeded_continuation_on_runner_v1_of_a_gpu_says_what_it_is_not(
    tokens: list[int],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner: Any = SimpleNamespace(CachedRequestState=dict)
    monkeypatch.setattr("vllm.v1.worker.gpu_model_runner", runner, raising=False)
    patch_runner_v1({"r": tokens})
    generator = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    made = runner.CachedRequestState(req_id="r", generator=generator)
    assert made.get("output_token_ids", []) == tokens
    assert ("may differ from those of one engine" in caplog.text) == warns

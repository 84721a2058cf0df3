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
from kv_transfer.vllm.continuation import patch_runner_v1
from kv_transfer.vllm.kv_groups import HeldGroup, LayerGroup, groups_of, joined, tables_of
from kv_transfer.vllm.kv_layout import check_model, describe, held_of, weights_digest
from kv_transfer.vllm.scheduler_half import SchedulerHalf
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
STATE = {"shapes": ((4, 8),), "dtypes": (torch.float32,)}
MODEL = SimpleNamespace(
    model="org/name",
    revision=None,
    hf_text_config=SimpleNamespace(hidden_size=8, num_hidden_layers=1, num_attention_heads=1),
    get_vocab_size=lambda: 8,
)


def config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s, layer_names=[f"{n}"]) for n, s in enumerate(specs)]
    return SimpleNamespace(transfer_group_ids=range(len(specs)), kv_cache_groups=groups)


WINDOW: Any = SlidingWindowSpec(block_size=32, sliding_window=72, **SHAPE)
FULL: Any = FullAttentionSpec(block_size=32, **SHAPE)


def held(*layers: str, table: int = 0, spec: Any = FULL, **fields: str) -> HeldGroup:
    of_table: Any = SimpleNamespace(
        transfer_group_ids=[table], kv_cache_groups={table: SimpleNamespace(kv_cache_spec=spec)}
    )
    [group] = tables_of(of_table)
    return HeldGroup(LayerGroup(group, layers, spec), 2, 64, fields, needs_equal_tp=False)


def test_groups_are_planned_with_those_first_that_stream() -> None:
    state = MambaSpec(block_size=2048, **STATE)  # type: ignore[arg-type]
    found = groups_of(config(WINDOW, state, FULL))
    planned = joined([[HeldGroup(each, 2, 64, {}, needs_equal_tp=False) for each in found]])
    assert [(each.first.of.group, each.stages) for each in planned] == [
        (KvGroup(2, 32), (("2",),)),
        (KvGroup(0, 32, GroupKind.WINDOW, 71), (("0",),)),
        (KvGroup(1, 2048, GroupKind.STATE), (("1",),)),
    ]


def test_stages_of_a_pipeline_have_the_groups_of_the_whole_model() -> None:
    """The second stage has no layer of the first group, and is alone with the other page layout of
    the last one."""
    wide: Any = FullAttentionSpec(block_size=32, **{**SHAPE, "head_size": 128})
    stages = [
        [held("0", "1"), held("2", table=2)],
        [held("3", table=1, spec=WINDOW), held("4", table=2), held("5", table=2, spec=wide)],
    ]
    found = joined(stages)
    assert [each.stages for each in found] == [
        (("0", "1"), ()),
        (("2",), ("4",)),
        ((), ("5",)),
        ((), ("3",)),
    ]
    assert [each.stage_layers for each in found] == [(2, 0), (1, 1), (0, 1), (0, 1)]
    # One stage has all of them, in the same order.
    whole = [held("0", "1"), held("3", table=1, spec=WINDOW), held("2", "4", table=2)]
    one = joined([[*whole, held("5", table=2, spec=wide)]])
    assert [sum(each.stages, ()) for each in one] == [sum(each.stages, ()) for each in found]


def test_stages_that_describe_a_group_differently_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="stage 1 of the pipeline"):
        joined([[held("0", packing="vec")], [held("1", packing="amx")]])


def test_layers_in_another_order_are_another_layout() -> None:
    def key(*stages: tuple[str, ...]) -> str:
        model: Any = SimpleNamespace(model_config=MODEL, speculative_config=None)
        return describe(model, joined([[held(*layers)] for layers in stages]))["layers"]

    assert key(("a", "b", "c")) == key(("a",), ("b", "c")) == key(("a", "b"), ("c",))
    assert key(("a", "b", "c")) != key(("b", "a"), ("c",))


RULES = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings")
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("ours", "theirs", "differing"),
    [
        ({}, {}, set()),
        ({"rope_theta": 1e4}, {"rope_theta": 1e6}, {"config rope_parameters"}),
        ({"rope_type": "default"}, YARN, {"config rope_parameters"}),
        ({"sliding_window": 4096}, {"sliding_window": None}, {"config sliding_window"}),
        (
            {"layer_types": ["full"] * 9},
            {"layer_types": ["full"] * 8 + ["x"]},
            {"config layer_types"},
        ),
        ({"max_model_len": 4096}, {"max_model_len": 16384}, set()),
        ({**LONG, "max_model_len": 4096}, {**LONG, "max_model_len": 16384}, {"long factors"}),
    ],
)
def test_other_positions_are_another_layout_and_are_named(
    ours: dict[str, Any], theirs: dict[str, Any], differing: set[str]
) -> None:
    """Equal shapes and weights, but keys that are rotated elsewhere, or other layers that see all
    tokens."""

    def layout(given: dict[str, Any], draft: bool = False) -> dict[str, str]:
        rope = {name: value for name, value in given.items() if name in RULES}
        rest = {name: value for name, value in given.items() if name not in rope}
        limit = rest.pop("max_model_len", 4096)
        text = SimpleNamespace(**vars(MODEL.hf_text_config), rope_parameters=rope, **rest)
        changed = SimpleNamespace(**{**vars(MODEL), "hf_text_config": text, "max_model_len": limit})
        drafts = SimpleNamespace(method="mtp", draft_model_config=changed) if draft else None
        main = MODEL if draft else changed
        made: Any = SimpleNamespace(model_config=main, speculative_config=drafts)
        return describe(made, joined([[held("a")]]))

    one, other = layout(ours), layout(theirs)
    assert {x for x in {**one, **other} if one.get(x) != other.get(x)} == differing
    assert (layout(ours, True) == layout(theirs, True)) == (not differing)


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
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size is 2"),
    ],
)
def test_models_are_refused_by_their_config(change: dict[str, Any], match: str) -> None:
    parallel = {
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

    def keys(cache_dtype: str) -> dict[str, str]:
        config: Any = SimpleNamespace(
            model_config=MODEL,
            speculative_config=None,
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        cache = torch.zeros(2, 1, 1, 128, dtype=torch.uint8)
        region: Any = SimpleNamespace(geometry=SimpleNamespace(page_bytes=128))
        return describe(config, joined([[held_of(config, group, {"0": cache}, region)]]))

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

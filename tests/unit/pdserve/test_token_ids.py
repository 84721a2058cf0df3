"""Packed token ids behave as a tuple of them, and are sent as protobuf would send them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from pdserve import wire
from pdserve.model import prefix_hash
from pdserve.model.token_ids import TokenIds
from pdserve.net import framing
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Sequence

IDS = st.lists(st.integers(0, (1 << 32) - 1) | st.integers(0, 300), max_size=40)


@given(IDS, IDS)
def test_they_are_equal_to_a_tuple_and_have_its_parts(first: list[int], second: list[int]) -> None:
    made, wanted = TokenIds.joined(map(TokenIds.of, (first, second))), (*first, *second)
    assert made == TokenIds.of(made) == TokenIds.of(wanted)
    assert made == wanted
    assert wanted == made
    assert hash(made) == hash(wanted)
    assert made != (*wanted, 1)
    assert (len(made), tuple(made), made.largest) == (len(wanted), wanted, max((-1, *wanted)))
    assert made[1:3] == wanted[1:3]
    assert not wanted or made[-1] == wanted[-1]
    assert prefix_hash.chain(made, 3, 5) == prefix_hash.chain(wanted, 3, 5)


def test_a_command_and_its_prompt_are_one_message() -> None:
    sampling = wire.sampling_to_pb(SamplingParams(max_tokens=2))

    def made() -> w.Command:
        phase = w.PrefillPhase(transfer_id="a")
        return w.Command(submit=w.Submit(stream_id=7, sampling=sampling, prefill=phase))

    def received(ids: Sequence[int]) -> w.Command:
        command = made()
        prompt = wire.set_prompt(command.submit, ids)
        (found,) = framing.FrameParser(w.Command).feed(framing.pack(command, prompt))
        return found

    prompts: list[Sequence[int]] = [(), (1, 127, 128, 16383, 16384), range(0, 1 << 21, 77)]
    for ids in prompts:
        wanted = made()
        wanted.submit.prompt_token_ids.extend(ids)
        assert received(ids) == wanted
        assert received(TokenIds.of(ids)) == wanted

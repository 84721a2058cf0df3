"""The streams of an attempt, as values: one function for each kind of attempt. `Attempt` runs the
streams, and `Handoff` orders the events of PREFILL and DECODE."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from pdserve import wire
from pdserve.types import Role, StaleKv
from pdserve.v1 import worker_pb2 as w
from router.attempt.handoff import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from pdserve.types import GenerateRequest, MediaItem, WorkerInfo
    from router.attempt.placer import Charge, Reservation
    from router.attempt.streams import Moved, WorkerStream
    from router.fleet.health import Pair

    Build = Callable[["SubmitInputs"], w.Command]
    SpecsOf = Callable[[GenerateRequest, Reservation, Moved | None], list["StreamSpec"]]


class SubmitInputs(Struct, frozen=True):
    """Inputs that are known when a stream is sent. `tokens`: it continues after them. `media`: of
    the prompt, with the data of images. `sent`: the sides sent before."""

    tokens: Sequence[int]
    media: Sequence[MediaItem]
    sent: Container[Side]


class StreamSpec(Struct, frozen=True, eq=False):
    """A stream on the worker of `charge`.

    `pair`: ids of the workers that exchange KV for it. `build`: returns its submit command, without
    the prompt; call it once. `is_optional`: the attempt continues without it. `producer`: the
    exported stream whose KV it fetches.
    """

    side: Side
    charge: Charge
    pair: Pair | None
    build: Build
    is_optional: bool = False
    producer: WorkerStream | None = None


# -- Kinds of attempts. Each function returns the streams in the order to send them.


def generation(
    request: GenerateRequest, held: Reservation, moved: Moved | None = None
) -> list[StreamSpec]:
    """Return the streams of an answer. `moved`: the end of the previous attempt, if it left its
    worker."""
    if moved is not None and moved.producer is not None:
        return live(request, held, moved.producer, moved.transfer_id)
    return aggregated(request, held) if held.prefill is None else pair(request, held)


def aggregated(request: GenerateRequest, held: Reservation) -> list[StreamSpec]:
    """Let one worker compute the prompt and decode."""
    command = w.Command()
    command.submit.aggregated.SetInParent()
    _set_next_turn(command.submit, request)
    return [StreamSpec(Side.DECODE, held.decode_charge, None, partial(_build, request, command))]


def audit(request: GenerateRequest, held: Reservation, scored_from: int) -> list[StreamSpec]:
    """Let one worker compute a prompt, for its logprobs from token `scored_from` on."""
    command = w.Command()
    command.submit.aggregated.SetInParent()
    command.submit.scored_from = scored_from
    return [StreamSpec(Side.DECODE, held.decode_charge, None, partial(_build, request, command))]


def pooling(
    request: GenerateRequest, held: Reservation, _: Moved | None = None
) -> list[StreamSpec]:
    """Let one worker compute an embedding."""
    command, phase = w.Command(), w.PoolingPhase(second_text_at=request.second_text_at)
    command.submit.pooling.CopyFrom(phase)
    return [StreamSpec(Side.DECODE, held.decode_charge, None, partial(_build, request, command))]


def encode_probe(request: GenerateRequest, held: Reservation) -> list[StreamSpec]:
    """Probe an encode worker with a request without images."""
    command = w.Command()
    command.submit.encode.transfer_id = secrets.token_hex(16)
    return [StreamSpec(Side.DECODE, held.decode_charge, None, partial(_build, request, command))]


def pair(
    request: GenerateRequest, held: Reservation, *, min_cached_tokens: int = 0
) -> list[StreamSpec]:
    """Let one worker compute the prompt and another decode with its KV. A third one may compute the
    embeddings of images. Prefill fails if fewer than `min_cached_tokens` of the prompt are
    cached."""
    charge, pair, command = held.prefill_charge, held.pair, w.Command()
    assert charge is not None, "a pair has a prefill worker"
    info, specs, prefill = charge.member.info, [], command.submit.prefill
    prefill.transfer_id = transfer_id = secrets.token_hex(16)
    prefill.min_cached_tokens = min_cached_tokens
    encoder = held.encode_charge
    if encoder is not None and (kv := encoder.member.info.kv) is not None:
        source = prefill.embeddings
        source.transfer_id, source.row_bytes = secrets.token_hex(16), kv.embedding_bytes
        source.address, source.instance_id = kv.addresses[0], encoder.member.info.instance_id
        encode = partial(_build_encode, request, source.transfer_id)
        specs.append(StreamSpec(Side.ENCODE, encoder, None, encode, is_optional=True))
    build: Build = partial(_build_prefill, request, command)
    specs.append(StreamSpec(Side.PREFILL, charge, pair, build))
    build = _decode(request, info, transfer_id)
    return [StreamSpec(Side.DECODE, held.decode_charge, pair, build), *specs]


def live(
    request: GenerateRequest, held: Reservation, producer: WorkerStream, transfer_id: str
) -> list[StreamSpec]:
    """Let one worker decode with the KV of a stream that the previous attempt exported."""
    build = _decode(request, producer.member.info, transfer_id, is_live=True)
    return [StreamSpec(Side.DECODE, held.decode_charge, held.pair, build, producer=producer)]


def probe(request: GenerateRequest, held: Reservation) -> list[StreamSpec]:
    """Check the health of one worker or of a pair. Draining workers accept it too."""
    alone = {Role.POOLING: pooling, Role.ENCODE: encode_probe}
    specs = alone.get(held.decode.info.role, generation)(request, held)
    return [structs.replace(x, build=partial(_build_probe, x.build)) for x in specs]


# -- Commands to workers


def _build(request: GenerateRequest, command: w.Command, inputs: SubmitInputs) -> w.Command:
    """Complete a command that already has the phase."""
    complete(command.submit, request, inputs)
    return command


def complete(submit: w.Submit, request: GenerateRequest, inputs: SubmitInputs) -> None:
    """Set all fields but the prompt and the phase."""
    submit.request_id = request.request_id
    if inputs.tokens:
        submit.resume_token_ids.extend(inputs.tokens)
    submit.traceparent = request.traceparent
    submit.adapter = request.adapter_key
    submit.cache_salt = request.cache_salt
    submit.keeps_kv = request.stale_kv is StaleKv.ALLOW
    if (gate := request.reasoning_gate) is not None:
        submit.reasoning_gate.parser = gate.parser
        submit.reasoning_gate.kwargs_json = gate.kwargs_json
    submit.sampling.CopyFrom(wire.sampling_to_pb(request.sampling))
    if inputs.media:
        submit.media.extend(map(wire.media_to_pb, inputs.media))


def _build_prefill(request: GenerateRequest, command: w.Command, inputs: SubmitInputs) -> w.Command:
    if Side.ENCODE not in inputs.sent:
        command.submit.prefill.ClearField("embeddings")  # prefill encodes
    return _build(request, command, inputs)


def _build_encode(request: GenerateRequest, transfer_id: str, inputs: SubmitInputs) -> w.Command:
    command = w.Command()
    submit = command.submit
    submit.request_id, submit.traceparent = request.request_id, request.traceparent
    submit.sampling.max_tokens, submit.encode.transfer_id = 1, transfer_id
    submit.media.extend(map(wire.media_to_pb, inputs.media))
    return command


def _decode(
    request: GenerateRequest, producer: WorkerInfo, transfer_id: str, *, is_live: bool = False
) -> Build:
    """Return the builder of a stream that fetches KV from `producer`. A live producer has decoded
    all tokens. Otherwise it is prefill."""
    assert producer.kv is not None, "workers without KV are not paired"
    command = w.Command()
    decode = command.submit.decode
    decode.transfer_id, decode.live = transfer_id, is_live
    decode.producer_addresses.extend(producer.kv.addresses)
    decode.producer_stage_layers.extend(wire.stages_to_pb(producer.kv.stage_layers))
    decode.producer_instance_id = producer.instance_id
    _set_next_turn(command.submit, request)
    return partial(_build_decode, request, command)


def _build_decode(request: GenerateRequest, command: w.Command, inputs: SubmitInputs) -> w.Command:
    # Its KV replaces the data of images.
    return _build(request, command, structs.replace(inputs, media=request.media))


def _build_probe(build: Build, inputs: SubmitInputs) -> w.Command:
    command = build(inputs)
    command.submit.probe = True
    return command


def _set_next_turn(submit: w.Submit, request: GenerateRequest) -> None:
    if request.session:
        submit.next_turn_s = request.next_turn_s

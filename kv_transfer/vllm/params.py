"""`kv_transfer_params`: a request's role in a transfer, for the connector.

There are two forms. With a router that joins the token streams of both sides, as ours does, the
first token is handed over:

    prefill: {"role": "producer", "transfer_id": str}
            to copy cached KV only: {"min_cached_tokens": int}, with fewer the request fails
    decode:  {"role": "consumer", "transfer_id": str, "producer_addresses": ["host:port", ...],
              "producer_instance_id": str}
            with several pipeline stages: {"producer_stage_layers": [[layers of a group, ...], ...]}
    either, or neither role: {"resume": [token, ...]}, the tokens generated elsewhere already
    decode, with `resume`:   {"live": true}, if the producer has decoded those tokens

`producer_addresses` has one entry per rank of the producer, in rank order: stage after stage of a
pipeline, in each its tensor-parallel ranks. `producer_stage_layers`: by stage, the number of layers
of each KV-cache group.

Proxies in front of `vllm serve` use vLLM's own names (docs/kv_transfer.md). Decode then samples the
first token again, so that its answer is complete and prefill's can be dropped:

    prefill: {"do_remote_decode": true}, with a "transfer_id" if the proxy generates it
    decode:  {"do_remote_prefill": true, "transfer_id": str, "producer_addresses": [...],
              "producer_instance_id": str, "prompt_digest": str}, and perhaps
              "producer_stage_layers", copied from prefill's answer

A key with the value null counts as absent.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ProducerParams:
    """Send the request's KV to the worker that presents `transfer_id`. With `resample` the consumer
    samples the first token again; the connector then generates a missing id. With fewer than
    `min_cached_tokens` of the prompt cached, the request fails before it computes anything."""

    transfer_id: str
    resample: bool = False
    min_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerParams:
    """Receive the request's KV, and without `resample` its first token, from the producer's ranks.

    `prompt_digest`, if given, must match this request's prompt. With `live` the producer has
    decoded all resumed tokens: it sends KV for all tokens but the last, and no token.
    """

    transfer_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str
    resample: bool = False
    prompt_digest: str = ""
    live: bool = False
    producer_stage_layers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The parsed parameters of one request. `part` is None if no KV is transferred. `no_tiers`: the
    KV must not be stored in tiers (tiers.py)."""

    part: ProducerParams | ConsumerParams | None = None
    resume: tuple[int, ...] = ()
    no_tiers: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the dictionary for `SamplingParams.extra_args["kv_transfer_params"]`."""
        out: dict[str, Any] = {"resume": list(self.resume), "no_tiers": self.no_tiers}
        match self.part:
            case ProducerParams(transfer_id, resample, cached):
                out |= {"do_remote_decode": True} if resample else {"role": "producer"}
                out |= {"transfer_id": transfer_id, "min_cached_tokens": cached}
            case ConsumerParams() as part:
                out |= {"do_remote_prefill": True} if part.resample else {"role": "consumer"}
                out |= {
                    "transfer_id": part.transfer_id,
                    "producer_addresses": list(part.producer_addresses),
                    "producer_instance_id": part.producer_instance_id,
                    "prompt_digest": part.prompt_digest,
                    "live": part.live,
                    "producer_stage_layers": [list(each) for each in part.producer_stage_layers],
                }
        return {key: value for key, value in out.items() if value}


def prompt_digest_of(prompt_token_ids: Sequence[int]) -> str:
    """Return 128 bits of BLAKE2b of the token ids, in hexadecimal."""
    return blake2b(array("I", prompt_token_ids).tobytes(), digest_size=16).hexdigest()


_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Address = Annotated[str, Meta(pattern=r"^.+:[0-9]{1,5}$", max_length=256)]
_Addresses = Annotated[list[_Address], Meta(min_length=1, max_length=1024)]
_Token = Annotated[int, Meta(ge=0)]
_Layers = Annotated[list[Annotated[int, Meta(ge=0, le=65535)]], Meta(min_length=1, max_length=1024)]
_StageLayers = Annotated[list[_Layers], Meta(max_length=1024)]


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """The union of the keys of all forms."""

    role: Literal["producer", "consumer"] | None = None
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: _Name | None = None
    producer_addresses: _Addresses | None = None
    producer_instance_id: _Name | None = None
    prompt_digest: _Name | None = None
    live: bool | None = None
    min_cached_tokens: _Token | None = None
    producer_stage_layers: _StageLayers | None = None
    resume: list[_Token] | None = None
    no_tiers: bool | None = None
    # Ignored. vLLM's scheduler adds it to a prefill answer, for the usage that its server reports.
    remote_prefill_cached_tokens: Any = None


_SWITCHES = {"do_remote_decode", "do_remote_prefill", "remote_prefill_cached_tokens"}
_CONSUMER = {"transfer_id", "producer_addresses", "producer_instance_id"}
_ANY = {"resume", "no_tiers"}  # without vLLM's names
_MAY = {"prompt_digest", "producer_stage_layers"}  # of a consumer


def parse(params: Mapping[str, Any] | None) -> TransferParams:
    """Parse `kv_transfer_params`. Raises InvalidRequest that names the key."""
    if params is None:
        return TransferParams()
    if not isinstance(params, dict):
        raise InvalidRequest("kv_transfer_params must be an object", field="kv_transfer_params")
    try:
        # Drop nulls: proxies also send null for keys of vLLM's own connectors.
        given = msgspec.convert({k: v for k, v in params.items() if v is not None}, _Written)
    except msgspec.ValidationError as error:
        # Texts: "Expected `str`, got `int` - at `$.transfer_id`", "... unknown field `x`"
        found = re.search(r"at `(?:key in )?\$\.(\w+)|field `(\w+)`", str(error))
        raise _refuse(found[1] or found[2] if found else "", str(error)) from None
    if given.do_remote_decode is not None or given.do_remote_prefill is not None:
        return _in_vllm_names(given)
    more = tuple(given.resume or ()), bool(given.no_tiers)
    match given.role:
        case None:
            _check(given, set(), _ANY)
            return TransferParams(None, *more)
        case "producer":
            _check(given, {"transfer_id"}, {"role", "min_cached_tokens", *_ANY})
            producer = ProducerParams(
                given.transfer_id or "", min_cached_tokens=given.min_cached_tokens or 0
            )
            return TransferParams(producer, *more)
        case "consumer":
            _check(given, _CONSUMER, {"role", *_ANY, *_MAY, "live"})
            if given.live and not given.resume:
                raise _refuse("live", "needs `resume`")
            return TransferParams(_consumer(given, resample=False), *more)


def _in_vllm_names(given: _Written) -> TransferParams:
    if given.do_remote_decode:
        if given.do_remote_prefill:
            raise _refuse("do_remote_prefill", "cannot go with do_remote_decode")
        _check(given, set(), {*_SWITCHES, "transfer_id"})
        return TransferParams(ProducerParams(given.transfer_id or "", resample=True))
    if given.do_remote_prefill:
        _check(given, _CONSUMER, {*_SWITCHES, *_MAY})
        return TransferParams(_consumer(given, resample=True))
    _check(given, set(), _SWITCHES)
    return TransferParams()


def _consumer(given: _Written, *, resample: bool) -> ConsumerParams:
    addresses = tuple(given.producer_addresses or ())
    if len(set(addresses)) < len(addresses):
        raise _refuse("producer_addresses", "must name each rank once")
    return ConsumerParams(
        given.transfer_id or "",
        addresses,
        given.producer_instance_id or "",
        resample,
        given.prompt_digest or "",
        bool(given.live),
        tuple(tuple(layers) for layers in given.producer_stage_layers or ()),
    )


def _check(given: _Written, needed: set[str], allowed: set[str]) -> None:
    for key in _Written.__struct_fields__:
        is_given = getattr(given, key) is not None
        if key in needed and not is_given:
            raise _refuse(key, "is missing")
        if is_given and key not in needed | allowed:
            raise _refuse(key, "has no meaning here")


def _refuse(key: str, problem: str) -> InvalidRequest:
    name = f"kv_transfer_params.{key}" if key else "kv_transfer_params"
    return InvalidRequest(f"{name}: {problem}", field=name)

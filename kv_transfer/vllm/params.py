"""The typed view of `kv_transfer_params`, the dictionary by which a request tells the connector its
part in a transfer. No torch, no vllm.

There are two ways to write it. Whoever joins the answers of both sides, as our router does, hands
the first token over:

Prefill side: {"role": "source", "transfer_id": str}
Decode side:  {"role": "target", "transfer_id": str, "producer_addresses": ["host:port", ...],
"producer_instance_id": str}. The addresses are those of the source's
tensor-parallel ranks, in their order. Either, or neither role:
{"resume": [token, ...]}, the tokens generated elsewhere already. With that the decode side may have
{"live": true}, where the source has decoded those tokens. Nothing else may be in it.

Proxies in front of `vllm serve` write vLLM's own names (docs/kv_transfer.md). There the decode side
samples the first token again, so that its answer is whole and the prefill side's can be dropped:

Prefill side: {"do_remote_decode": true}, with a "transfer_id" where the proxy makes it
Decode side:  {"do_remote_prefill": true, "transfer_id": str, "producer_addresses": ["host:port",
...], "producer_instance_id": str, "prompt_digest": str}, which is what the prefill side's
answer says; the last may be left out. Keys that are null count as left out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MAX_TEXT = 256
# More tensor-parallel ranks than any worker has.
MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class SourceParams:
    """This request's KV goes to the worker that asks for `transfer_id`. With `resample` the first
    token does not: the target samples it again. Then the id may be "", for one of our making."""

    transfer_id: str
    resample: bool = False


@dataclass(frozen=True, slots=True)
class TargetParams:
    """This request's KV and first token come from the worker whose ranks are at
    `producer_addresses`; with `resample` the KV alone, and the token is sampled here.
    `prompt_digest`, where given, is of the prompt that the KV is of. With `live` the source has
    decoded as far as this request is resumed: KV comes for all before the last token, and no
    token."""

    transfer_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str
    resample: bool = False
    prompt_digest: str = ""
    live: bool = False


def digest_of(prompt_token_ids: Sequence[int]) -> str:
    """Tells prompts apart: BLAKE2b of the token ids, 128 bits in hexadecimal."""
    return blake2b(array("I", prompt_token_ids).tobytes(), digest_size=16).hexdigest()


_KEYS: dict[type, frozenset[str]] = {
    type(None): frozenset({"role", "resume"}),
    SourceParams: frozenset({"role", "resume", "transfer_id"}),
    TargetParams: frozenset(
        {
            "role",
            "resume",
            "transfer_id",
            "producer_addresses",
            "producer_instance_id",
            "prompt_digest",
            "live",
        },
    ),
}


_VLLM_SWITCHES = frozenset({"do_remote_decode", "do_remote_prefill"})
# vLLM's scheduler writes this into a prefill answer, and its front end reads it for the usage.
_VLLM_NOTES = frozenset({"remote_prefill_cached_tokens"})


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What one request asks of the connector; `part` is None where nothing moves."""

    part: SourceParams | TargetParams | None = None
    resume: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The form that vLLM carries in `SamplingParams.extra_args["kv_transfer_params"]`."""
        out: dict[str, Any] = {"resume": list(self.resume)} if self.resume else {}
        match self.part:
            case SourceParams(transfer_id, resample):
                out |= {"do_remote_decode": True} if resample else {"role": "source"}
                if transfer_id:
                    out["transfer_id"] = transfer_id
            case TargetParams() as part:
                out |= {"do_remote_prefill": True} if part.resample else {"role": "target"}
                out |= {
                    "transfer_id": part.transfer_id,
                    "producer_addresses": list(part.producer_addresses),
                    "producer_instance_id": part.producer_instance_id,
                }
                if part.prompt_digest:
                    out["prompt_digest"] = part.prompt_digest
                if part.live:
                    out["live"] = True
        return out


def _refuse(key: str, problem: str) -> InvalidRequest:
    name = f"kv_transfer_params.{key}"
    return InvalidRequest(f"{name} {problem}", field=name)


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise _refuse(key, f"must be a string of 1 to {MAX_TEXT} characters")
    return value


def _addresses(params: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = params.get(key)
    if not isinstance(values, (list, tuple)) or not 0 < len(values) <= MAX_RANKS:
        raise _refuse(key, f"must be a list of 1 to {MAX_RANKS} addresses")
    if not all(_is_address(value) for value in values):
        raise _refuse(key, "must be a list of host:port")
    if len(set(values)) < len(values):
        raise _refuse(key, "must name each rank once")
    return tuple(values)


def _is_address(value: object) -> bool:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        return False
    host, _, port = value.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536


def _target(params: Mapping[str, Any], *, resample: bool) -> TargetParams:
    return TargetParams(
        _text(params, "transfer_id"),
        _addresses(params, "producer_addresses"),
        _text(params, "producer_instance_id"),
        resample,
        _text(params, "prompt_digest") if "prompt_digest" in params else "",
        _flag(params, "live"),
    )


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key, False)
    if not isinstance(value, bool):
        raise _refuse(key, "must be true or false")
    return value


def _parse_vllm_names(params: Mapping[str, Any]) -> TransferParams:
    given = {key: value for key, value in params.items() if value is not None}
    for key in _VLLM_SWITCHES:
        if not isinstance(given.setdefault(key, False), bool):
            raise _refuse(key, "must be true or false")
    part: SourceParams | TargetParams | None = None
    if given["do_remote_decode"]:
        if given["do_remote_prefill"]:
            raise _refuse("do_remote_prefill", "cannot go with do_remote_decode")
        transfer_id = _text(given, "transfer_id") if "transfer_id" in given else ""
        part = SourceParams(transfer_id, resample=True)
    elif given["do_remote_prefill"]:
        part = _target(given, resample=True)
    known = _KEYS[type(part)] - {"role", "resume", "live"}
    _check_keys(given, known | _VLLM_SWITCHES | _VLLM_NOTES)
    return TransferParams(part)


def _check_keys(params: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in params:
        if key not in known:
            raise _refuse(str(key), "has no meaning here")


def parse(params: Mapping[str, Any] | None) -> TransferParams:
    """Reads `kv_transfer_params`; raises InvalidRequest naming the key."""
    if params is None:
        return TransferParams()
    if not isinstance(params, dict):
        raise InvalidRequest("kv_transfer_params must be an object", field="kv_transfer_params")
    if not _VLLM_SWITCHES.isdisjoint(params):
        return _parse_vllm_names(params)
    resume = params.get("resume", ())
    if not isinstance(resume, (list, tuple)) or not all(type(x) is int and x >= 0 for x in resume):
        raise _refuse("resume", "must be a list of token ids")
    part: SourceParams | TargetParams | None
    match params.get("role"):
        case None:
            part = None
        case "source":
            part = SourceParams(_text(params, "transfer_id"))
        case "target":
            part = _target(params, resample=False)
            if part.live and not resume:
                raise _refuse("live", "needs tokens to resume after")
        case other:
            raise _refuse("role", f"must be source or target, not {other!r}")
    _check_keys(params, _KEYS[type(part)])
    return TransferParams(part, tuple(resume))

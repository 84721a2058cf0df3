"""The typed view of `kv_transfer_params`, the dictionary by which a request tells the connector its
part in a transfer. No torch, no vllm.

Prefill side: {"role": "source", "transfer_id": str}
Decode side:  {"role": "target", "transfer_id": str, "source_addresses": ["host:port", ...],
"source_epoch": str, "capability": str}, the last only where the source checks it. The addresses are
those of the source's tensor-parallel ranks, in their order. Either, or neither role: {"resume":
[token, ...]}, the tokens generated elsewhere already. Nothing else may be in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_TEXT = 256
# More tensor-parallel ranks than any worker has.
MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class SourceParams:
    """This request's KV goes to the worker that asks for `transfer_id`."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class TargetParams:
    """This request's KV and first token come from the worker whose ranks are at `source_addresses`.
    `capability` is the right to them (pdserve/capability.py), "" where the source asks for none."""

    transfer_id: str
    source_addresses: tuple[str, ...]
    source_epoch: str
    capability: str = field(default="", repr=False)


_KEYS: dict[type, frozenset[str]] = {
    type(None): frozenset({"role", "resume"}),
    SourceParams: frozenset({"role", "resume", "transfer_id"}),
    TargetParams: frozenset(
        {"role", "resume", "transfer_id", "source_addresses", "source_epoch", "capability"},
    ),
}


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What one request asks of the connector; `part` is None where nothing moves."""

    part: SourceParams | TargetParams | None = None
    resume: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The form that vLLM carries in `SamplingParams.extra_args["kv_transfer_params"]`."""
        out: dict[str, Any] = {"resume": list(self.resume)} if self.resume else {}
        match self.part:
            case SourceParams(transfer_id):
                out.update(role="source", transfer_id=transfer_id)
            case TargetParams(transfer_id, addresses, epoch, capability):
                out.update(
                    role="target",
                    transfer_id=transfer_id,
                    source_addresses=list(addresses),
                    source_epoch=epoch,
                )
                if capability:
                    out["capability"] = capability
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


def parse(params: Mapping[str, Any] | None) -> TransferParams:
    """Reads `kv_transfer_params`; raises InvalidRequest naming the key."""
    if params is None:
        return TransferParams()
    if not isinstance(params, dict):
        raise InvalidRequest("kv_transfer_params must be an object", field="kv_transfer_params")
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
            part = TargetParams(
                _text(params, "transfer_id"),
                _addresses(params, "source_addresses"),
                _text(params, "source_epoch"),
                _text(params, "capability") if "capability" in params else "",
            )
        case other:
            raise _refuse("role", f"must be source or target, not {other!r}")
    for key in params:
        if key not in _KEYS[type(part)]:
            raise _refuse(str(key), "has no meaning here")
    return TransferParams(part, tuple(resume))

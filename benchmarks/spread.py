"""Several addresses of one service, such as its routers', as one target."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchError
from benchmarks.grpc_target import GrpcTarget, check_address
from benchmarks.targets import HttpTarget, base_url
from pdserve.rpc import PLAIN

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from benchmarks.records import Timeline
    from benchmarks.targets import ServedModel, Target
    from pdserve.rpc import Dialer


def open_http(urls: str, api_key: str = "", tls: ssl.SSLContext | bool = True) -> Target[Any]:
    """One URL, or several with commas. Raises :class:`BenchError`."""
    # All are read before any is opened.
    return _joined(
        [HttpTarget(url, api_key, tls) for url in [base_url(x) for x in urls.split(",")]]
    )


def open_grpc(addresses: str, dialer: Dialer = PLAIN) -> Target[Any]:
    """One host:port, or several with commas. Raises :class:`BenchError`."""
    listed = addresses.split(",")
    for address in listed:
        check_address(address)
    return _joined([GrpcTarget(address, dialer) for address in listed])


def _joined(targets: Sequence[Target[Any]]) -> Target[Any]:
    return targets[0] if len(targets) == 1 else Spread(targets)


@dataclass(frozen=True, slots=True)
class _Prepared:
    target: Target[Any]
    request: Any


class Spread:
    """Sends each request to the next of ``targets``, which it owns."""

    def __init__(self, targets: Sequence[Target[Any]]) -> None:
        self.kind = targets[0].kind
        self.address = ",".join(target.address for target in targets)
        self._targets = targets
        self._next = itertools.cycle(targets)

    async def model(self, name: str | None) -> ServedModel:
        """What all of them serve; raises :class:`BenchError` where they differ."""
        found = [await target.model(name) for target in self._targets]
        for target, model in zip(self._targets, found, strict=True):
            if model != found[0]:
                raise BenchError(
                    f"{target.address} serves {model}, {self._targets[0].address} {found[0]}: they "
                    "are not one service"
                )
        return found[0]

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> _Prepared:
        """Encode one request for whoever is next."""
        target = next(self._next)
        return _Prepared(target, target.prepare(model, request_id, prompt, output_tokens))

    async def send(self, prepared: _Prepared, timeline: Timeline) -> None:
        """Send it there."""
        await prepared.target.send(prepared.request, timeline)

    async def aclose(self) -> None:
        """Close all connections."""
        for target in self._targets:
            await target.aclose()

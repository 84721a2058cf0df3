"""The API server of Kubernetes: every call has a deadline, and raises a PdserveError."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pdserve.config import refuse
from pdserve.errors import (
    ConfigError,
    Conflict,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

try:
    import httpx2
    import lightkube
    from lightkube import KubeConfig
    from lightkube.generic_resource import create_namespaced_resource
    from lightkube.models.coordination_v1 import LeaseSpec as LeaseSpec  # for the files beside
    from lightkube.models.meta_v1 import ObjectMeta as ObjectMeta
    from lightkube.resources.coordination_v1 import Lease as Lease
    from lightkube.resources.core_v1 import Pod as Pod
    from lightkube.types import PatchType
except ImportError as error:
    raise ConfigError(
        f"--on kubernetes needs lightkube ({error}): pip install 'pdserve[kubernetes]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Awaitable

CALL_S = 3.0
_ERRORS = {401: Unauthenticated, 403: PermissionDenied, 404: NotFound, 409: Conflict}
_TARGET = re.compile(r"([a-z0-9]+)\.(v[a-z0-9]+)\.([a-z0-9.-]+)/([a-z0-9][a-z0-9.-]*)")


@dataclass(frozen=True, slots=True)
class Target:
    """A resource with replicas, of any kind that has a `/scale`."""

    plural: str
    version: str
    group: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read TYPE.VERSION.GROUP/NAME, as kubectl writes it. Raises ConfigError."""
        found = _TARGET.fullmatch(text)
        if found is None:
            known = "TYPE.VERSION.GROUP/NAME, such as deployments.v1.apps/pdserve-decode"
            refuse("--target", f"must be ROLE={known}, not {text!r}")
        return cls(*found.groups())

    @property
    def scale(self) -> Any:
        """The class of its `/scale`."""
        kind = self.plural  # is part of no request to `/scale`
        return create_namespaced_resource(self.group, self.version, kind, self.plural).Scale


class Kubernetes:
    """The namespace of the context in KUBECONFIG, or else of this pod."""

    def __init__(self) -> None:
        file = os.environ.get("KUBECONFIG")
        try:
            config = KubeConfig.from_file(file) if file else KubeConfig.from_env()
            self._client = lightkube.AsyncClient(config, field_manager="pdserve-scaler")
        except (lightkube.ConfigError, OSError, KeyError) as error:
            raise ConfigError(
                f"no Kubernetes cluster ({error}): run in a pod with a service account, or set "
                "KUBECONFIG to a file"
            ) from error

    async def get(self, kind: Any, name: str) -> Any:
        return await _call(self._client.get(kind, name))

    async def create(self, created: Any) -> None:
        """Raises Conflict if there is one of this name."""
        await _call(self._client.create(created))

    async def patch(self, kind: Any, name: str, change: dict[str, Any]) -> Any:
        """Merge `change` into an object, and return it. Raises Conflict if `change` has another
        `resourceVersion` than the object."""
        return await _call(self._client.patch(kind, name, change, patch_type=PatchType.MERGE))

    async def close(self) -> None:
        await self._client.close()


async def _call(answer: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(CALL_S):
            return await answer
    except httpx2.HTTPStatusError as error:
        kind = _ERRORS.get(error.response.status_code, Unavailable)
        raise kind(f"Kubernetes: {error}") from error
    except (httpx2.HTTPError, TimeoutError) as error:
        why = str(error) or f"no answer within {CALL_S:g} s"
        raise Unavailable(f"the API server of Kubernetes: {why}") from error

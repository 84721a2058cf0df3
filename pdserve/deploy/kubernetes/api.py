"""The API server of Kubernetes: every call has a deadline, and raises a PdserveError."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from typing import TYPE_CHECKING, Any, NoReturn

from pdserve.config import refuse
from pdserve.errors import (
    ConfigError,
    Conflict,
    NotFound,
    PdserveError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

try:
    import httpx2
    from lightkube import AsyncClient, KubeConfig
    from lightkube import ConfigError as KubeConfigError
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
    from collections.abc import Awaitable, Callable

    Fatal = type[PdserveError] | tuple[type[PdserveError], ...]

logger = logging.getLogger(__name__)

CALL_S = 3.0
_LOOK_S = 2.0
# Lightkube has their models; what a site wrote in a template is to be copied as it is.
Deployment = create_namespaced_resource("apps", "v1", "Deployment", "deployments")
PDService = create_namespaced_resource("pdserve.dev", "v1alpha1", "PDService", "pdservices")
_ERRORS = {401: Unauthenticated, 403: PermissionDenied, 404: NotFound, 409: Conflict}
_TARGET = re.compile(r"([a-z0-9]+)\.(v[a-z0-9]+)\.([a-z0-9.-]+)/([a-z0-9][a-z0-9.-]*)")


def connect() -> Any:
    """Return a client of the namespace of the context in KUBECONFIG, or else of this pod."""
    file = os.environ.get("KUBECONFIG")
    try:
        config = KubeConfig.from_file(file) if file else KubeConfig.from_env()
        return AsyncClient(config, field_manager="pdserve-scaler")
    except (KubeConfigError, OSError, KeyError) as error:
        raise ConfigError(
            f"no Kubernetes cluster ({error}): run in a pod with a service account, or set "
            "KUBECONFIG to a file"
        ) from error


async def call(answer: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(CALL_S):
            return await answer
    except httpx2.HTTPStatusError as error:
        kind = _ERRORS.get(error.response.status_code, Unavailable)
        raise kind(f"Kubernetes: {error}") from error
    except (httpx2.HTTPError, TimeoutError) as error:
        why = str(error) or f"no answer within {CALL_S:g} s"
        raise Unavailable(f"the API server of Kubernetes: {why}") from error


async def repeat(look: Callable[[], Awaitable[None]], fatal: Fatal) -> NoReturn:
    """Look until cancelled. Raises `fatal` errors; the next look goes on after others."""
    failure = ""
    while True:
        before, failure = failure, ""
        try:
            await look()
        except PdserveError as error:
            if isinstance(error, fatal):
                raise
            failure = error.message
        if failure != before:
            logger.warning("%s", failure or "works again")
        await asyncio.sleep(_LOOK_S)


async def merge(client: Any, kind: Any, name: str, change: dict[str, Any]) -> None:
    """Merge `change` into an object. Raises Conflict if it has another `resourceVersion`."""
    await call(client.patch(kind, name, change, patch_type=PatchType.MERGE))


def scale_of(text: str) -> tuple[Any, str]:
    """Return the class of the `/scale` of TYPE.VERSION.GROUP/NAME, as kubectl writes it, and the
    name. Raises ConfigError."""
    found = _TARGET.fullmatch(text)
    if found is None:
        known = "ROLE=TYPE.VERSION.GROUP/NAME, such as decode=deployments.v1.apps/pdserve-decode"
        refuse("--target", f"must be {known}, not {text!r}")
    plural, version, group, name = found.groups()
    # No request to `/scale` has the kind in it.
    return create_namespaced_resource(group, version, plural, plural).Scale, name

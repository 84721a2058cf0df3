"""Client of the Kubernetes API server. Every call has a deadline, and raises a PdserveError."""

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
    from lightkube.models.coordination_v1 import LeaseSpec as LeaseSpec  # used by sibling modules
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
    from pathlib import Path

    Fatal = type[PdserveError] | tuple[type[PdserveError], ...]

logger = logging.getLogger(__name__)

CALL_S = 3.0
# Generic resources instead of lightkube's typed models, which would drop unknown fields. A site's
# pod template must be copied unchanged.
Deployment = create_namespaced_resource("apps", "v1", "Deployment", "deployments")
PDService = create_namespaced_resource("pdserve.dev", "v1alpha1", "PDService", "pdservices")
_ERRORS = {401: Unauthenticated, 403: PermissionDenied, 404: NotFound, 409: Conflict}
_TARGET = re.compile(r"([a-z0-9]+)\.(v[a-z0-9]+)\.([a-z0-9.-]+)/([a-z0-9][a-z0-9.-]*)")


def connect() -> Any:
    """Return a client for the namespace of the current context in KUBECONFIG, or of this pod if
    that is not set. Raises ConfigError."""
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


async def repeat(
    look: Callable[[], Awaitable[None]],
    fatal: Fatal,
    alive_file: Path | None = None,
    *,
    pause_s: float = 2.0,
) -> NoReturn:
    """Call `look` repeatedly until cancelled. Raises `fatal` errors. Other errors are logged, and
    the next call retries. Each call touches `alive_file` for a liveness probe."""
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
            logger.warning("%s", failure or "recovered from the last error")
        if alive_file is not None:
            _touch(alive_file)
        await asyncio.sleep(pause_s)


def _touch(file: Path) -> None:
    file.touch()  # fast enough for the event loop: the file is in memory or on a local disk


async def merge(client: Any, kind: Any, name: str, change: dict[str, Any]) -> None:
    """Merge `change` into an object. If `change` has a `resourceVersion` that is no longer current,
    raise Conflict."""
    await call(client.patch(kind, name, change, patch_type=PatchType.MERGE))


def scale_of(text: str) -> tuple[Any, str]:
    """Parse TYPE.VERSION.GROUP/NAME, as kubectl writes it. Return the resource class of its
    `/scale`, and the name. Raises ConfigError."""
    found = _TARGET.fullmatch(text)
    if found is None:
        known = "ROLE=TYPE.VERSION.GROUP/NAME, such as decode=deployments.v1.apps/pdserve-decode"
        refuse("--target", f"must be {known}, not {text!r}")
    plural, version, group, name = found.groups()
    # The kind does not matter, because no request to `/scale` contains it.
    return create_namespaced_resource(group, version, plural, plural).Scale, name

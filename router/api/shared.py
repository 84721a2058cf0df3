"""Parts that the HTTP and gRPC APIs share."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.observe.logs import LineLog
from router.api.auth import Keys
from router.api.open_requests import CallLog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.config import RouterConfig
    from pdserve.observe.audit import AuditLog
    from router.api.open_requests import OpenRequests
    from router.intake.intake import Intake
    from router.request_path import RequestPath
    from router.steps.ledger import ResidencyLedger
    from router.virtual.chooser import ModelChooser


@dataclass(frozen=True, slots=True)
class SharedParts:
    """`keys` tells tenants by their API keys, `intake` reads bodies, `chooser` prepares and serves
    requests, `calls` writes the access log, `audit` the actions of administrators, `ledger` what is
    stored and where."""

    keys: Keys
    intake: Intake
    chooser: ModelChooser
    open_requests: OpenRequests
    calls: CallLog
    audit: AuditLog
    ledger: ResidencyLedger


@contextmanager
def open_shared_parts(
    config: RouterConfig,
    path: RequestPath,
    intake: Intake,
    chooser: ModelChooser,
    open_requests: OpenRequests,
    ledger: ResidencyLedger,
    audit: AuditLog,
) -> Iterator[SharedParts]:
    """Open the access log for the context. Raises ConfigError if it cannot be written."""
    with ExitStack() as stack:
        access_log = None
        if config.log.access:
            access_log = LineLog(config.log.access, "log.access")
            stack.callback(access_log.close)
        yield SharedParts(
            keys=Keys(config.tenants, config.access, http_host=config.http.host),
            intake=intake,
            chooser=chooser,
            open_requests=open_requests,
            calls=CallLog(path.metrics, path.log, path.workers.fleet.now, access_log),
            audit=audit,
            ledger=ledger,
        )

"""Every error that a client or an operator can meet, and the one table to gRPC and HTTP status.

PdserveError
├── ClientError                 the request is at fault
│   ├── InvalidRequest          400  a field is wrong, unknown or unsupported
│   │   └── ContextLengthExceeded
│   ├── Unauthenticated         401  no API key, or one that is not known
│   ├── PermissionDenied        403  the caller is known, and this is not for it
│   ├── ModelNotFound           404
│   ├── Conflict                409  a request of this name is being answered
│   ├── RequestTooLarge         413
│   └── Cancelled               499  the client went away
├── ServiceError                the service is at fault, or busy
│   ├── Overloaded              429  with the seconds after which a retry makes sense
│   ├── Unavailable             503  no worker for this model now
│   │   └── BudgetExhausted     too much was computed again of late, for workers that failed
│   ├── DeadlineExceeded        504
│   ├── WorkerFailed            502  a worker broke off
│   │   └── TransferFailed      its KV did not arrive
│   │       └── TransferCorrupted   it arrived damaged, and again when it was sent again
│   └── InternalError           500
└── ConfigError                 the process cannot start as it was told; never crosses the wire
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import grpc

if TYPE_CHECKING:
    from pdserve.types import ErrorInfo


class Refusal(StrEnum):
    """Why a request was refused before any work was done for it, for programs to read."""

    QUEUE_FULL = "queue_full"
    NO_ROOM = "no_room"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    SLO_UNREACHABLE = "slo_unreachable"
    TENANT_REQUEST_RATE = "tenant_request_rate"
    TENANT_TOKEN_RATE = "tenant_token_rate"
    TENANT_CONCURRENCY = "tenant_concurrency"


class PdserveError(Exception):
    """Base of all our errors. `field` names the request field or the configuration key at fault;
    `reason` is a Refusal's value, or empty."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float = 0.0, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.reason = reason


class ClientError(PdserveError):
    """The request is at fault; the same request will fail again."""


class InvalidRequest(ClientError):
    """A field of the request is wrong, unknown or unsupported."""

    code = "invalid_value"
    http_status = 400
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class UnsupportedField(InvalidRequest):
    """A field that the API defines and that we refuse rather than ignore."""

    code = "unsupported_parameter"


class UnknownField(InvalidRequest):
    """A field that the API does not define."""

    code = "unknown_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model; the message has both lengths."""

    code = "context_length_exceeded"


class Unauthenticated(ClientError):
    """API keys are asked for, and the request has none that is known."""

    code = "invalid_api_key"
    http_status = 401
    grpc_status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(ClientError):
    """The caller is known, and is not one who may do this."""

    code = "permission_denied"
    http_status = 403
    grpc_status = grpc.StatusCode.PERMISSION_DENIED


class ModelNotFound(ClientError):
    """No worker serves a model of this name."""

    code = "model_not_found"
    http_status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND


class Conflict(ClientError):
    """A request of this name is being answered over another connection."""

    code = "request_in_progress"
    http_status = 409
    grpc_status = grpc.StatusCode.ALREADY_EXISTS


class RequestTooLarge(ClientError):
    """The body is over the limit."""

    code = "request_too_large"
    http_status = 413
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Cancelled(ClientError):
    """The client cancelled or went away."""

    code = "cancelled"
    http_status = 499
    grpc_status = grpc.StatusCode.CANCELLED


class ServiceError(PdserveError):
    """The service is at fault, or busy; the same request may succeed later."""


class Overloaded(ServiceError):
    """Queue or capacity is full; `retry_after_s` is when trying again makes sense."""

    code = "overloaded"
    http_status = 429
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(ServiceError):
    """No worker can take the request now."""

    code = "unavailable"
    http_status = 503
    grpc_status = grpc.StatusCode.UNAVAILABLE


class BudgetExhausted(Unavailable):
    """A worker failed, and what may be computed again for its model is used up."""

    code = "retry_budget_exhausted"


class DeadlineExceeded(ServiceError):
    """The request's deadline passed."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class WorkerFailed(ServiceError):
    """A worker died or broke off."""

    code = "worker_failed"
    http_status = 502
    grpc_status = grpc.StatusCode.UNAVAILABLE


class TransferFailed(WorkerFailed):
    """The KV blocks of a request did not arrive at the decode worker."""

    code = "transfer_failed"


class TransferCorrupted(TransferFailed):
    """The KV blocks of a request came damaged, and so did what came again."""

    code = "transfer_corrupted"


class InternalError(ServiceError):
    """A bug of ours."""


class ConfigError(PdserveError):
    """The configuration is broken: `field` is the key, the message the reason."""

    code = "config_error"


_BY_CODE: dict[str, type[PdserveError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        UnsupportedField,
        UnknownField,
        ContextLengthExceeded,
        Unauthenticated,
        PermissionDenied,
        ModelNotFound,
        Conflict,
        RequestTooLarge,
        Cancelled,
        Overloaded,
        Unavailable,
        BudgetExhausted,
        DeadlineExceeded,
        WorkerFailed,
        TransferFailed,
        TransferCorrupted,
        InternalError,
        ConfigError,
    )
}


def from_info(info: ErrorInfo) -> PdserveError:
    """The error that `info` describes; an unknown code is an internal error."""
    cls = _BY_CODE.get(info.code, InternalError)
    return cls(info.message, field=info.field, retry_after_s=info.retry_after_s, reason=info.reason)


def wait_s(error: PdserveError) -> float:
    """How long a client is to wait before it tries again: a second at least where that makes sense,
    though nobody could predict it."""
    return max(1.0, error.retry_after_s) if error.http_status in (429, 503) else 0.0

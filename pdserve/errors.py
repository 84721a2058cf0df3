"""Every error that a client or an operator can meet, with its gRPC and HTTP status."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import grpc

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Refusal(StrEnum):
    """Why a request was rejected before any work was done for it; for programs."""

    QUEUE_FULL = "queue_full"
    NO_ROOM = "no_room"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    SLO_UNREACHABLE = "slo_unreachable"
    TENANT_REQUEST_RATE = "tenant_request_rate"
    TENANT_TOKEN_RATE = "tenant_token_rate"
    TENANT_CONCURRENCY = "tenant_concurrency"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it travels. `code` names its class."""

    code: str
    message: str
    field: str = ""
    retry_after_s: float = 0.0
    reason: str = ""


_BY_CODE: dict[str, type[PdserveError]] = {}
# What a status means that comes without an error of ours.
BY_STATUS: dict[grpc.StatusCode, type[PdserveError]] = {}


class PdserveError(Exception):
    """Base of all errors. `field` names the request field or the configuration key at fault;
    `reason` is the value of a Refusal, or empty."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init_subclass__(cls, code: str = "", http: int = 0) -> None:
        cls.http_status = http or cls.http_status
        cls.grpc_status = _STATUS[cls.http_status]
        if code:
            cls.code = code
            _BY_CODE[code] = cls
        if http:
            BY_STATUS.setdefault(cls.grpc_status, cls)

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float = 0.0, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.reason = reason


class ClientError(PdserveError):
    """The request is at fault and will fail again."""


class InvalidRequest(ClientError, code="invalid_value", http=400):
    """A field of the request is wrong, unknown or unsupported."""


class UnsupportedField(InvalidRequest, code="unsupported_parameter"):
    """A field of the API that is not supported."""


class UnknownField(InvalidRequest, code="unknown_parameter"):
    """A field that the API does not define."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """Prompt and answer do not fit the model's context."""


class Unauthenticated(ClientError, code="invalid_api_key", http=401):
    """The caller has not authenticated."""


class PermissionDenied(ClientError, code="permission_denied", http=403):
    """The caller lacks the role."""


class NotFound(ClientError, code="not_found", http=404):
    """There is nothing of this name."""


class ModelNotFound(ClientError, code="model_not_found", http=404):
    """No worker serves this model."""


class Conflict(ClientError, code="request_in_progress", http=409):
    """A request with this id is being answered over another connection."""


class KeyReused(ClientError, code="idempotency_key_reused", http=422):
    """The idempotency key belongs to another request."""


class RequestTooLarge(ClientError, code="request_too_large", http=413):
    """The body exceeds the limit."""


class Cancelled(ClientError, code="cancelled", http=499):
    """The client cancelled or disconnected."""


class ServiceError(PdserveError):
    """The service is at fault or busy. The request may succeed later."""


class Overloaded(ServiceError, code="overloaded", http=429):
    """Queue or capacity is full. `retry_after_s` says when to try again."""


class Unavailable(ServiceError, code="unavailable", http=503):
    """No worker can take the request now."""


class BudgetExhausted(Unavailable, code="retry_budget_exhausted"):
    """A worker failed, and the retry budget of its model is used up."""


class DeadlineExceeded(ServiceError, code="deadline_exceeded", http=504):
    """The request's deadline passed."""


class WorkerFailed(ServiceError, code="worker_failed", http=502):
    """A worker died or broke its protocol."""


class TransferFailed(WorkerFailed, code="transfer_failed"):
    """The KV blocks of a request did not arrive at the decode worker."""


class TransferCorrupted(TransferFailed, code="transfer_corrupted"):
    """The KV blocks of a request were damaged, also after one retry."""


class ParserFailed(ServiceError, code="parser_failed"):
    """Tool calls and reasoning in the answer could not be found."""


class InternalError(ServiceError, code="internal_error"):
    """A bug in pdserve."""


class ConfigError(PdserveError, code="config_error"):
    """The configuration is wrong: `field` is the key, `message` the reason."""


def from_info(info: ErrorInfo) -> PdserveError:
    """Return the error that `info` describes. An unknown code is an InternalError."""
    cls = _BY_CODE.get(info.code, InternalError)
    return cls(info.message, field=info.field, retry_after_s=info.retry_after_s, reason=info.reason)


def is_service_error(code: str) -> bool:
    """Return True if the code is that of an error for which the service is at fault."""
    return issubclass(_BY_CODE.get(code, ClientError), ServiceError)


def wait_s(error: PdserveError) -> float:
    """Return the seconds after which a retry makes sense: at least 1, or 0 if none does."""
    return max(1.0, error.retry_after_s) if error.http_status in (429, 503) else 0.0

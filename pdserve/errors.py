"""All errors that clients and operators see, with their gRPC and HTTP status."""

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
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Refusal(StrEnum):
    """Machine-readable reason for rejecting a request before any work was done for it."""

    QUEUE_FULL = "queue_full"
    NO_ROOM = "no_room"
    MEMORY = "memory"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    SLO_UNREACHABLE = "slo_unreachable"
    TENANT_REQUEST_RATE = "tenant_request_rate"
    TENANT_TOKEN_RATE = "tenant_token_rate"
    TENANT_CONCURRENCY = "tenant_concurrency"
    NO_WORKER_IN_REGION = "no_worker_in_region"
    REGION_NOT_ALLOWED = "region_not_allowed"
    REGION_DRAINED = "region_drained"
    GUARD = "guard"
    GUARD_FAILED = "guard_failed"


# Another model or region must not let a tenant exceed its limits.
LIMITS_OF_TENANTS = (
    Refusal.TENANT_CONCURRENCY,
    Refusal.TENANT_REQUEST_RATE,
    Refusal.TENANT_TOKEN_RATE,
)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error in transit between processes. `code` identifies its class."""

    code: str
    message: str
    field: str = ""
    retry_after_s: float = 0.0
    reason: str = ""


_BY_CODE: dict[str, type[PdserveError]] = {}
# The error class for a gRPC status without a pdserve error in its metadata.
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


class ContentFiltered(InvalidRequest, code="content_filter"):
    """A guard refuses the prompt (router.guards)."""


class UnsupportedMediaType(InvalidRequest, code="unsupported_media_type", http=415):
    """The body does not have the content type of the endpoint."""


class Unauthenticated(ClientError, code="invalid_api_key", http=401):
    """The caller has not authenticated."""


class PermissionDenied(ClientError, code="permission_denied", http=403):
    """The caller lacks the required role."""


class NotFound(ClientError, code="not_found", http=404):
    """The named resource does not exist."""


class ModelNotFound(ClientError, code="model_not_found", http=404):
    """No worker serves this model."""


class Conflict(ClientError, code="request_in_progress", http=409):
    """A request with this id is being answered over another connection."""


class KeyReused(ClientError, code="idempotency_key_reused", http=422):
    """The idempotency key belongs to another request."""


class PoisonRequest(ClientError, code="poison_request", http=422):
    """Workers died while they ran this request. It is not retried, to protect other workers."""


class AnswerNotParsed(ClientError, code="answer_not_parsed", http=422):
    """Parsing tool calls and reasoning of this answer failed or timed out."""


class RequestTooLarge(ClientError, code="request_too_large", http=413):
    """The body exceeds the limit."""


class QuotaExceeded(ClientError, code="quota_exceeded", http=403):
    """The tenant's stored data has reached its limit. The message names limit and usage."""


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


class WeightsChanging(Unavailable, code="weights_changing"):
    """The weights of the worker change. The answer continues after that, computed again."""


class AnswerAborted(ServiceError, code="answer_aborted", http=503):
    """An administrator ended the answer, which keeps the tokens that it has."""


class DeadlineExceeded(ServiceError, code="deadline_exceeded", http=504):
    """The request's deadline passed."""


class WorkerFailed(ServiceError, code="worker_failed", http=502):
    """A worker died or broke its protocol."""


class EngineDied(WorkerFailed, code="engine_died"):
    """The worker's engine died while it ran the request. The worker process exits."""


class TransferFailed(WorkerFailed, code="transfer_failed"):
    """The KV blocks of a request did not arrive at the decode worker."""


class TransferCorrupted(TransferFailed, code="transfer_corrupted"):
    """The KV blocks of a request did not match their digests, also after one retry."""


class ParserFailed(ServiceError, code="parser_failed"):
    """The router cannot parse tool calls and reasoning: no parser process, or no fitting parser."""


class InternalError(ServiceError, code="internal_error"):
    """A bug in pdserve."""


class ConfigError(PdserveError, code="config_error"):
    """The configuration is wrong: `field` is the key, `message` the reason."""


def from_info(info: ErrorInfo) -> PdserveError:
    """Return the error that `info` describes. An unknown code becomes an InternalError."""
    cls = _BY_CODE.get(info.code, InternalError)
    return cls(info.message, field=info.field, retry_after_s=info.retry_after_s, reason=info.reason)


def printable(text: str) -> str:
    """Return an untrusted text for a message, without terminal control characters."""
    return "".join(x if x.isprintable() else " " for x in text)


def is_service_error(code: str) -> bool:
    """Return True if errors with this code are the service's fault."""
    return issubclass(_BY_CODE.get(code, ClientError), ServiceError)


def wait_s(error: PdserveError) -> float:
    """Return Retry-After in seconds: at least 1, or 0 if a retry cannot help."""
    return max(1.0, error.retry_after_s) if error.http_status in (429, 503) else 0.0

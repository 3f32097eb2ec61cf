"""All errors, as exceptions for callers and as codes on the wire and of processes.

RollbusError
├── BusClosed                 this client or worker was closed locally
├── BusBroken                 the connection to NATS failed or was rejected
│   ├── PermissionDenied      NATS does not let this user publish or subscribe there; carries `action` and `subject`
│   ├── ServerUnreachable     no NATS server answered
│   └── TlsFailed             the required TLS handshake failed; carries `problem` and `advice`
├── EngineDead                the engine is dead; its worker exits
├── LocalProtocolError        this process was about to break the protocol: a bug in this process or in the engine
├── RemoteProtocolError       a peer sent a message that breaks the protocol
├── ControlError              a command was rejected, or a worker did not execute it; carries `code`
├── CommandIncomplete         not every worker applied a command; carries `ledger`, a `CommandResult`
└── RequestError              one request failed; carries `code`, `request_id` and `retryable`
    ├── RequestRejected       before a worker accepted it
    │   ├── InvalidRequest    a field is wrong; carries `field`, `problem` and `allowed`
    │   └── NoWorkers         no live worker serves the model
    ├── RequestTimeout        its deadline passed
    └── RequestFailed         after a worker accepted it
"""

import enum
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self

FREE_SPACE: Final = "free space, then the same command continues"
"""Advice for a full disk."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
EXIT_DUPLICATE_WORKER: Final = 78
"""Another live worker has the same id. A restart cannot help, so no supervisor restarts the process."""


class ErrorFacts(NamedTuple):
    """The meaning of an `ErrorCode`."""

    meaning: str
    fault: str
    """Party that must act: `client`, `worker`, `fleet` (its operator) or `network`."""
    retryable: bool = False
    """True if the same request may succeed on a retry."""
    admitted: bool = False
    """True if a worker may have started the request before it failed."""
    resumed: bool = False
    """True if the error of an attempt does not predict an error of the next attempt, so the client starts another."""


class OpenEnum(enum.StrEnum):
    """Names to which newer peers may append. A name that this process does not know decodes as `UNKNOWN`."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls["UNKNOWN"]


class ErrorCode(OpenEnum):
    """The reason why a request failed, as in a terminal chunk. Append-only; `ERRORS` explains each code."""

    facts: ErrorFacts
    """Meaning of the code, and what follows from it."""

    def __new__(cls, value: str, *facts: Any) -> "ErrorCode":
        """Make a member whose value is the code alone, with the fields of `ErrorFacts`."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.facts = ErrorFacts(*facts)
        return member

    # The code, its meaning and fault; then `retryable`, `admitted` and `resumed`, False if left out.
    INVALID_REQUEST = "invalid_request", "a field of the request is wrong", "client"
    UNKNOWN_MODEL = "unknown_model", "no worker serves a model of this name", "client"
    UNSUPPORTED = "unsupported", "the model or engine does not support a requested feature", "client"
    DUPLICATE_REQUEST = "duplicate_request", "an open request of this client has the same id", "client"
    TOO_LARGE = "too_large", "the request, or one row of its routed experts, exceeds the server's max_payload", "client"
    NO_WORKERS = "no_workers", "no live worker serves the model, and none starts", "fleet", True
    QUEUE_FULL = "queue_full", "the limit of waiting requests is reached", "fleet", True
    TIMEOUT = "timeout", "the request's timeout_s passed", "fleet", True, True
    WEIGHTS_TOO_OLD = "weights_too_old", "the weights are older than min_weight_version", "fleet", True
    TOO_STALE = "too_stale", "the weights advanced by more than max_weight_lag versions", "client"
    WORKER_LOST = "worker_lost", "the worker's lease expired", "worker", True, True, True
    WORKER_STOPPED = "worker_stopped", "the worker shut down before it finished the request", "worker", True, True, True
    FRAMES_LOST = "frames_lost", "frames between worker and client were lost", "network", True, True, True
    PROTOCOL_ERROR = "protocol_error", "the worker's chunks contradict each other", "worker", True, True
    ENGINE_ERROR = "engine_error", "the engine failed only this request", "worker", True, True
    ENGINE_DEAD = "engine_dead", "the engine died; its worker exits", "worker", True, True, True
    CLIENT_CLOSED = "client_closed", "the client was closed before the request ended", "client", True, True
    POISON_REQUEST = "poison_request", "several engines died on this request; it is not retried", "client", False, True
    WORKER_FENCED = "worker_fenced", "the worker is alive but does not continue the request", "worker", True, True, True
    CLIENT_LOST = "client_lost", "the client's lease expired at the worker", "client", True, True, True
    OVER_BUDGET = "over_budget", "the worker buffered more unread results than its limit", "client", True, True, True
    PERMISSION_DENIED = "permission_denied", "this client's NATS user lacks a required permission", "client"
    KV_TRANSFER_FAILED = (
        "kv_transfer_failed",
        "the transfer of the KV cache from the prefill worker to the decode worker failed",
        "worker",
        True,
        True,
        True,
    )
    UNKNOWN = "unknown", "a newer peer sent a code that this process does not know", "worker", False, True


ERRORS: Final = {code: code.facts for code in ErrorCode}


class ControlCode(OpenEnum):
    """The reason why a command was not executed. Append-only."""

    INVALID_COMMAND = "invalid_command"
    """The command does not decode, or a field is wrong."""
    PATH_REFUSED = "path_refused"
    """The source's real path is outside all allowed roots."""
    BAD_SOURCE = "bad_source"
    """The checkpoint or adapter is incomplete, damaged, or of another model. The worker changed nothing."""
    STORAGE = "storage"
    """The worker could not fetch or write files."""
    OLD_VERSION = "old_version"
    """The version is not newer than the present version."""
    TIMEOUT = "timeout"
    """The command did not finish within its timeout."""
    CACHE_IN_USE = "cache_in_use"
    """The engine could not reset the prefix cache."""
    ENGINE_ERROR = "engine_error"
    """The engine rejected the command or failed. Its state is unchanged."""
    HALF_WRITTEN = "half_written"
    """The engine failed while it replaced its weights. It serves nothing."""
    NOT_VERIFIED = "not_verified"
    """The canary shows wrong results. The worker serves nothing."""
    UNSUPPORTED = "unsupported"
    """The engine does not support the command."""
    STALE = "stale"
    """A later command replaced this command."""
    NOT_FOUND = "not_found"
    """The worker has none of the named items."""
    NOT_SERVING = "not_serving"
    """The worker's state forbids the command: it is starting, fenced or poisoned."""
    NOT_ALLOWED = "not_allowed"
    """The author may not send this command, or not for this model, or signed it too long ago."""
    PUBLISHER_BUSY = "publisher_busy"
    """Another publisher holds the lease of the model's published weights."""
    OTHER_CONTENT = "other_content"
    """The source holds other content than was recorded, or workers found different content there."""
    TRANSFER_HELD = "transfer_held"
    """Another owner has an open transfer of weights."""
    TRANSFER_EXPIRED = "transfer_expired"
    """No transfer of weights is open, or not the one that the command names."""
    TRANSFER_EMPTY = "transfer_empty"
    """The transfer of weights received no chunk."""
    IS_ADAPTER = "is_adapter"
    """The source is a LoRA adapter, where a whole checkpoint is needed."""
    UNKNOWN = "unknown"
    """Never sent: the value for a newer worker's code."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if a full disk, or a limit of disk space, caused the error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


class RollbusError(Exception):
    """Base class of all errors that rollbus raises."""


class BusClosed(RollbusError):
    """The client or worker was closed locally before or during an operation."""


class BusBroken(RollbusError):
    """The connection to NATS failed, was rejected, or was lost permanently."""


class PermissionDenied(BusBroken):
    """NATS denies the user of this connection the permission to publish or subscribe.

    Attributes:
        action: `publish` or `subscribe`.
        subject: the subject of the denied operation.
    """

    def __init__(self, message: str, *, action: str, subject: str) -> None:
        self.action = action
        self.subject = subject
        super().__init__(message)
        # Tracebacks show it, and with them the command line with -v.
        self.add_note(f"denied: {action} {subject}")


class ServerUnreachable(BusBroken):
    """No NATS server answered at any of the addresses in time. A server may still start later."""


class TlsFailed(BusBroken):
    """TLS is required, but the server offers none, or one side rejects the other side's certificate.

    Attributes:
        problem: the failure, with the server's address.
        advice: the next step.
    """

    def __init__(self, *, problem: str, advice: str) -> None:
        self.problem = problem
        self.advice = advice
        super().__init__(f"{problem}; {advice}")


class DuplicateWorker(RollbusError):
    """Another live worker has held this worker's id for longer, so this worker must exit."""


class EngineDead(RollbusError):
    """The engine is dead, and its worker must exit."""


class LocalProtocolError(RollbusError):
    """This process was about to break the protocol: a bug in this process or in the engine, never in the peer."""


class RemoteProtocolError(RollbusError):
    """A peer sent bytes that do not decode, or a message that breaks the protocol."""


class ControlError(RollbusError):
    """A command was rejected before any worker received it, or a worker did not execute it.

    Attributes:
        code: reason for programs.
        message: one sentence for people: the field or file, the problem, the allowed values.
    """

    def __init__(self, code: ControlCode, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{code}: {message}")


def bad_source(*words: object) -> ControlError:
    """Return the error for a source that cannot be used. Its message consists of `words`, joined by spaces."""
    return ControlError(ControlCode.BAD_SOURCE, " ".join(map(str, words)))


def storage_failure(message: str) -> ControlError:
    """Return the error for a store or a disk that rejects or lacks something."""
    return ControlError(ControlCode.STORAGE, message)


class RequestError(RollbusError):
    """One request failed.

    Attributes:
        code: reason for programs.
        request_id: id of the request; empty if the error arose before the request had an id.
        message: one sentence for people, without prompts or tokens.
    """

    def __init__(self, *, code: ErrorCode, message: str, request_id: str = "") -> None:
        self.code = code
        self.message = message
        self.request_id = request_id
        super().__init__(f"{code}: {message}" + (f" (request {request_id})" if request_id else ""))

    @property
    def retryable(self) -> bool:
        """True if the same request may succeed on a retry."""
        return self.code.facts.retryable


class RequestRejected(RequestError):
    """The request failed before a worker accepted it."""


class InvalidRequest(RequestRejected, ValueError):
    """A field of a request is wrong.

    Attributes:
        field: name of the field, with dots for nested fields: `sampling.top_p`.
        problem: problem of its value.
        allowed: allowed values.
    """

    def __init__(self, field: str, problem: str, allowed: str, *, request_id: str = "") -> None:
        self.field = field
        self.problem = problem
        self.allowed = allowed
        super().__init__(
            code=ErrorCode.INVALID_REQUEST, message=f"{field} {problem}; allowed: {allowed}", request_id=request_id
        )


class NoWorkers(RequestRejected):
    """No live worker serves the model."""

    def __init__(self, *, message: str, request_id: str = "") -> None:
        super().__init__(code=ErrorCode.NO_WORKERS, message=message, request_id=request_id)


class RequestTimeout(RequestError):
    """The request's deadline passed.

    Attributes:
        stage: stage of the request at the deadline: `admission` or `generation`.
    """

    def __init__(self, *, stage: str, message: str, request_id: str = "") -> None:
        self.stage = stage
        super().__init__(code=ErrorCode.TIMEOUT, message=message, request_id=request_id)


class RequestFailed(RequestError):
    """The request failed after a worker accepted it."""


def request_error(
    code: ErrorCode, message: str, *, request_id: str = "", field: str = "", problem: str = "", allowed: str = ""
) -> RequestError:
    """Return the exception for `code`, which the caller of a request receives for the error of a terminal chunk."""
    if code is ErrorCode.INVALID_REQUEST and field:
        return InvalidRequest(field, problem, allowed, request_id=request_id)
    if code is ErrorCode.NO_WORKERS:
        return NoWorkers(message=message, request_id=request_id)
    if code is ErrorCode.TIMEOUT:
        return RequestTimeout(stage="generation", message=message, request_id=request_id)
    kind = RequestFailed if code.facts.admitted else RequestRejected
    return kind(code=code, message=message, request_id=request_id)


class ForeignError(Exception):
    """Foreign code failed. The text is `type: message` of the original exception.

    Attributes:
        cause: the original exception.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


@contextmanager
def foreign_code(*known: type[Exception]) -> Iterator[None]:
    """Run the body and pass on only exceptions of the types `known` unchanged.

    vLLM, torch, transformers and others do not document which exceptions they raise.

    Raises:
        ForeignError: the body raised any other exception.
    """
    try:
        yield
    except known:
        raise
    except Exception as exc:
        # Boundary: otherwise a new exception type of a foreign release would end an engine, a worker or a service.
        raise ForeignError(exc) from exc

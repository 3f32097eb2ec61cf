"""Everything that can go wrong, as exceptions for callers and as codes on the wire.

RollbusError
├── BusClosed                 this client or worker was closed locally
├── BusBroken                 the connection to NATS failed or was refused
│   ├── PermissionDenied      NATS does not let this user publish or subscribe there; carries `action` and `subject`
│   ├── ServerUnreachable     no NATS server answered
│   └── TlsFailed             TLS is required, and there is none; carries `problem` and `advice`
├── EngineDead                the engine is gone; its worker exits
├── LocalProtocolError        this side was about to break the protocol: a bug here or in the engine
├── RemoteProtocolError       a peer sent something that breaks the protocol
├── ControlError              a command was refused, or a worker did not carry it out; carries `code`
├── CommandIncomplete         not every worker applied a command; carries `ledger`, a `CommandResult`
└── RequestError              one request failed; carries `code`, `request_id` and `retryable`
    ├── RequestRejected       before a worker admitted it
    │   ├── InvalidRequest    a field is wrong; carries `field`, `problem` and `allowed`
    │   └── NoWorkers         no live worker serves the model
    ├── RequestTimeout        its deadline passed
    └── RequestFailed         after a worker admitted it
"""

import enum
from typing import Final, NamedTuple

__all__ = [
    "ERRORS",
    "BusBroken",
    "BusClosed",
    "ControlCode",
    "ControlError",
    "DuplicateWorker",
    "EngineDead",
    "ErrorCode",
    "ErrorFacts",
    "InvalidRequest",
    "LocalProtocolError",
    "NoWorkers",
    "PermissionDenied",
    "RemoteProtocolError",
    "RequestError",
    "RequestFailed",
    "RequestRejected",
    "RequestTimeout",
    "RollbusError",
    "ServerUnreachable",
    "TlsFailed",
    "request_error",
]


class ErrorCode(enum.StrEnum):
    """Why a request failed, as it stands in a terminal chunk. Append-only; `ERRORS` says what each means."""

    INVALID_REQUEST = "invalid_request"
    UNKNOWN_MODEL = "unknown_model"
    UNSUPPORTED = "unsupported"
    DUPLICATE_REQUEST = "duplicate_request"
    TOO_LARGE = "too_large"
    NO_WORKERS = "no_workers"
    QUEUE_FULL = "queue_full"
    TIMEOUT = "timeout"
    WEIGHTS_TOO_OLD = "weights_too_old"
    TOO_STALE = "too_stale"
    WORKER_LOST = "worker_lost"
    WORKER_STOPPED = "worker_stopped"
    FRAMES_LOST = "frames_lost"
    PROTOCOL_ERROR = "protocol_error"
    ENGINE_ERROR = "engine_error"
    ENGINE_DEAD = "engine_dead"
    CLIENT_CLOSED = "client_closed"
    POISON_REQUEST = "poison_request"
    WORKER_FENCED = "worker_fenced"
    CLIENT_LOST = "client_lost"
    OVER_BUDGET = "over_budget"
    PERMISSION_DENIED = "permission_denied"
    KV_TRANSFER_FAILED = "kv_transfer_failed"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> "ErrorCode":
        """Read a code that a newer peer appended as UNKNOWN, so that its frame still decodes."""
        return cls.UNKNOWN


class ErrorFacts(NamedTuple):
    """What an `ErrorCode` means."""

    meaning: str
    fault: str
    """Who has to act: `client`, `worker`, `fleet` (its operator) or `network`."""
    retryable: bool
    """The same request may succeed when sent again."""
    admitted: bool
    """A worker may have started on the request before it failed."""


ERRORS: Final[dict[ErrorCode, ErrorFacts]] = {
    ErrorCode.INVALID_REQUEST: ErrorFacts("a field of the request is wrong", "client", False, False),
    ErrorCode.UNKNOWN_MODEL: ErrorFacts("no worker serves a model of this name", "client", False, False),
    ErrorCode.UNSUPPORTED: ErrorFacts("the model or engine cannot do what was asked", "client", False, False),
    ErrorCode.DUPLICATE_REQUEST: ErrorFacts("this client has a live request of the same id", "client", False, False),
    ErrorCode.TOO_LARGE: ErrorFacts(
        "the request, or one row of its routing, exceeds the server's max_payload", "client", False, False
    ),
    ErrorCode.NO_WORKERS: ErrorFacts("no live worker serves the model", "fleet", True, False),
    ErrorCode.QUEUE_FULL: ErrorFacts("as many requests wait as may wait", "fleet", True, False),
    ErrorCode.TIMEOUT: ErrorFacts("the request's timeout_s passed", "fleet", True, True),
    ErrorCode.WEIGHTS_TOO_OLD: ErrorFacts("the weights are older than min_weight_version", "fleet", True, False),
    ErrorCode.TOO_STALE: ErrorFacts("the weights moved on by more than max_weight_lag", "client", False, False),
    ErrorCode.WORKER_LOST: ErrorFacts("the worker's lease expired", "worker", True, True),
    ErrorCode.WORKER_STOPPED: ErrorFacts("the worker shut down before it had finished", "worker", True, True),
    ErrorCode.FRAMES_LOST: ErrorFacts("frames between worker and client were lost", "network", True, True),
    ErrorCode.PROTOCOL_ERROR: ErrorFacts("the worker's chunks contradict each other", "worker", True, True),
    ErrorCode.ENGINE_ERROR: ErrorFacts("the engine failed this request alone", "worker", True, True),
    ErrorCode.ENGINE_DEAD: ErrorFacts("the engine died; its worker exits", "worker", True, True),
    ErrorCode.CLIENT_CLOSED: ErrorFacts("the client was closed before the request had ended", "client", True, True),
    ErrorCode.POISON_REQUEST: ErrorFacts("engines died of it; it is not tried again", "client", False, True),
    ErrorCode.WORKER_FENCED: ErrorFacts("the worker lives but will not serve it", "worker", True, True),
    ErrorCode.CLIENT_LOST: ErrorFacts("the client's lease expired at the worker", "client", True, True),
    ErrorCode.OVER_BUDGET: ErrorFacts("the worker held more unread results than it may", "client", True, True),
    ErrorCode.PERMISSION_DENIED: ErrorFacts("this client's NATS user may not do what it takes", "client", False, False),
    ErrorCode.KV_TRANSFER_FAILED: ErrorFacts(
        "the KV cache did not get from the prefill worker to the decode worker", "worker", True, True
    ),
    ErrorCode.UNKNOWN: ErrorFacts("a newer peer's code that this side does not know", "worker", False, True),
}


class ControlCode(enum.StrEnum):
    """Why a command was not carried out. Append-only."""

    INVALID_COMMAND = "invalid_command"
    """It does not decode, or a field is wrong."""
    PATH_REFUSED = "path_refused"
    """The source's real path is not below an allowed root."""
    BAD_SOURCE = "bad_source"
    """The checkpoint or adapter is incomplete, damaged, or of another model. Nothing was touched."""
    STORAGE = "storage"
    """Files could not be fetched or written."""
    OLD_VERSION = "old_version"
    """The version is not newer than the present one."""
    TIMEOUT = "timeout"
    """Not done in time."""
    CACHE_IN_USE = "cache_in_use"
    """The prefix cache could not be reset."""
    ENGINE_ERROR = "engine_error"
    """The engine refused or failed; it is as it was."""
    HALF_WRITTEN = "half_written"
    """The engine failed while its weights were replaced: it serves nothing."""
    NOT_VERIFIED = "not_verified"
    """The weights were loaded, and the canary says that they are not what they should be: it serves nothing."""
    UNSUPPORTED = "unsupported"
    """The engine cannot do it."""
    STALE = "stale"
    """A later command has taken its place."""
    NOT_FOUND = "not_found"
    """Nothing of what was named is here."""
    NOT_SERVING = "not_serving"
    """The worker's own state forbids it: it starts, is fenced, or is poisoned."""
    NOT_ALLOWED = "not_allowed"
    """The author of the command may not give it, or not for this model; or it was signed too long ago."""
    PUBLISHER_BUSY = "publisher_busy"
    """Another publisher holds the lease of the model's published weights."""
    UNKNOWN = "unknown"
    """Never sent: how this side reads a code that a newer worker appended."""

    @classmethod
    def _missing_(cls, value: object) -> "ControlCode":
        return cls.UNKNOWN


class RollbusError(Exception):
    """Root of all errors raised by this software."""


class BusClosed(RollbusError):
    """The client or worker was closed locally while, or before, something needed it."""


class BusBroken(RollbusError):
    """The connection to NATS could not be made, or was refused or lost for good."""


class PermissionDenied(BusBroken):
    """NATS does not let the user of this connection publish or subscribe somewhere.

    Attributes:
        action: `publish` or `subscribe`.
        subject: where.
    """

    def __init__(self, *, user: str, action: str, subject: str) -> None:
        self.action = action
        self.subject = subject
        super().__init__(f"{user} may not {action} {'to' if action == 'subscribe' else 'on'} {subject}")


class ServerUnreachable(BusBroken):
    """No NATS server answered at any of the addresses in time; it may yet be started."""


class TlsFailed(BusBroken):
    """TLS is required, and the server offers none, or its certificate or ours is refused.

    Attributes:
        problem: what happened, with the server's address.
        advice: the next step.
    """

    def __init__(self, *, problem: str, advice: str) -> None:
        self.problem = problem
        self.advice = advice
        super().__init__(f"{problem}; {advice}")


class DuplicateWorker(RollbusError):
    """Another live worker has held this worker's id for longer, so this one must exit."""


class EngineDead(RollbusError):
    """The engine is gone and its worker must exit."""


class LocalProtocolError(RollbusError):
    """This side was about to break the protocol: a bug here or in the engine, never the peer's fault."""


class RemoteProtocolError(RollbusError):
    """A peer sent bytes that do not decode, or a message that breaks the protocol."""


class ControlError(RollbusError):
    """A command was refused before any worker heard of it, or, in a worker, not carried out.

    Attributes:
        code: why.
        message: one sentence for people: the field or file, what is wrong with it, what is allowed.
    """

    def __init__(self, code: ControlCode, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{code}: {message}")


class RequestError(RollbusError):
    """One request failed.

    Attributes:
        code: why.
        request_id: which request; empty where the error arose before it had an id.
        message: one sentence for people, without prompts or tokens.
    """

    def __init__(self, *, code: ErrorCode, message: str, request_id: str = "") -> None:
        self.code = code
        self.message = message
        self.request_id = request_id
        super().__init__(f"{code}: {message}" + (f" (request {request_id})" if request_id else ""))

    @property
    def retryable(self) -> bool:
        """The same request may succeed when sent again."""
        return ERRORS[self.code].retryable


class RequestRejected(RequestError):
    """The request failed before a worker admitted it."""


class InvalidRequest(RequestRejected, ValueError):
    """A field of a request is wrong.

    Attributes:
        field: its name, dotted for nested fields: `sampling.top_p`.
        problem: what is wrong with its value.
        allowed: what is allowed.
    """

    def __init__(self, *, field: str, problem: str, allowed: str, request_id: str = "") -> None:
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
        stage: what it was waiting for: `admission` or `generation`.
    """

    def __init__(self, *, stage: str, message: str, request_id: str = "") -> None:
        self.stage = stage
        super().__init__(code=ErrorCode.TIMEOUT, message=message, request_id=request_id)


class RequestFailed(RequestError):
    """The request failed after a worker admitted it."""


def request_error(
    code: ErrorCode, message: str, *, request_id: str = "", field: str = "", problem: str = "", allowed: str = ""
) -> RequestError:
    """Build the exception that fits `code`, as a terminal chunk's error is turned into what a caller catches."""
    if code is ErrorCode.INVALID_REQUEST and field:
        return InvalidRequest(field=field, problem=problem, allowed=allowed, request_id=request_id)
    if code is ErrorCode.NO_WORKERS:
        return NoWorkers(message=message, request_id=request_id)
    if code is ErrorCode.TIMEOUT:
        return RequestTimeout(stage="generation", message=message, request_id=request_id)
    kind = RequestFailed if ERRORS[code].admitted else RequestRejected
    return kind(code=code, message=message, request_id=request_id)

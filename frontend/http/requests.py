"""Conversion of an HTTP request to a token request of the bus, with its trace and the service's span of it.

The trace that a client's request belongs to follows W3C Trace Context, section 3. All other spans of the request are
below the service's span.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.requests import Request

from ... import bus
from ...bus.client.client import runtime_of
from ...bus.tracing import names
from ...bus.tracing.spans import Attribute, Clock, Span, SpanContext, Tracer
from ...schemas import limits
from ...schemas.checks import TRACEPARENT_PATTERN, check_name, describe, list_names, trim_tracestate
from ...schemas.decoding import JsonObject
from ...schemas.errors import BusBroken, ErrorCode, InvalidRequest, RequestError, RollbusError
from ...schemas.presence import Capabilities, WorkerPresence
from ...schemas.request_fields import check_fits, check_sampling
from .edge import REQUEST_ID_HEADER, given_request_id, while_connected
from .errors import HttpError, http_error, invalid, no_workers, without_paths
from .metrics import HttpRequestRecord
from .service import MIN_LEFT_S, Service

_ANY_VERSION: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})(?P<ids>-[0-9a-f]+-[0-9a-f]+)-(?P<flags>[0-9a-f]+)(?P<more>-.*)?"
)
"""A `traceparent` of any version. Later versions append fields to the known ones."""


class GivenTrace(NamedTuple):
    """A client's trace context in the form that the service forwards."""

    traceparent: str
    """The `traceparent` in version 00."""
    tracestate: str | None


def given_trace(headers: Headers, *, is_trusted: bool) -> GivenTrace | None:
    """Return the trace context in `headers`; None if there is none, if there are several, or if it is malformed.

    If the trace is malformed, a new trace begins, as the standard requires. The request is not rejected.

    Args:
        is_trusted: the client may have its request sampled. Otherwise its flags are ignored.
    """
    given = headers.getlist("traceparent")
    if len(given) != 1:
        return None
    found = _ANY_VERSION.fullmatch(given[0].strip(" \t"))
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"] is not None):
        return None
    known = f"00{found['ids']}-{found['flags']}"
    if TRACEPARENT_PATTERN.fullmatch(known) is None:
        return None
    state = ",".join(headers.getlist("tracestate"))
    return GivenTrace(known if is_trusted else f"00{found['ids']}-00", trim_tracestate(state))


GROUP_ID_HEADER = "X-Group-ID"
SESSION_ID_HEADER = "X-Session-ID"
SESSION_ID = re.compile(r"ses-[0-9a-f]{32}")
"""The ids of agents' sessions. Other names of sessions are hints for placement, and are not looked up."""
TIMEOUT_HEADER = "X-Request-Timeout"
FIRST_NAME = re.compile(r"[.\[]")
"""The end of the first name in a field such as `sampling.top_p`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTarget:
    """The model or adapter that a request names."""

    worker: WorkerPresence
    """A worker that serves it. Other workers may serve it too."""
    capabilities: Capabilities
    """Capabilities of that worker's model."""
    lora: str | None
    """The adapter; None for the base model."""

    @property
    def name(self) -> str:
        """Name of the model in answers: the adapter's name, if there is one."""
        return self.lora or self.worker.model

    def room(self, prompt_len: int) -> int:
        """Return the number of tokens that the model's context leaves after a prompt."""
        return self.capabilities.max_model_len - prompt_len


async def find_target(
    service: Service, request: Request, name: str | None, timeout_s: float | None = None
) -> RequestTarget:
    """Return the model or adapter of that name. Without a name, return `--default-model`, or the only known model.

    If a worker of the model starts, wait up to `max_wait_s` until it serves. The body must be read before.

    Args:
        timeout_s: timeout of the request in its body.

    A model is known if a live worker or a stored desired state names it. The service remembers no earlier request, so
    all services of a fleet answer alike.

    Raises:
        HttpError: 404, the name is unknown; 503, the model or all models have no workers, or they do not start within
            `max_wait_s`; 504, they do not start within the timeout; 400, there is no name and several models are known,
            or several models have an adapter of that name.
        ClientDisconnect: the client disconnected while a worker started.
    """
    # An empty name is a missing name, as in vLLM.
    model = name or service.settings.default_model or await _only_model(service)
    target = service.targets(model)
    if target is None:
        timeout_s = _timeout_s(service, request, timeout_s)
        with while_connected(request.scope):
            target = await _wait_for_target(service, request, model, timeout_s)
    service.is_for(request, (target.worker.model,))
    request.scope["state"]["seen"].model = target.worker.model
    return target


def find_announced(workers: Sequence[WorkerPresence], model: str) -> RequestTarget | None:
    """Return the model or adapter of that name that workers announce; None if no started worker does.

    Raises:
        HttpError: 400, several models have an adapter of that name.
    """
    # The name of a model wins over the name of an adapter.
    of_model = [worker for worker in workers if worker.model == model]
    having = of_model or [worker for worker in workers if any(lora.name == model for lora in worker.loras)]
    bases = sorted({worker.model for worker in having})
    if len(bases) > 1:
        message = f"model {model!r} is an adapter of several models: {list_names(bases)}; load it under other names"
        raise HttpError(400, message, code=ErrorCode.INVALID_REQUEST, param="model")
    for worker in having:
        if worker.capabilities is not None:
            return RequestTarget(worker=worker, capabilities=worker.capabilities, lora=None if of_model else model)
    return None


async def _wait_for_target(service: Service, request: Request, model: str, timeout_s: float) -> RequestTarget:
    # The ack of another service may be newer than presence, so the record decides before anything is refused.
    refusal, bases = await _not_served(service, model)
    if (target := service.targets(model)) is not None:
        return target
    runtime, seconds = runtime_of(service.rb), min(service.settings.max_wait_s, timeout_s)
    watcher = runtime.watcher
    if watcher.snapshot.awaited.isdisjoint(bases):
        raise refusal
    service.is_for(request, bases)

    def has_ended() -> bool:
        fleet = watcher.snapshot
        return not fleet.serving.isdisjoint(bases) or fleet.awaited.isdisjoint(bases)

    begun = time.monotonic()
    if not await runtime.thread.run(watcher.wait_until(has_ended, seconds)):
        others = without_paths("".join(watcher.snapshot.describe_others(base) for base in bases))
        message = f"no worker has served model {model!r} for {seconds:g} s{others}"
        status, code = (503, ErrorCode.NO_WORKERS) if seconds < timeout_s else (504, ErrorCode.TIMEOUT)
        raise HttpError(status, message, code=code)
    # Counts in the timeout and in `max_wait_s` of what follows.
    request.state.waited_s = time.monotonic() - begun
    target = service.targets(model)
    if target is None:
        refusal, _ = await _not_served(service, model)
        raise refusal
    return target


async def _only_model(service: Service) -> str:
    """Return the only known model."""
    try:
        known = await service.rb.fleet.known_models()
    except BusBroken as exc:
        raise no_workers(f"model is missing, and the fleet's models are unknown: {exc}") from exc
    if not known:
        raise no_workers("the fleet has no workers")
    if len(known) > 1:
        message = f"model is missing; allowed: {list_names(known)}; the option --default-model sets a default"
        raise HttpError(400, message, code=ErrorCode.INVALID_REQUEST, param="model")
    return known[0]


async def _not_served(service: Service, model: str) -> tuple[HttpError, Sequence[str]]:
    """Return the error for a model or adapter that no worker announces, and the models whose workers may serve it.

    Wait up to a second for a recorded adapter.
    """
    fleet, snapshot = service.rb.fleet, runtime_of(service.rb).watcher.snapshot
    others = without_paths(snapshot.describe_others(model))
    if any(worker.model == model for worker in fleet.workers):
        return no_workers(f"model {model!r} is starting{others}"), (model,)
    try:
        known = await fleet.known_models()
        bases = () if model in known else await fleet.models_with_adapter(model)
    except BusBroken as exc:
        return no_workers(f"no worker serves model {model!r}: {exc}"), ()
    if model in known:
        return no_workers(f"model {model!r} has no workers{others}"), (model,)
    if bases:
        live = {worker.model for worker in fleet.workers}.intersection(bases)
        problem = "is not loaded yet" if live else "has no workers"
        message = f"model {model!r}, an adapter of {list_names(bases)}, {problem}"
        return no_workers(message), bases
    if not known:
        return no_workers(f"the fleet has no workers{others}"), ()
    message = f"model {describe(model)} is unknown; allowed: {list_names(known)}"
    return HttpError(404, message, code=ErrorCode.UNKNOWN_MODEL, param="model"), ()


def check_length(field: str, prompt_len: int, target: RequestTarget) -> None:
    """Check that a prompt leaves room for an answer.

    Raises:
        HttpError: 400, the prompt is too long. Clients search the message for "maximum context length".
    """
    if target.room(prompt_len) < 1:
        longest = target.capabilities.max_model_len
        raise HttpError(
            400,
            f"{field} has {prompt_len} tokens, and this model's maximum context length is {longest} "
            f"tokens; allowed: 1 to {longest - 1} tokens",
            code="context_length_exceeded",
            param=field,
        )


Names = Callable[[], Mapping[str, str]]
"""Returns a route's names for the bus's fields, for `named_errors`. Only an error needs them."""


def build_request(
    service: Service,
    request: Request,
    target: RequestTarget,
    *,
    sampling: Mapping[str, Any] | bus.SamplingParams,
    fields: Mapping[str, Any],
    names: Names,
) -> bus.GenerateRequest:
    """Build the token request and check it against the model. This publishes nothing.

    The function reads the headers `X-Request-Id`, `X-Session-ID`, `X-Group-ID`, `traceparent` and `tracestate`, and
    sets the deadline. On the bus, the names of sessions and groups are specific to this user.

    Args:
        sampling: the sampling parameters, after `check_sampling`, or their fields. If `max_tokens` is None, the rest
            of the model's context is used.
        fields: other fields of `rollbus.GenerateRequest`, at least `prompt_token_ids`. If `request_id` is None, a new
            id is generated.
        names: the route's names of the bus's fields, see `named_errors`.

    Raises:
        HttpError: 400, naming the route's field.
    """
    headers, state = request.headers, request.scope["state"]
    trace: GivenTrace | None = state["trace"]
    given: JsonObject = {
        "session_id": headers.get(SESSION_ID_HEADER),
        "group_id": headers.get(GROUP_ID_HEADER),
        **fields,
        "model": target.worker.model,
        "lora": target.lora,
        "timeout_s": _timeout_s(service, request, fields.get("timeout_s")),
    }
    if trace is not None:
        given |= {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
    user = service.user_of(request)
    with named_errors(names):
        if not isinstance(sampling, bus.SamplingParams):
            sampling = bus.SamplingParams(**sampling)
            check_sampling(sampling, target.capabilities)
        for name in ("session_id", "group_id"):
            if given[name] is not None:
                # Another user's requests with the same name do not affect the placement of this user's.
                of_user = f"{user}\0{check_name(name, given[name])}".encode()
                given[name] = hashlib.blake2b(of_user, digest_size=16).hexdigest()
        given |= _request_id(request, fields.get("request_id"), user)
        built = bus.GenerateRequest(sampling=sampling, **given)
        if state["waited_s"]:
            built = replace(built, timeout_s=max(given["timeout_s"] - state["waited_s"], MIN_LEFT_S))
        check_fits(built, target.capabilities)
    return built


def _timeout_s(service: Service, request: Request, from_body: float | None) -> float:
    """Return the timeout of a request in seconds.

    Raises:
        HttpError: 400, the timeout in the header is not valid. The error names the header.
    """
    if from_body is not None:
        return from_body
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return service.settings.timeout_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= limits.MAX_TIMEOUT_S:
        problem = f"is {describe(given)}"
        raise invalid(TIMEOUT_HEADER, problem, f"seconds, above 0 and up to {limits.MAX_TIMEOUT_S:g}")
    return seconds


def _request_id(request: Request, from_body: str | None, user: str) -> dict[str, str]:
    """Return the fields for the id in the header or in the body, or for a new id.

    An id that the client chose is unique among the open requests of its user. Other users may have the same id.

    Raises:
        InvalidRequest: the id in the header is not valid.
    """
    given = given_request_id(request.headers) or from_body
    return (
        {"request_id": request.scope["state"]["new_id"]} if given is None else {"request_id": given, "id_scope": user}
    )


def id_headers(request_id: str) -> dict[str, str]:
    """Return the headers of every answer to a token request. `Edge` leaves out an empty header."""
    return {REQUEST_ID_HEADER: request_id if request_id.isascii() else ""}


class named_errors(AbstractContextManager[None]):  # noqa: N801
    """Converts the bus's errors to HTTP errors, with the route's names for fields and with the request's id.

    A class, because each request enters several, and a generator takes three times as long.

    Args:
        names: the route's name by the bus's name or its prefix. `{"sampling": "", "prompt_token_ids": "prompt"}`
            converts `sampling.top_p` to `top_p` and `prompt_token_ids[3]` to `prompt[3]`. The longest prefix applies.

    Raises:
        HttpError: for every `RollbusError`.
    """

    def __init__(self, names: Names, request: bus.GenerateRequest | None = None) -> None:
        self._names = names
        self._request = request

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, HttpError | RollbusError):
            return
        failure = error if isinstance(error, HttpError) else self._converted(error)
        if self._request is not None:
            failure.headers.update(id_headers(self._request.request_id))
        if failure is not error:
            raise failure from error

    def _converted(self, error: RollbusError) -> HttpError:
        if not isinstance(error, RequestError) or (field := _field_of(error)) is None:
            return http_error(error)
        in_headers = {"session_id": SESSION_ID_HEADER, "group_id": GROUP_ID_HEADER}
        name = _route_name(field, {**in_headers, **self._names()})
        return HttpError(400, f"{name}{error.message.removeprefix(field)}", code=error.code, param=name)


def _field_of(error: RequestError) -> str | None:
    """Return the bus's name of the field that is wrong; None if the error is not about a field.

    A worker's error has it only as the first word of its message.
    """
    if isinstance(error, InvalidRequest):
        return error.field
    first = error.message.partition(" ")[0]
    is_field = FIRST_NAME.split(first)[0] in bus.GenerateRequest.__struct_fields__
    return first if is_field and error.code is ErrorCode.INVALID_REQUEST else None


def _route_name(field: str, names: Mapping[str, str]) -> str:
    for at in range(len(field), 0, -1):
        begin, rest = field[:at], field[at:]
        if begin in names and (not rest or rest[0] in ".[ "):
            return f"{names[begin]}{rest}".lstrip(".")
    return field


@contextmanager
def server_span(
    tracer: Tracer, request: Request, route: str, seen: HttpRequestRecord, given: GivenTrace | None, *, is_trusted: bool
) -> Iterator[GivenTrace]:
    """Trace a request until its answer is sent. Yield what it forwards.

    Args:
        seen: has the status of the answer, as soon as there is one.
        given: the client's trace.
        is_trusted: the client may have its request sampled, and its own trace continues. Otherwise a new trace begins
            here, with a link to the client's trace. An untrusted client could choose ids that are always sampled.
    """
    caller = None if given is None else SpanContext.parse(given.traceparent, given.tracestate)
    parent, links = (caller, ()) if is_trusted or caller is None else (None, (caller,))
    name, clock, began_at = f"{request.method} {route}", Clock(), time.monotonic()
    context = tracer.start(name, "server", parent, links)
    try:
        yield GivenTrace(context.traceparent, context.tracestate)
    finally:
        if context.is_sampled:
            attributes: dict[str, Attribute] = {
                names.HTTP_METHOD: request.method,
                names.HTTP_ROUTE: route,
                names.HTTP_STATUS: seen.status,
                names.URL_PATH: request.url.path,
                names.URL_SCHEME: request.url.scheme,
            }
            error = str(seen.status) if seen.status >= 500 else None
            if error is not None:
                attributes[names.ERROR_TYPE] = error
            span = Span(
                name=name,
                kind="server",
                context=context,
                parent=parent,
                start_ns=clock.unix_ns(began_at),
                end_ns=clock.unix_ns(time.monotonic()),
                attributes=attributes,
                links=links,
                error=error,
            )
            tracer.export([span])

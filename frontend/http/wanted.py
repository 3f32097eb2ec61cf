"""From an HTTP request to a request for tokens: what all routes that generate have in common."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

import bus
from frontend.http.edge import REQUEST_ID_HEADER, given_request_id
from frontend.http.errors import HttpError, http_error
from frontend.http.service import Service
from frontend.http.trace import traceparent_of
from schemas.errors import ErrorCode, InvalidRequest, RollbusError
from schemas.model_limits import check_model_limits
from schemas.presence import Capabilities, WorkerPresence

__all__ = ["Target", "find_target", "id_headers", "make_wanted", "named_errors"]

SESSION_ID_HEADER = "X-Session-ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who a request is for."""

    worker: WorkerPresence
    """One that serves it; others may too."""
    capabilities: Capabilities
    """What that worker's model can do."""
    lora: str | None
    """The adapter; None: the base model."""

    @property
    def name(self) -> str:
        """What answers call the model: the adapter's name, if there is one."""
        return self.lora or self.worker.model

    def room(self, prompt_len: int) -> int:
        """How many tokens the model's context leaves after a prompt."""
        return self.capabilities.max_model_len - prompt_len


def find_target(service: Service, name: str | None) -> Target:
    """The model of that name, or the adapter; without a name, the fleet's only model.

    Raises:
        HttpError: 404 if nobody serves it, 503 if there are no workers or they are starting, 400 if there are several
            models to choose from.
    """
    workers = service.workers()
    if not workers:
        raise HttpError(503, "no workers are there", code=ErrorCode.NO_WORKERS)
    models = sorted({worker.model for worker in workers})
    allowed = f"allowed: {', '.join(models)}"
    if name is None and len(models) > 1:
        raise HttpError(400, f"model is missing; {allowed}", code=ErrorCode.INVALID_REQUEST, param="model")
    wanted = models[0] if name is None else name
    found = None
    for worker in workers:
        if worker.capabilities is None:
            continue
        if worker.model == wanted:
            found = Target(worker=worker, capabilities=worker.capabilities, lora=None)
            break
        if any(lora.name == wanted for lora in worker.loras):
            found = Target(worker=worker, capabilities=worker.capabilities, lora=wanted)
    if found is None and wanted in models:
        raise HttpError(503, f"model {wanted!r} is starting", code=ErrorCode.NO_WORKERS)
    if found is None:
        raise HttpError(404, f"model {wanted!r} is unknown; {allowed}", code=ErrorCode.UNKNOWN_MODEL, param="model")
    service.metrics.is_for(found.worker.model)
    return found


def make_wanted(
    service: Service,
    request: Request,
    target: Target,
    *,
    sampling: Mapping[str, Any],
    fields: Mapping[str, Any],
    names: Mapping[str, str],
) -> bus.GenerateRequest:
    """Make the request for tokens, checked against the model: nothing has been published yet.

    The headers' part is done here: `X-Request-Id`, `X-Session-ID` and `traceparent`; so is the deadline.

    Args:
        sampling: fields of `bus.SamplingParams`; `max_tokens` None: the rest of the model's context.
        fields: others of `bus.GenerateRequest`, `prompt_token_ids` at least; a `request_id` of None is drawn.
        names: what the route calls the bus's fields, see `named_errors`.

    Raises:
        HttpError: 400, naming the route's field.
    """
    headers = request.headers
    common: dict[str, Any] = {
        "model": target.worker.model,
        "lora": target.lora,
        "session_id": headers.get(SESSION_ID_HEADER),
        "traceparent": traceparent_of(headers),
        "timeout_s": service.settings.timeout_s,
    }
    with named_errors(names):
        wanted = bus.GenerateRequest(
            sampling=bus.SamplingParams(**sampling),
            **{**common, **fields, "request_id": _request_id(headers, fields.get("request_id"))},
        )
        check_model_limits(wanted, target.capabilities)
    return wanted


def _request_id(headers: Mapping[str, str], from_body: str | None) -> str:
    """The header's, as with vLLM, if it can be used; else the body's, which must; else a new one."""
    return given_request_id(headers) or (uuid.uuid4().hex if from_body is None else from_body)


def id_headers(wanted: bus.GenerateRequest) -> dict[str, str]:
    """Headers of every answer to a request for tokens."""
    return {REQUEST_ID_HEADER: wanted.request_id}


@contextmanager
def named_errors(names: Mapping[str, str], wanted: bus.GenerateRequest | None = None) -> Iterator[None]:
    """Turn the bus's errors into those of HTTP, with a route's own names for fields and the request's id.

    Args:
        names: by the bus's name, or the beginning of it: `{"sampling": "", "prompt_token_ids": "prompt"}` makes
            `sampling.top_p` `top_p` and `prompt_token_ids[3]` `prompt[3]`. The longest one counts.

    Raises:
        HttpError: for every `RollbusError`.
    """
    try:
        yield
    except (HttpError, RollbusError) as error:
        if isinstance(error, HttpError):
            failure = error
        elif isinstance(error, InvalidRequest):
            failure = http_error(
                error, {error.field: _route_name(error.field, {"session_id": SESSION_ID_HEADER, **names})}
            )
        else:
            failure = http_error(error)
        if wanted is not None:
            failure.headers.update(id_headers(wanted))
        if failure is error:
            raise
        raise failure from error


def _route_name(field: str, names: Mapping[str, str]) -> str:
    for at in range(len(field), 0, -1):
        begin, rest = field[:at], field[at:]
        if begin in names and (not rest or rest[0] in ".[ "):
            return f"{names[begin]}{rest}".lstrip(".")
    return field

"""`POST /inference/v1/generate`: token ids in, token ids out, as in vLLM 0.30."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ...schemas import limits
from ...schemas.checks import describe
from ..tokenization import Tokenizer
from .answer_types import GenerateAnswer, GenerateChoice, Usage
from .answers import AnswerChoice, collect_answers, updates, usage_of
from .body import decode_body, read_body
from .calls import JsonPieces
from .errors import HttpError, invalid, unsupported
from .generate_answer import answer_json, event_json
from .generate_body import (
    PREFIX,
    GenerateBody,
    GenerateStreamOptions,
    SamplingBody,
    body_names,
    check_supported,
    request_fields,
)
from .preparation import RequestAborted, aborted_response
from .request_target import RequestTarget, build_request, check_length, find_target, id_headers, named_errors
from .routing_json import rows_json
from .service import HttpRoute, RouteTable, Service
from .stops import AnswerText, stop_strings, text_of

__all__ = ["ROUTES"]


async def generate(service: Service, request: Request) -> Response:
    """Continue token ids. The answer is an event stream if the body sets `stream`."""
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), GenerateBody)
    try:
        async with service.preparing(request, body.request_id):
            target, tokenizer, built = await _prepare(service, request, body)
    except RequestAborted as error:
        return _aborted(body, error)
    choices = [
        AnswerChoice(child, built, _text(built, body.sampling_params, tokenizer), keep=not body.stream)
        for child in range(built.sampling.n)
    ]
    if body.stream:
        events = _events(service, request, body, target, built, choices)
        return await service.stream(request, events, id_headers(built))
    with named_errors(body_names(body), built):
        await collect_answers(service, request, [built], choices, may_stop=bool(body.sampling_params.stop))
        with_prompt = service.settings.returns_tokens or bool(body.return_token_ids)
        as_json = rows_json(body.routed_experts_format, npy=service.settings.routed_experts_npy)
        pieces = answer_json(built, target, choices, with_prompt=with_prompt, as_json=as_json)
        return JsonPieces(pieces, id_headers(built))


async def _prepare(
    service: Service, request: Request, body: GenerateBody
) -> tuple[RequestTarget, Tokenizer | None, bus.GenerateRequest]:
    """Return the target, the tokenizer if the request needs one, and the request to the fleet."""
    check_supported(body)
    target = await find_target(service, request, body.model, body.timeout_s)
    if body.routed_experts_format is not None and target.capabilities.routed_experts is None:
        problem = f"is {describe(body.routed_experts_format)}"
        raise invalid("routed_experts_format", problem, "null: this model returns no routed experts")
    check_length("token_ids", len(body.token_ids), target)
    tokenizer = await _tokenizer(service, target, body.sampling_params)
    room = target.room(len(body.token_ids))
    sampling, fields = request_fields(body, tokenizer, room, returns_tokens=service.settings.returns_tokens)
    built = build_request(service, request, target, sampling=sampling, fields=fields, names=body_names(body))
    return target, tokenizer, built


def _aborted(body: GenerateBody, error: RequestAborted) -> Response:
    """Return the answer to a request that was aborted before it was open: no tokens."""
    n = min(max(body.sampling_params.n or 1, 1), limits.MAX_N)
    choices = [GenerateChoice(index, bus.FinishReason.ABORT, [], [], None, None, None) for index in range(n)]
    usage, head = usage_of(0, 0), {"request_id": error.request_id, "model": body.model or error.model}
    if not body.stream:
        nothing = dict.fromkeys(GenerateAnswer.__struct_fields__)
        answer = {**nothing, **head, "created": int(time.time()), "choices": choices, "usage": usage}
        return aborted_response(error, [answer], stream=False)
    events: list[dict[str, object]] = [{**head, "usage": None, "choices": [choice]} for choice in choices]
    if body.stream_options is not None and body.stream_options.include_usage:
        events.append({**head, "usage": usage, "choices": []})
    return aborted_response(error, events, stream=True)


async def _tokenizer(service: Service, target: RequestTarget, params: SamplingBody) -> Tokenizer | None:
    """Return the model's tokenizer if a field contains text; None if no field does.

    Raises:
        HttpError: 400, the tokenizer is not on this machine. The error names the field.
    """
    name = "stop" if params.stop else "bad_words"
    if not getattr(params, name):
        return None
    try:
        return await service.tokenizer(target.worker)
    except HttpError as error:
        raise unsupported(f"{PREFIX}{name}", error.message) from error


def _text(request: bus.GenerateRequest, params: SamplingBody, tokenizer: Tokenizer | None) -> AnswerText | None:
    """Return the text in which stop strings are searched; None if the request has none."""
    if tokenizer is None or not params.stop:
        return None
    return text_of(
        request,
        tokenizer,
        stop_strings(params.stop),
        include_stop=params.include_stop_str_in_output is True,
        skip_special_tokens=params.skip_special_tokens is not False,
    )


async def _events(
    service: Service,
    http_request: Request,
    body: GenerateBody,
    target: RequestTarget,
    request: bus.GenerateRequest,
    choices: Sequence[AnswerChoice],
) -> AsyncGenerator[bytes, None]:
    """Yield one event for each chunk, with its routed experts. If the body asks for it, a last event has the usage."""
    options = body.stream_options or GenerateStreamOptions()
    as_json = rows_json(body.routed_experts_format, npy=service.settings.routed_experts_npy)
    with_prompt = service.settings.returns_tokens or body.return_token_ids
    prompt: list[int] | None = np.asarray(request.prompt_token_ids).tolist() if with_prompt else None
    with named_errors(body_names(body), request):
        async with aclosing(updates(service, http_request, [request], choices)) as found:
            async for choice, update in found:
                usage: Usage | None = None
                if options.include_usage and options.continuous_usage_stats:
                    usage = usage_of(request.prompt_len, choice.num_tokens)
                tokens = (choice, update.tokens)
                yield event_json(request, target, tokens, usage=usage, prompt_token_ids=prompt, as_json=as_json)
                prompt = None
        if options.include_usage:
            num_tokens = sum(choice.num_tokens for choice in choices)
            yield event_json(request, target, None, usage=usage_of(request.prompt_len, num_tokens))


ROUTES: RouteTable = {("POST", "/inference/v1/generate"): HttpRoute(generate, GenerateBody, GenerateAnswer)}

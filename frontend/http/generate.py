"""`POST /inference/v1/generate`: tokens in, tokens out, as vLLM 0.30 serves it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.answer_types import GenerateAnswer
from frontend.http.answers import Choice, take_whole, updates, usage_of
from frontend.http.bad_words import bad_words_ids
from frontend.http.body import decode_body, read_body
from frontend.http.calls import JsonPieces
from frontend.http.errors import HttpError, unsupported
from frontend.http.generate_answer import answer_json, event_json
from frontend.http.generate_body import (
    NAMES,
    GenerateBody,
    SamplingBody,
    StreamOptions,
    check_supported,
    request_fields,
)
from frontend.http.service import RouteTable, Service
from frontend.http.stops import AnswerText, stop_strings, text_of
from frontend.http.wanted import Target, find_target, id_headers, make_wanted, named_errors
from frontend.tokenization import Tokenizer

__all__ = ["ANSWERS", "BODIES", "ROUTES"]


async def generate(service: Service, request: Request) -> Response:
    """Continue token ids; the answer is a stream if the body says so."""
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), GenerateBody)
    check_supported(body)
    target = find_target(service, body.model)
    tokenizer = await _tokenizer(service, target, body.sampling_params)
    sampling, fields = request_fields(body)
    if tokenizer is not None and body.sampling_params.bad_words:
        name = "sampling_params.bad_words"
        sampling["bad_words_token_ids"] = bad_words_ids(body.sampling_params.bad_words, tokenizer, name)
    wanted = make_wanted(service, request, target, sampling=sampling, fields=fields, names=NAMES)
    choices = [
        Choice(child, wanted, _text(wanted, body.sampling_params, tokenizer), keep=not body.stream)
        for child in range(wanted.sampling.n)
    ]
    with_prompt = bool(body.return_token_ids)
    if body.stream:
        events = _events(service, wanted, choices, body.stream_options or StreamOptions(), with_prompt=with_prompt)
        return await service.stream(request, events, id_headers(wanted))
    with named_errors(NAMES, wanted):
        await take_whole(service, request, [wanted], choices, may_stop=bool(body.sampling_params.stop))
        return JsonPieces(answer_json(wanted, target, choices, with_prompt=with_prompt), id_headers(wanted))


async def _tokenizer(service: Service, target: Target, params: SamplingBody) -> Tokenizer | None:
    """The model's tokenizer, for fields that are text; None where there are none.

    Raises:
        HttpError: 400, naming the field: it is not on this machine.
    """
    name = "stop" if params.stop else "bad_words"
    if not getattr(params, name):
        return None
    try:
        return await service.tokenizer(target.worker)
    except HttpError as error:
        raise unsupported(f"sampling_params.{name}", error.message) from error


def _text(wanted: bus.GenerateRequest, params: SamplingBody, tokenizer: Tokenizer | None) -> AnswerText | None:
    """The text in which stop strings are looked for; None where there are none."""
    if tokenizer is None or not params.stop:
        return None
    return text_of(
        wanted,
        tokenizer,
        stop_strings(params.stop),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )


async def _events(
    service: Service,
    wanted: bus.GenerateRequest,
    choices: Sequence[Choice],
    options: StreamOptions,
    *,
    with_prompt: bool,
) -> AsyncGenerator[bytes, None]:
    """One event for each chunk, with its routing, and at last the usage if it is asked for."""
    prompt: list[int] | None = np.asarray(wanted.prompt_token_ids).tolist() if with_prompt else None
    with named_errors(NAMES, wanted):
        async with aclosing(updates(service, [wanted], choices)) as found:
            async for choice, update in found:
                usage: dict[str, Any] | None = None
                if options.include_usage and options.continuous_usage_stats:
                    usage = usage_of(wanted.prompt_len, choice.num_tokens)
                yield event_json(wanted, (choice, update.tokens), usage=usage, prompt_token_ids=prompt)
                prompt = None
        if options.include_usage:
            num_tokens = sum(choice.num_tokens for choice in choices)
            yield event_json(wanted, None, usage=usage_of(wanted.prompt_len, num_tokens))


ROUTES: RouteTable = {("POST", "/inference/v1/generate"): generate}
BODIES: dict[tuple[str, str], object] = {("POST", "/inference/v1/generate"): GenerateBody}
ANSWERS: dict[tuple[str, str], object] = {("POST", "/inference/v1/generate"): GenerateAnswer}

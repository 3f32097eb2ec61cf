"""`POST /inference/v1/generate`: tokens in, tokens out, as vLLM 0.30 serves it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.body import decode_body, read_body
from frontend.http.generate_answer import Tokens, answer_json, event_json, usage_of
from frontend.http.generate_body import NAMES, GenerateBody, StreamOptions, check_supported, request_fields
from frontend.http.routing_json import JsonPieces
from frontend.http.service import RouteTable, Service
from frontend.http.wanted import find_target, id_headers, make_wanted, named_errors

__all__ = ["BODIES", "ROUTES"]


async def generate(service: Service, request: Request) -> Response:
    """Continue token ids; the answer is a stream if the body says so."""
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), GenerateBody)
    check_supported(body)
    target = find_target(service, body.model)
    sampling, fields = request_fields(body)
    wanted = make_wanted(service, request, target, sampling=sampling, fields=fields, names=NAMES)
    with_prompt = bool(body.return_token_ids)
    if body.stream:
        events = _events(service, wanted, body.stream_options or StreamOptions(), with_prompt=with_prompt)
        return await service.stream(request, events, id_headers(wanted))
    with named_errors(NAMES, wanted):
        result = await service.complete(request, wanted)
        return JsonPieces(answer_json(wanted, target, result, with_prompt=with_prompt), id_headers(wanted))


async def _events(
    service: Service, wanted: bus.GenerateRequest, options: StreamOptions, *, with_prompt: bool
) -> AsyncGenerator[bytes, None]:
    """One event for each chunk, with its routing, and at last the usage if it is asked for."""
    num_tokens = [0] * wanted.sampling.n
    prompt: list[int] | None = np.asarray(wanted.prompt_token_ids).tolist() if with_prompt else None
    with named_errors(NAMES, wanted):
        async with aclosing(service.chunks(wanted)) as chunks:
            async for chunk in chunks:
                num_tokens[chunk.child] += chunk.num_tokens
                usage: dict[str, Any] | None = None
                if options.include_usage and options.continuous_usage_stats:
                    usage = usage_of(wanted.prompt_len, num_tokens[chunk.child])
                yield event_json(wanted, Tokens.of_chunk(chunk), usage=usage, prompt_token_ids=prompt)
                prompt = None
        if options.include_usage:
            yield event_json(wanted, None, usage=usage_of(wanted.prompt_len, sum(num_tokens)))


ROUTES: RouteTable = {("POST", "/inference/v1/generate"): generate}
BODIES: dict[tuple[str, str], object] = {("POST", "/inference/v1/generate"): GenerateBody}

"""`POST /inference/v1/generate`: token ids in, token ids out, as in vLLM 0.30.

By default, routed experts are a JSON object.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ...schemas import limits
from ...schemas.checks import describe
from ...schemas.rows import Rows
from ..tokenization import Tokenizer
from .answers import AnswerChoice, collect_answers, updates, usage_of
from .body import decode_body, read_body
from .calls import JsonPieces
from .errors import HttpError, invalid, unsupported
from .requests import RequestTarget, build_request, check_length, find_target, id_headers, named_errors
from .sampling import SamplingFields, bus_sampling, check_sampling, check_stream_options, sampling_names
from .service import HttpRoute, RequestAborted, RouteTable, Service, aborted_response
from .text import AnswerText, stop_strings, text_of
from .tokens import (
    BLOCK,
    RowsFormat,
    RowsJson,
    SampledToken,
    Scored,
    Scores,
    Tokens,
    TopToken,
    Usage,
    list_json,
    prompt_logprobs_json,
    prompt_scores,
    routed_experts_json,
    rows_json,
    whole_rows,
)


def answer_json(
    request: bus.GenerateRequest,
    target: RequestTarget,
    choices: Sequence[AnswerChoice],
    *,
    with_prompt: bool,
    as_json: RowsJson = routed_experts_json,
) -> Iterator[bytes]:
    """Return the complete answer in pieces. All checks run before the first piece.

    Args:
        as_json: format of the routed experts.

    Raises:
        HttpError: 502, rows of routed experts or log probabilities of the prompt are missing.
    """
    tokens = [choice.pop_update().tokens for choice in choices]
    rows = [whole_rows(request, target, each) for each in tokens]
    of_prompt = prompt_scores(request, tokens[0])
    small = {
        "request_id": request.request_id,
        "model": target.name,
        "lora": target.lora,
        "created": int(time.time()),
        "usage": usage_of(request.prompt_len, sum(choice.num_tokens for choice in choices), [choices[0].cached_tokens]),
        "prompt_token_ids": np.asarray(request.prompt_token_ids).tolist() if with_prompt else None,
        "mm_placeholders": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }

    def pieces() -> Iterator[bytes]:
        yield msgspec.json.encode(small)[:-1] + b',"choices":['
        for choice, own, own_rows in zip(choices, tokens, rows, strict=True):
            yield b"," if choice.index else b""
            yield from _choice_json(choice, own, own_rows, as_json)
        yield b'],"prompt_logprobs":'
        yield from prompt_logprobs_json(of_prompt)
        yield b"}"

    return pieces()


def event_json(
    request: bus.GenerateRequest,
    target: RequestTarget,
    update: tuple[AnswerChoice, Tokens] | None,
    *,
    usage: Usage | None = None,
    prompt_token_ids: list[int] | None = None,
    as_json: RowsJson = routed_experts_json,
) -> bytes:
    """Return one event of a stream. Without an `update` of a choice, it is the last event, with the usage only."""
    small: dict[str, Any] = {"request_id": request.request_id, "model": target.name, "usage": usage}
    if prompt_token_ids is not None:
        small["prompt_token_ids"] = prompt_token_ids
    pieces = [msgspec.json.encode(small)[:-1], b',"choices":[']
    if update is not None:
        choice, tokens = update
        pieces += _choice_json(choice, tokens, tokens.rows, as_json)
    return b"".join((*pieces, b"]}"))


def _choice_json(choice: AnswerChoice, tokens: Tokens, rows: Rows | None, as_json: RowsJson) -> Iterator[bytes]:
    small = {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "token_ids": tokens.ids.tolist(),
        "weight_versions": tokens.weight_versions.tolist(),
    }
    yield msgspec.json.encode(small)[:-1] + b',"logprobs":'
    yield from _logprobs_json(tokens.scores, choice.request.sampling.logprobs)
    yield b',"sampling_mask":'
    if tokens.masks is None:
        yield b"null"
    else:
        # Block by block, because the masks of a long answer are millions of ids.
        masks = tokens.masks.split()
        blocks = (masks[at : at + BLOCK] for at in range(0, len(masks), BLOCK))
        yield from list_json([ids.tolist() for ids in block] for block in blocks)
    yield b',"routed_experts":'
    if rows is None:
        yield b"null"
    else:
        yield from as_json(rows, tokens.start)
    yield b"}"


def _logprobs_json(scores: Scores, width: int | None) -> Iterator[bytes]:
    """Yield the object `logprobs`: each sampled token first, then its most likely alternatives."""
    if width is None:
        yield b"null"
        return
    yield b'{"content":'
    yield from list_json([_sampled(position, width) for position in block] for block in scores.blocks())
    yield b"}"


def _sampled(position: list[Scored], width: int) -> SampledToken:
    tops = [TopToken(f"token_id:{each.token_id}", each.logprob, None) for each in position[: max(width, 1)]]
    return SampledToken(tops[0].token, tops[0].logprob, None, tops)


class GenerateStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Additional data in a stream."""

    include_usage: bool | None = None
    """Add one event with the total usage before the end of the stream."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every event has the usage so far."""


class SamplingBody(SamplingFields, kw_only=True, frozen=True):
    """Sampling parameters. Without `max_tokens`, the limit is the rest of the model's context."""

    logprobs: int | None = None
    """0: the log probability of each sampled token. k: also those of the k most likely tokens. Null: none."""

    # Trainers' clients send these fields of vLLM's other routes too. They have no effect.
    reasoning_effort: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Token ids to continue."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    """Token ids of the prompt."""
    sampling_params: SamplingBody
    """Sampling parameters."""
    request_id: str | None = None
    """Random if omitted. The header `X-Request-Id` has precedence."""
    model: str | None = None
    """Name of a model or adapter. None: the fleet's only model."""
    stream: bool | None = False
    """Stream server-sent events while tokens are generated."""
    stream_options: GenerateStreamOptions | None = None
    """Additional data in a stream."""
    return_token_ids: bool | None = None
    """Include the prompt's token ids in the answer."""
    cache_salt: str | None = None
    """Requests share prefix-cache entries only with requests of the same salt."""
    priority: int = 0
    """Lower is more urgent."""
    kv_hints: dict[str, Any] | None = None
    """Hints for the engine's KV connector. The field is rejected if the engine has no connector."""
    routed_experts_format: RowsFormat | None = None
    """`npy`: each choice has its routed experts as in vLLM's server, the base64 of a `.npy` file. Null: the format of
    the service, which is an object unless it was started with `--routed-experts-npy`."""
    timeout_s: float | None = None
    """Seconds until the request fails with 504. The field has precedence over the header `X-Request-Timeout`."""

    # vLLM's own renderer adds these fields. They have no effect here.
    assistant_tokens_mask: list[int] | None = None
    token_offsets: list[tuple[int, int]] | None = None

    # Rejected fields: inputs other than tokens, and KV transfers between engines by clients.
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


NOT_SERVED: Final = {
    "features": "this service accepts tokens only, no images, audio or video",
    "content_parts": "this service accepts tokens only, no images, audio or video",
    "kv_transfer_params": "clients cannot transfer caches between engines",
    "ec_transfer_params": "clients cannot transfer caches between engines",
}
"""Known fields that the service does not support, with the reason."""
PREFIX: Final = "sampling_params."


def check_supported(body: GenerateBody) -> None:
    """Reject fields that vLLM supports and this service does not.

    Raises:
        HttpError: 400, naming the field.
    """
    for name, reason in NOT_SERVED.items():
        if getattr(body, name) not in (None, []):
            raise unsupported(name, reason)
    check_stream_options(body.stream_options, body.stream)
    check_sampling(body.sampling_params, stream=bool(body.stream), prefix=PREFIX)


def request_fields(
    body: GenerateBody, tokenizer: Tokenizer | None, room: int, *, returns_tokens: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sampling fields and the other fields of a request, by their names on the bus.

    The first mapping has fields of `rollbus.SamplingParams`, the second those of `rollbus.GenerateRequest`.

    Args:
        tokenizer: needed for `bad_words` only.
        room: tokens that fit after the prompt. A larger `max_tokens` is reduced to it, as in vLLM: a client of several
            turns sends the same number in each turn.
        returns_tokens: if True, return log probabilities even if the body does not ask for them.

    Raises:
        HttpError: 400, a bad word has no tokens.
    """
    params = body.sampling_params
    sampling = bus_sampling(params, tokenizer, PREFIX)
    if body.kv_hints is not None:
        sampling["extra"] = {**(sampling["extra"] or {}), "kv_hints": body.kv_hints}
    others = {
        "prompt_token_ids": body.token_ids,
        "request_id": body.request_id,
        "routed_experts_prompt_start": params.routed_experts_prompt_start or 0,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "timeout_s": body.timeout_s,
    }
    logprobs = 0 if params.logprobs is None and returns_tokens else params.logprobs
    max_tokens = None if params.max_tokens is None else min(params.max_tokens, room)
    return {**sampling, "logprobs": logprobs, "max_tokens": max_tokens}, others


def body_names(body: GenerateBody) -> dict[str, str]:
    """Return this route's names for the bus's fields, for `named_errors`."""
    return {
        **sampling_names(body.sampling_params, PREFIX),
        "prompt_token_ids": "token_ids",
        "sampling.extra.kv_hints": "kv_hints",
        "routed_experts_prompt_start": "sampling_params.routed_experts_prompt_start",
        "return_routed_experts": "sampling_params.routed_experts_prompt_start",
        "lora": "model",
    }


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
    nothing = dict.fromkeys(("logprobs", "sampling_mask", "routed_experts"))
    ended = {"finish_reason": bus.FinishReason.ABORT, "token_ids": [], "weight_versions": [], **nothing}
    choices = [{"index": index, **ended} for index in range(n)]
    usage, head = usage_of(0, 0), {"request_id": error.request_id, "model": body.model or error.model}
    if not body.stream:
        absent = ("lora", "prompt_token_ids", "mm_placeholders", "kv_transfer_params", "ec_transfer_params")
        answer = {**head, "created": int(time.time()), "choices": choices, "usage": usage, "prompt_logprobs": None}
        answer |= dict.fromkeys(absent)
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


ROUTES: RouteTable = {("POST", "/inference/v1/generate"): HttpRoute(generate, GenerateBody)}

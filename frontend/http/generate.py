"""`POST /inference/v1/generate`: token ids in, token ids out, as in vLLM 0.30.

By default, routed experts are a JSON object.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...schemas.checks import describe
from ...schemas.decoding import JsonObject
from ..tokenization import Tokenizer
from .answers import AnswerChoice, Update
from .body import decode_body, read_body
from .errors import HttpError, invalid, unsupported
from .openai.body import OpenAIStreamOptions
from .openai.requests import Options
from .openai.shapes import AnswerShape, JsonParts, Namer
from .requests import RequestTarget, build_request, check_length, find_target
from .sampling import SamplingFields, bus_sampling, check_sampling, check_stream_options, sampling_names
from .service import HttpRoute, RouteTable, Service
from .tokens import BLOCK, RowsFormat, SampledToken, Scored, ScoredBlocks, Tokens, TopToken, list_json, lists_json
from .writer import AnswerWriter, respond


class _Generate(AnswerShape):
    has_text = False
    nothing: ClassVar[JsonObject] = {
        "token_ids": [],
        "weight_versions": [],
        "logprobs": None,
        "sampling_mask": None,
        "routed_experts": None,
    }

    def head(self, request_id: str, model: str, lora: str | None, created: int, *, is_event: bool) -> JsonObject:
        head: JsonObject = {"request_id": request_id, "model": model}
        if is_event:
            return {**head, "usage": None}
        absent = ("prompt_token_ids", "mm_placeholders", "kv_transfer_params", "ec_transfer_params")
        return {**head, "lora": lora, "created": created, "usage": None, **dict.fromkeys(absent)}

    def text(self, text: str, *, delta: bool) -> JsonObject:
        return {}

    def fields(self, choice: AnswerChoice, update: Update, shown: JsonObject, *, with_ids: bool) -> JsonObject:
        ids, versions = update.tokens.ids.tolist(), update.tokens.weight_versions.tolist()
        return {"index": choice.index, **shown, "token_ids": ids, "weight_versions": versions}

    def logprobs(self, choice: AnswerChoice, scores: ScoredBlocks, namer: Namer, width: int) -> JsonParts:
        if (few := namer.few(scores)) is not None:
            return {"content": [SampledToken(*each, None, [TopToken(*each, None)]) for each in zip(*few, strict=True)]}

        def sampled(position: list[Scored]) -> SampledToken:
            tops = [TopToken(namer.name(each.token_id), each.logprob, None) for each in position[: max(width, 1)]]
            return SampledToken(tops[0].token, tops[0].logprob, None, tops)

        return lists_json(scores, {"content": lambda block: list(map(sampled, block))})

    def masks(self, tokens: Tokens) -> Mapping[str, JsonParts]:
        if tokens.masks is None:
            return {"sampling_mask": None}
        # Block by block, because the masks of a long answer are millions of ids.
        masks = tokens.masks.split()
        blocks = (masks[at : at + BLOCK] for at in range(0, len(masks), BLOCK))
        return {"sampling_mask": list_json([ids.tolist() for ids in block] for block in blocks)}


class _WithRows(_Generate):
    nothing: ClassVar[JsonObject] = {
        **_Generate.nothing,
        "routed_experts": {"data": "", "shape": [0, 0, 0], "start": 0, "dtype": "uint8"},
    }


GENERATE: Final[AnswerShape] = _Generate()
WITH_ROWS: Final[AnswerShape] = _WithRows()
"""The same for clients that reject null for routed experts, even if the request was aborted before its first token."""


class GenerateStreamOptions(OpenAIStreamOptions, forbid_unknown_fields=True, frozen=True):
    """Additional data in a stream."""


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
    kv_hints: JsonObject | None = None
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
    features: JsonObject | None = None
    content_parts: list[JsonObject] | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None


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
    body: GenerateBody, tokenizer: Tokenizer | None, room: int, *, returns_tokens: bool
) -> tuple[JsonObject, JsonObject]:
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
    return await respond(service, request, body, GENERATE, partial(prepare_generate, service, request, body))


async def prepare_generate(service: Service, request: Request, body: GenerateBody) -> AnswerWriter:
    """Return the writer of the answer to a body.

    Raises:
        HttpError: 400, a field is not valid or not served; or any error of `find_target`.
    """
    check_supported(body)
    target = await find_target(service, request, body.model, body.timeout_s)
    if body.routed_experts_format is not None and target.capabilities.routed_experts is None:
        problem = f"is {describe(body.routed_experts_format)}"
        raise invalid("routed_experts_format", problem, "null: this model returns no routed experts")
    check_length("token_ids", len(body.token_ids), target)
    tokenizer = await _tokenizer(service, target, body.sampling_params)
    room = target.room(len(body.token_ids))
    make = partial(request_fields, body, tokenizer, room, returns_tokens=service.settings.returns_tokens)
    # Off the event loop: to tokenize the most and longest bad words takes seconds.
    sampling, fields = await asyncio.to_thread(make) if body.sampling_params.bad_words else make()
    built = build_request(service, request, target, sampling=sampling, fields=fields, names=partial(body_names, body))
    return AnswerWriter(
        shape=GENERATE,
        target=target,
        tokenizer=tokenizer,
        requests=[built],
        options=Options.of(
            body,
            body.sampling_params,
            service.settings,
            text=bool(body.sampling_params.stop),
            top_logprobs=built.sampling.logprobs,
            as_token_ids=True,
            extra=frozenset(),
            routed_experts=True,
        ),
        names=partial(body_names, body),
    )


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


ROUTES: RouteTable = {("POST", "/inference/v1/generate"): HttpRoute(generate, GenerateBody)}

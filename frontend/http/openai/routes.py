"""`POST /v1/chat/completions` and `POST /v1/completions`, as whole answers and as streams."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....schemas.decoding import JsonObject
from ....schemas.limits import MAX_GIVEN_ID_CHARS
from ....schemas.request_fields import check_sampling
from ...tokenization import Tokenizer
from ..answers import AnswerChoice
from ..body import decode_body, read_body
from ..calls import StreamEnd, json_response
from ..errors import invalid
from ..requests import RequestTarget, build_request, check_length, find_target, named_errors
from ..sampling import SamplingFields
from ..service import HttpRoute, RouteTable, Service
from ..tokens import prompt_list
from ..writer import AnswerWriter, respond
from .body import ChatBody, CompletionBody, check_served
from .requests import (
    BodyPrompt,
    bus_fields,
    bus_names,
    chat_prompt,
    completion_prompts,
    count_choices,
    make_plan,
    read_echo,
    read_options,
    read_question,
    sampling_fields,
)
from .shapes import CHAT, COMPLETION, Reading, RequestClock

AnyBody = ChatBody | CompletionBody
SessionPrompt = Callable[[Tokenizer, RequestTarget], Awaitable[BodyPrompt]]
"""Returns the prompt of a turn for the tokenizer and the model of its request."""
AS_GIVEN: Final = ("timeout_s", "return_token_ids", "routed_experts_format")
"""Fields with the same names and meanings in a rendered body, which has them only if they are given."""


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a chat, as in OpenAI's API. With `nvext.token_data`, continue these token ids."""
    return await _answer(service, request, ChatBody)


async def completions(service: Service, request: Request) -> Response:
    """Continue texts or token ids, as in OpenAI's API."""
    return await _answer(service, request, CompletionBody)


async def render_chat(service: Service, request: Request) -> Response:
    """Return the body of `/inference/v1/generate` that continues a chat. This generates nothing."""
    (rendered,) = await _render(service, request, ChatBody)
    return json_response(rendered)


async def render_completions(service: Service, request: Request) -> Response:
    """Return a body of `/inference/v1/generate` for each prompt of a completion. This generates nothing."""
    return json_response(await _render(service, request, CompletionBody))


async def _render(service: Service, request: Request, kind: type[AnyBody]) -> list[JsonObject]:
    service.admit(request)
    body: AnyBody = decode_body(await read_body(request, service.settings), kind)
    job = await prepare_answer(service, request, body, RequestClock())
    return [_rendered(body, job, each) for each in job.requests]


def _rendered(body: AnyBody, job: AnswerWriter, request: bus.GenerateRequest) -> JsonObject:
    """Return the body of `/inference/v1/generate` that generates the tokens of a request."""
    request_id = f"{job.shape.id_prefix}{request.request_id}"
    if len(request_id) > MAX_GIVEN_ID_CHARS or request.id_scope != job.requests[0].id_scope:
        # The id has no room for the prefix or for the index of the prompt.
        request_id = f"{job.shape.id_prefix}{request.wire_id}"
    sampling, extra = request.sampling, dict(request.sampling.extra or {})
    params = {name: value for name in SamplingFields.__struct_fields__ if (value := getattr(body, name)) is not None}
    room = job.target.room(request.prompt_len)
    computed = {
        "max_tokens": room if sampling.max_tokens is None else sampling.max_tokens,
        "temperature": sampling.temperature,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "skip_special_tokens": job.options.skip_special_tokens,
        "routed_experts_prompt_start": request.routed_experts_prompt_start,
    }
    given: JsonObject = {name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None}
    if "kv_hints" in extra:
        given["kv_hints"] = extra.pop("kv_hints")
    return {
        "request_id": request_id,
        "token_ids": prompt_list(request),
        "sampling_params": {**params, **extra, **computed},
        "model": job.target.name,
        "stream": bool(body.stream),
        "stream_options": body.stream_options,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "features": None,
        **given,
    }


async def _answer(service: Service, request: Request, kind: type[AnyBody]) -> Response:
    clock = RequestClock()
    service.admit(request)
    data = await read_body(request, service.settings)
    body: AnyBody = decode_body(data, kind)
    if isinstance(body, ChatBody):
        control = None if body.nvext is None else body.nvext.session_control
        names = (body.user, body.session_id, None if control is None else control.session_id)
        session = await service.sessions.find_named(request, *names)
        if session is not None:
            return await service.serve_turn(service, request, session, AskedTurn(body, data, ChatFormat()))
    prepared = partial(prepare_answer, service, request, body, clock)
    shape = CHAT if isinstance(body, ChatBody) else COMPLETION
    return await respond(service, request, body, shape, prepared, count_choices)


class ChatFormat(StreamEnd):
    """Makes and writes the answer to one chat, as OpenAI's chat API has it. Other APIs override it."""

    names: Sequence[tuple[str, str]] = ()
    """Names of fields in errors, as pairs: of the chat route, and of this API."""
    seal: str | None = None
    """Signature of the answer's reasoning, with which its client shows the turn that it means; None: no session."""

    async def prepare(
        self,
        service: Service,
        request: Request,
        chat: ChatBody,
        clock: RequestClock,
        session_prompt: SessionPrompt | None = None,
    ) -> AnswerWriter:
        """Do what `prepare_answer` does."""
        return await prepare_answer(service, request, chat, clock, session_prompt)

    async def whole(self, writer: AnswerWriter, choices: Sequence[AnswerChoice]) -> bytes:
        """Return the whole answer."""
        return b"".join(await writer.answer_json(choices))

    def events(self, service: Service, request: Request, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        return writer.events(service, request)


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A chat that may be a turn of a session."""

    body: ChatBody
    data: bytes
    """The body as it was sent, to recognize a retry."""
    form: ChatFormat


async def prepare_answer(
    service: Service, request: Request, body: AnyBody, clock: RequestClock, session_prompt: SessionPrompt | None = None
) -> AnswerWriter:
    """Check a body and return the writer of its answers, with the token requests.

    Args:
        session_prompt: returns the prompt of a chat that is a turn of a session; None: the prompt is that of the body.
    """
    check_served(body)
    target = await find_target(service, request, body.model, body.timeout_s)
    options = read_options(body, target, service.settings)
    sampling = sampling_fields(body, options, None)
    with named_errors(partial(bus_names, body, "prompt")):
        # Check before the tokenizer is loaded and a long prompt is tokenized.
        checked = bus.SamplingParams(**sampling)
        check_sampling(checked, target.capabilities)
    params: bus.SamplingParams | JsonObject = checked
    question = read_question(body, service.parsers) if isinstance(body, ChatBody) else None
    load = partial(service.tokenizer, target.worker)
    tokenizer = await load() if options.text or body.bad_words else None
    plan = None if question is None else await make_plan(question, service.parsers, tokenizer, target)
    if isinstance(body, ChatBody):
        prompts = [await (chat_prompt(body, load) if session_prompt is None else session_prompt(await load(), target))]
    else:
        prompts = await completion_prompts(body, load)
        if len(prompts) > 1:
            service.admit(request, len(prompts) - 1)
    if options.extra and len(prompts) > 1:
        raise invalid("prompt", f"has {len(prompts)} prompts", "1 with nvext.extra_fields, which describe one answer")
    if body.bad_words:
        # Off the event loop: to tokenize the most and longest words takes seconds.
        params = sampling = await asyncio.to_thread(sampling_fields, body, options, tokenizer)
    fields, reading = bus_fields(body, options), None
    if isinstance(body, ChatBody) and question and plan:
        reading = Reading(body, question, plan)
        if plan.structured_outputs is not None:
            # The constraint replaces a `response_format`, as in vLLM.
            params = {**sampling, "extra": {**(sampling["extra"] or {}), "structured_outputs": plan.structured_outputs}}
        options.skip_special_tokens = plan.skip_special_tokens
    requests: list[bus.GenerateRequest] = []
    for index, prompt in enumerate(prompts):
        check_length(prompt.field, len(prompt.token_ids), target)
        names = partial(bus_names, body, prompt.field)
        of_prompt = {**fields, "prompt_token_ids": prompt.token_ids}
        made = build_request(service, request, target, sampling=params, fields=of_prompt, names=names)
        if requests:
            with named_errors(names):
                # The HTTP request has one id. The first prompt uses it unchanged; later prompts add their index.
                made = replace(made, **_later_id(requests[0], index))
        requests.append(made)
    return AnswerWriter(
        shape=CHAT if isinstance(body, ChatBody) else COMPLETION,
        target=target,
        tokenizer=tokenizer,
        requests=requests,
        options=options,
        names=partial(bus_names, body, prompts[0].field),
        clock=clock,
        reading=reading,
        echo=await read_echo(body, prompts, options, tokenizer),
    )


_CHAT = HttpRoute(chat_completions, ChatBody)
ROUTES: RouteTable = {
    ("POST", "/v1/chat/completions"): _CHAT,
    # The path that prime-rl uses for requests with `tokens`.
    ("POST", "/v1/chat/completions/tokens"): _CHAT,
    ("POST", "/v1/chat/completions/render"): HttpRoute(render_chat, ChatBody),
    ("POST", "/v1/completions/render"): HttpRoute(render_completions, CompletionBody),
    ("POST", "/v1/completions"): HttpRoute(completions, CompletionBody),
}


def _later_id(first: bus.GenerateRequest, index: int) -> dict[str, str]:
    """Return the id fields of a later prompt of the HTTP request whose first prompt is `first`."""
    request_id = f"{first.request_id}-{index}"
    if len(request_id) <= MAX_GIVEN_ID_CHARS:
        return {"request_id": request_id}
    # The scope distinguishes prompts whose id has no room for the index.
    return {"id_scope": f"{first.id_scope} {index}"}

"""`POST /v1/chat/completions` and `POST /v1/completions`, as whole answers and as streams."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....schemas.limits import MAX_GIVEN_ID_CHARS, MAX_N
from ....schemas.request_fields import check_sampling
from ....schemas.rows import Rows
from ...tokenization import Tokenizer
from ..answers import AnswerChoice, Update, collect_answers, updates, usage_of
from ..body import decode_body, read_body
from ..calls import NO_EVENT, JsonPieces, json_response
from ..errors import invalid
from ..requests import RequestTarget, build_request, check_length, find_target, id_headers, named_errors
from ..sampling import SamplingFields
from ..service import HttpRoute, RequestAborted, RouteTable, Service, aborted_response
from ..text import AnswerText, text_of
from ..tokens import (
    Scores,
    Tokens,
    Usage,
    prompt_logprobs_json,
    prompt_scores,
    whole_rows,
)
from .body import ChatBody, CompletionBody, check_served
from .parsers import AnswerParts, AnswerReader
from .requests import (
    Echo,
    EchoedScores,
    Options,
    bus_fields,
    bus_names,
    chat_prompt,
    completion_prompts,
    count_prompts,
    make_plan,
    read_echo,
    read_options,
    read_question,
    sampling_fields,
)
from .shapes import CHAT, COMPLETION, AnswerShape, Namer, Reading, RequestClock, nvext_json, parts_json

KEEP_ALIVE_S: Final = 15.0
"""Seconds without an event, while text is held back, after which a stream has a comment."""


@dataclass(frozen=True, kw_only=True)
class CompletionHandler:
    """One HTTP request for a chat completion or a completion."""

    service: Service
    http_request: Request
    shape: AnswerShape
    target: RequestTarget
    tokenizer: Tokenizer | None
    """None: both the request and the answer have only token ids."""
    requests: Sequence[bus.GenerateRequest]
    """One request for each prompt."""
    options: Options
    names: Mapping[str, str]
    """The body's names for fields of `GenerateRequest`."""
    clock: RequestClock
    reading: Reading | None = None
    """Parsing of a chat's answers; None: the whole text is content."""
    echo: Echo | None = None
    """The prompts before the answers; None: no `echo`."""
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self) -> Response:
        """Return one response with all answers.

        Raises:
            HttpError: the request failed.
        """
        with named_errors(self.names, self.requests[0]):
            choices = self._choices(keep=True)
            await collect_answers(
                self.service, self.http_request, self.requests, choices, may_stop=bool(self.options.stops)
            )
            whole = [self._echoed(choice, choice.pop_update()) for choice in choices]
            readers = self._readers(choices)
            parts = [
                None if reader is None else await reader.whole(update.text, update.tokens.ids.tolist())
                for reader, update in zip(readers, whole, strict=True)
            ]
            shown = [self._shown(*each) for each in zip(choices, whole, readers, parts, strict=True)]
            return JsonPieces(self._answer_json(choices, whole, shown), id_headers(self.requests[0]))

    async def stream(self) -> Response:
        """Return a stream of the answers.

        Raises:
            HttpError: the request failed before the first event.
        """
        return await self.service.stream(self.http_request, self._events(), id_headers(self.requests[0]))

    def _choices(self, *, keep: bool) -> list[AnswerChoice]:
        """Return the empty answers, ordered by prompt and then by child request."""
        return [
            AnswerChoice(
                at * request.sampling.n + child,
                request,
                self._text(request),
                keep=keep,
            )
            for at, request in enumerate(self.requests)
            for child in range(request.sampling.n)
        ]

    def _text(self, request: bus.GenerateRequest) -> AnswerText | None:
        """Return the empty text of a new answer; None if the request needs no text."""
        if not self.options.text or self.tokenizer is None:
            return None
        return text_of(
            request,
            self.tokenizer,
            self.options.stops,
            include_stop=self.options.include_stop,
            skip_special_tokens=self.options.skip_special_tokens,
        )

    def _echoed(self, choice: AnswerChoice, update: Update, *, is_first: bool = True) -> Update:
        at = choice.index // self.requests[0].sampling.n
        return update if self.echo is None else self.echo.update(at, update, is_first=is_first)

    def _readers(self, choices: Sequence[AnswerChoice]) -> list[AnswerReader | None]:
        reading = self.reading if self.options.text else None
        return [None if reading is None else reading.reader(choice.request) for choice in choices]

    def _shown(
        self,
        choice: AnswerChoice,
        update: Update,
        reader: AnswerReader | None,
        parts: AnswerParts | None,
        *,
        delta: bool = False,
    ) -> dict[str, Any]:
        """Return the text or the parsed parts of an answer, and its finish reason."""
        if reader is None or parts is None:
            return {**self.shape.text(update.text, delta=delta), "finish_reason": choice.finish_reason}
        reason = choice.finish_reason
        return {
            **parts_json(parts, delta=delta),
            "finish_reason": None if reason is None else reader.finish_reason(reason),
        }

    def _answer_json(
        self, choices: Sequence[AnswerChoice], whole: Sequence[Update], shown: Sequence[dict[str, Any]]
    ) -> Iterator[bytes]:
        """Return the response in pieces. All errors are raised before the first piece."""
        n = self.requests[0].sampling.n
        # If a prompt has several answers, the first answer has the logprobs of the prompt.
        of_prompts = [
            prompt_scores(choice.request, whole[choice.index - choice.index % n].tokens) for choice in choices
        ]
        with_rows = self.options.routed_experts
        rows = [
            whole_rows(choice.request, self.target, update.tokens) if with_rows else None
            for choice, update in zip(choices, whole, strict=True)
        ]
        nvext = self._nvext(whole[0].tokens) if self.options.extra else None
        head = {
            "id": self._id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.target.name,
            "usage": self._usage(choices),
            **self._prompt_ids(self.requests[0], of_answer=True),
        }

        def pieces() -> Iterator[bytes]:
            yield msgspec.json.encode(head)[:-1] + b',"choices":['
            for choice, update, of_prompt, text, of_choice in zip(choices, whole, of_prompts, shown, rows, strict=True):
                yield b"," if choice.index else b""
                more = self._prompt_ids(choice.request, of_answer=False)
                yield from self._choice_json(choice, update, {**text, **more}, of_prompt, rows=of_choice)
            yield b"]"
            if self.shape.prompt_is_common:
                yield b',"prompt_logprobs":'
                yield from prompt_logprobs_json(of_prompts[0], self._namer.name)
            if nvext is not None:
                yield b',"nvext":'
                yield from nvext
            yield b"}"

        return pieces()

    def _choice_json(
        self,
        choice: AnswerChoice,
        update: Update,
        shown: dict[str, Any],
        of_prompt: Scores | None = None,
        *,
        rows: Rows | None,
        delta: bool = False,
    ) -> Iterator[bytes]:
        """Yield the JSON of one answer, or of an answer in a stream event, in pieces."""
        found = {
            "index": choice.index,
            **shown,
            "stop_reason": choice.stop_reason,
        }
        if self.options.token_ids:
            found["token_ids"] = update.tokens.ids.tolist()
        yield msgspec.json.encode(found)[:-1] + b',"logprobs":'
        width = self.options.top_logprobs
        if width is None or (delta and not len(update.tokens.ids)):
            yield b"null"
        else:
            scores: Scores | EchoedScores = update.tokens.scores
            if self.echo is not None and of_prompt is not None:
                scores = self.echo.scores(choice.request, of_prompt, update.tokens.scores)
            yield from self.shape.logprobs(choice, scores, self._namer, width)
        if not (delta or self.shape.prompt_is_common):
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs_json(of_prompt, self._namer.name)
        if self.options.routed_experts:
            yield b',"routed_experts":'
            yield from (b"null",) if rows is None else self.options.as_json(rows, update.tokens.start)
        yield b"}"

    def _nvext(self, tokens: Tokens) -> Iterator[bytes]:
        return nvext_json(self.options.extra, self.requests[0], self.target, tokens, self.clock)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        with named_errors(self.names, self.requests[0]):
            choices = self._choices(keep=bool(self.options.extra))
            has_begun = [False] * len(choices)
            readers = self._readers(choices)
            silent_since: float | None = None
            async with aclosing(updates(self.service, self.http_request, self.requests, choices)) as found:
                async for choice, part in found:
                    if len(part.tokens.ids):
                        self.clock.token()
                    is_first = not has_begun[choice.index]
                    update = self._echoed(choice, part, is_first=is_first)
                    opening = self.shape.opening(choice.index) if is_first else None
                    if opening is not None:
                        yield self._event(msgspec.json.encode(opening), choices, prompt=not any(has_begun))
                    has_begun[choice.index] = True
                    reader, parts = readers[choice.index], None
                    if reader is not None:
                        ids, final = update.tokens.ids.tolist(), choice.finish_reason is not None
                        parts = await reader.add(update.text, ids, final=final)
                    if not self._is_news(choice, update, parts):
                        # A tool call is held back until it is complete, which may take minutes.
                        if silent_since is None:
                            silent_since = time.monotonic()
                        elif time.monotonic() - silent_since >= KEEP_ALIVE_S:
                            yield NO_EVENT
                            silent_since = time.monotonic()
                        continue
                    silent_since = None
                    more = self._prompt_ids(choice.request, of_answer=False) if is_first else {}
                    text = self._shown(choice, update, reader, parts, delta=True)
                    shown = b"".join(
                        self._choice_json(choice, update, {**text, **more}, rows=update.tokens.rows, delta=True)
                    )
                    nvext = b""
                    if choice.finish_reason and self.options.extra:
                        nvext = b"".join(self._nvext(choice.pop_update().tokens))
                    yield self._event(shown, choices, nvext=nvext)
            if self.options.usage:
                yield self._event(None, choices)

    def _is_news(self, choice: AnswerChoice, update: Update, parts: AnswerParts | None) -> bool:
        """Return True if an event for this update has new content for the client."""
        options = self.options
        shows_tokens = options.token_ids or options.top_logprobs is not None or options.routed_experts
        text = update.text if parts is None else parts
        return bool(text or choice.finish_reason or (shows_tokens and len(update.tokens.ids)))

    def _event(
        self, shown: bytes | None, choices: Sequence[AnswerChoice], *, prompt: bool = False, nvext: bytes = b""
    ) -> bytes:
        """Return one event of a stream. If `shown` is None, the event has no choice and only the usage."""
        event: dict[str, Any] = {
            "id": self._id,
            "object": self.shape.event_object,
            "created": self.created,
            "model": self.target.name,
            "choices": [] if shown is None else [msgspec.Raw(shown)],
        }
        if self.options.usage:
            is_due = shown is None or self.options.continuous_usage
            event["usage"] = self._usage(choices) if is_due else None
        if prompt:
            event |= self._prompt_ids(self.requests[0], of_answer=True)
        if nvext:
            event["nvext"] = msgspec.Raw(nvext)
        return msgspec.json.encode(event)

    @cached_property
    def _namer(self) -> Namer:
        return Namer(self.tokenizer, as_token_ids=self.options.as_token_ids)

    @property
    def _id(self) -> str:
        return f"{self.shape.id_prefix}{self.requests[0].request_id}"

    def _usage(self, choices: Sequence[AnswerChoice]) -> Usage:
        # If a prompt has several answers, count the cached tokens of the first answer. The other answers may have found
        # the prompt that the first answer computed.
        firsts = choices[:: self.requests[0].sampling.n]
        return usage_of(
            sum(request.prompt_len for request in self.requests),
            sum(choice.num_tokens for choice in choices),
            [choice.cached_tokens for choice in firsts],
        )

    def _prompt_ids(self, request: bus.GenerateRequest, *, of_answer: bool) -> dict[str, Any]:
        """Return the prompt's token ids, if the shape has them at this place and the request asks for token ids."""
        if not self.options.token_ids or self.shape.prompt_is_common is not of_answer:
            return {}
        return {"prompt_token_ids": np.asarray(request.prompt_token_ids).tolist()}


AS_GIVEN: Final = ("timeout_s", "return_token_ids", "routed_experts_format")
"""Fields with the same names and meanings in a rendered body, which has them only if they are given."""


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a chat, as in OpenAI's API. With `nvext.token_data`, continue these token ids."""
    clock = RequestClock()
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), ChatBody)
    return await _answer(service, request, body, clock)


async def completions(service: Service, request: Request) -> Response:
    """Continue texts or token ids, as in OpenAI's API."""
    clock = RequestClock()
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), CompletionBody)
    return await _answer(service, request, body, clock)


async def render_chat(service: Service, request: Request) -> Response:
    """Return the body of `/inference/v1/generate` that continues a chat. This generates nothing."""
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), ChatBody)
    job = await _job(service, request, body, RequestClock())
    return json_response(_rendered(body, job, job.requests[0]))


async def render_completions(service: Service, request: Request) -> Response:
    """Return a body of `/inference/v1/generate` for each prompt of a completion. This generates nothing."""
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), CompletionBody)
    job = await _job(service, request, body, RequestClock())
    return json_response([_rendered(body, job, each) for each in job.requests])


def _rendered(body: ChatBody | CompletionBody, job: CompletionHandler, request: bus.GenerateRequest) -> dict[str, Any]:
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
    given: dict[str, Any] = {name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None}
    if "kv_hints" in extra:
        given["kv_hints"] = extra.pop("kv_hints")
    return {
        "request_id": request_id,
        "token_ids": np.asarray(request.prompt_token_ids).tolist(),
        "sampling_params": {**params, **extra, **computed},
        "model": job.target.name,
        "stream": bool(body.stream),
        "stream_options": body.stream_options,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "features": None,
        **given,
    }


async def _answer(service: Service, request: Request, body: ChatBody | CompletionBody, clock: RequestClock) -> Response:
    try:
        async with service.preparing(request, body.request_id):
            job = await _job(service, request, body, clock)
    except RequestAborted as error:
        return _aborted(body, error)
    return await (job.stream() if body.stream else job.answer())


def _aborted(body: ChatBody | CompletionBody, error: RequestAborted) -> Response:
    """Return the answer to a request that was aborted before it was open: no text."""
    shape, stream = CHAT if isinstance(body, ChatBody) else COMPLETION, bool(body.stream)
    num_prompts = 1 if isinstance(body, ChatBody) else count_prompts(body)
    head = {
        "id": f"{shape.id_prefix}{error.request_id}",
        "object": shape.event_object if stream else shape.object,
        "created": int(time.time()),
        "model": body.model or error.model,
    }
    nothing: dict[str, Any] = {} if stream else {"prompt_logprobs": None}
    ended = {"finish_reason": bus.FinishReason.ABORT, "stop_reason": None, "logprobs": None}
    if not shape.prompt_is_common:
        ended |= nothing
    num_choices = num_prompts * min(max(body.n or 1, 1), MAX_N)
    choices = [{"index": index, **shape.text("", delta=stream), **ended} for index in range(num_choices)]
    usage = usage_of(0, 0)
    if not stream:
        of_answer = nothing if shape.prompt_is_common else {}
        return aborted_response(error, [{**head, "choices": choices, "usage": usage, **of_answer}], stream=False)
    parts = [part for choice in choices for part in (shape.opening(choice["index"]), choice) if part is not None]
    events: list[dict[str, Any]] = [{**head, "choices": [part]} for part in parts]
    if body.stream_options is not None and body.stream_options.include_usage:
        events.append({**head, "choices": [], "usage": usage})
    return aborted_response(error, events, stream=True)


async def _job(
    service: Service, request: Request, body: ChatBody | CompletionBody, clock: RequestClock
) -> CompletionHandler:
    check_served(body)
    target = await find_target(service, request, body.model, body.timeout_s)
    options = read_options(body, target, service.settings)
    sampling = sampling_fields(body, options, None)
    with named_errors(bus_names(body, "prompt")):
        # Check before the tokenizer is loaded and a long prompt is tokenized.
        check_sampling(bus.SamplingParams(**sampling), target.capabilities)
    question = read_question(body, service.parsers) if isinstance(body, ChatBody) else None
    load = partial(service.tokenizer, target.worker)
    tokenizer = await load() if options.text or body.bad_words else None
    plan = None if question is None else await make_plan(question, service.parsers, tokenizer, target)
    if isinstance(body, ChatBody):
        prompts = [await chat_prompt(body, load)]
    else:
        prompts = await completion_prompts(body, load)
        service.admit(request, len(prompts) - 1)
    if options.extra and len(prompts) > 1:
        raise invalid("prompt", f"has {len(prompts)} prompts", "1 with nvext.extra_fields, which describe one answer")
    if body.bad_words:
        sampling = sampling_fields(body, options, tokenizer)
    fields, reading = bus_fields(body, options), None
    if isinstance(body, ChatBody) and question is not None and plan is not None:
        reading = Reading(body, question, plan)
        sampling = reading.constrain(sampling)
        options = dataclasses.replace(options, skip_special_tokens=plan.skip_special_tokens)
    requests: list[bus.GenerateRequest] = []
    for index, prompt in enumerate(prompts):
        check_length(prompt.field, len(prompt.token_ids), target)
        names = bus_names(body, prompt.field)
        of_prompt = {**fields, "prompt_token_ids": prompt.token_ids}
        made = build_request(service, request, target, sampling=sampling, fields=of_prompt, names=names)
        with named_errors(names):
            # The HTTP request has one id. The first prompt uses it unchanged; later prompts add their index.
            requests.append(replace(made, **_later_id(requests[0], index)) if requests else made)
    return CompletionHandler(
        service=service,
        http_request=request,
        shape=CHAT if isinstance(body, ChatBody) else COMPLETION,
        target=target,
        tokenizer=tokenizer,
        requests=requests,
        options=options,
        names=bus_names(body, prompts[0].field),
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

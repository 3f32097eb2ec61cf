"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.answer_types import ChatAnswer, CompletionAnswer
from frontend.http.body import decode_body, read_body
from frontend.http.errors import invalid
from frontend.http.openai.body import ChatBody, CompletionBody, check_served
from frontend.http.openai.job import Job
from frontend.http.openai.nvext import Clock
from frontend.http.openai.options import bus_fields, bus_names, read_options, sampling_fields
from frontend.http.openai.prompts import chat_prompt, check_length, completion_prompts
from frontend.http.openai.shapes import CHAT, COMPLETION
from frontend.http.service import RouteTable, Service
from frontend.http.wanted import find_target, make_wanted, named_errors

__all__ = ["ANSWERS", "BODIES", "ROUTES"]


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a chat, as OpenAI's API; with `nvext.token_data`, continue token ids."""
    clock = Clock()
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), ChatBody)
    return await _answer(service, request, body, clock)


async def completions(service: Service, request: Request) -> Response:
    """Continue texts or token ids, as OpenAI's API."""
    clock = Clock()
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), CompletionBody)
    return await _answer(service, request, body, clock)


async def _answer(service: Service, request: Request, body: ChatBody | CompletionBody, clock: Clock) -> Response:
    check_served(body)
    target = find_target(service, body.model)
    options = read_options(body, target)
    tokenizer = await service.tokenizer(target.worker)
    if isinstance(body, ChatBody):
        prompts = [await chat_prompt(body, tokenizer)]
    else:
        prompts = await completion_prompts(body, tokenizer)
        service.admit(request, len(prompts) - 1)
    if options.extra and len(prompts) > 1:
        raise invalid("prompt", f"has {len(prompts)} prompts", "1 with nvext.extra_fields, which tell of one answer")
    sampling, fields = sampling_fields(body, options, tokenizer), bus_fields(body, options)
    wanted: list[bus.GenerateRequest] = []
    for index, prompt in enumerate(prompts):
        check_length(prompt, target)
        names = bus_names(body, prompt.field)
        of_prompt = {**fields, "prompt_token_ids": prompt.token_ids}
        made = make_wanted(service, request, target, sampling=sampling, fields=of_prompt, names=names)
        with named_errors(names):
            # One id comes with the HTTP request; the first prompt has it as it is.
            wanted.append(replace(made, request_id=f"{wanted[0].request_id}-{index}") if wanted else made)
    job = Job(
        service=service,
        request=request,
        shape=CHAT if isinstance(body, ChatBody) else COMPLETION,
        target=target,
        tokenizer=tokenizer,
        wanted=wanted,
        options=options,
        names=bus_names(body, prompts[0].field),
        clock=clock,
    )
    return await (job.stream() if body.stream else job.answer())


ROUTES: RouteTable = {
    ("POST", "/v1/chat/completions"): chat_completions,
    # By this name prime-rl asks with `tokens`.
    ("POST", "/v1/chat/completions/tokens"): chat_completions,
    ("POST", "/v1/completions"): completions,
}
BODIES: dict[tuple[str, str], object] = {
    ("POST", "/v1/chat/completions"): ChatBody,
    ("POST", "/v1/chat/completions/tokens"): ChatBody,
    ("POST", "/v1/completions"): CompletionBody,
}
ANSWERS: dict[tuple[str, str], object] = {
    ("POST", "/v1/chat/completions"): ChatAnswer,
    ("POST", "/v1/chat/completions/tokens"): ChatAnswer,
    ("POST", "/v1/completions"): CompletionAnswer,
}

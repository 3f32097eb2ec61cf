"""docs/http-compatibility.md states for each route and field whether it is served. The tests try each row."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import rollbus
from rollbus.frontend.http import Settings
from rollbus.frontend.http.agents.messages import MessagesBody
from rollbus.frontend.http.agents.responses import ResponsesBody
from rollbus.frontend.http.app import ADMIN, DATA, OPEN
from rollbus.frontend.http.chat import DetokenizeBody, TokenizeBody
from rollbus.frontend.http.control.bodies import SendBody
from rollbus.frontend.http.generate import GenerateBody, SamplingBody
from rollbus.frontend.http.openai.body import ChatBody, CompletionBody, NvExt
from rollbus.frontend.http.sampling import SamplingFields
from rollbus.frontend.http.trainers.skyrl import SkyrlBody
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.cli.support import ROOT
from tests.http.support import Http, Serve, Talk, http_before, make_byte_level, noted_requests, save
from tests.support.hand_worker import running

USER = {"role": "user", "content": "the"}
BODIES: dict[str, tuple[type[msgspec.Struct], str, dict[str, Any], str]] = {
    "Chat": (ChatBody, "/v1/chat/completions", {"messages": [USER], "max_tokens": 2}, ""),
    "Completions": (CompletionBody, "/v1/completions", {"prompt": "the", "max_tokens": 2}, ""),
    "Responses": (ResponsesBody, "/v1/responses", {"input": "the", "max_output_tokens": 2}, ""),
    "Messages": (MessagesBody, "/v1/messages", {"messages": [USER], "max_tokens": 2}, ""),
    "nvext": (NvExt, "/v1/chat/completions", {"messages": [USER], "max_tokens": 2}, "nvext."),
    "Generate": (
        GenerateBody,
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
        "",
    ),
    "sampling_params": (
        SamplingBody,
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
        "sampling_params.",
    ),
    "SkyRL": (SkyrlBody, "/skyrl/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}, ""),
    "Tokenize": (TokenizeBody, "/v1/tokenize", {"prompt": "the"}, ""),
    "Detokenize": (DetokenizeBody, "/v1/detokenize", {"tokens": [5]}, ""),
}
"""By heading: the body, its route, the other fields of a request, and the prefix of the field."""
VLLM_PROTOCOLS = {
    "Chat": ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    "Completions": ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    "Responses": ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
    "Messages": ("vllm.entrypoints.anthropic.protocol", "AnthropicMessagesRequest"),
    "Generate": ("vllm.entrypoints.scale_out.token_in_token_out.protocol", "GenerateRequest"),
    "sampling_params": ("vllm.sampling_params", "SamplingParams"),
}


# Reads docs/http-compatibility.md: the routes, and the fields of each body with an example.


PAGE = ROOT / "docs/http-compatibility.md"
HEADINGS = {"yes": "Served routes", "501": "Routes with 501", "404": "Unknown routes"}
"""By `RouteRow.served`: the heading of the table."""
SHARED = {
    "Chat": ("Sampling", "OpenAI"),
    "Completions": ("Sampling", "OpenAI"),
    "sampling_params": ("Sampling",),
    "Responses": ("Agents",),
    "Messages": ("Agents",),
}
"""By heading of a body: the headings of the tables that it shares with other bodies."""


@dataclass(frozen=True)
class RouteRow:
    """A route."""

    method: str
    path: str
    served: str
    """`yes`. `501`: known, but refused with the reason. `404`: unknown."""
    why: str


@dataclass(frozen=True)
class FieldRow:
    """A field of a body."""

    name: str
    example: Any
    served: str
    """`yes`, `no effect`, `engine` (if the worker's engine supports it) or `no`."""
    why: str


def _rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without the header rows."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def _routes(cell: str) -> Iterator[tuple[str, str]]:
    """Yield method and path of each route of a cell. A path without a method has the method of the route before it."""
    method = ""
    for route in re.findall(r"`([^`]+)`", cell):
        *methods, path = route.split(" ")
        method = methods[0] if methods else method
        yield method, path


def route_rows() -> list[RouteRow]:
    """Return a row for each route."""
    return [
        RouteRow(method, path, served, why)
        for served, heading in HEADINGS.items()
        for cell, *_, why in _rows(heading)
        for method, path in _routes(cell)
    ]


def field_rows(body: str) -> list[FieldRow]:
    """Return a row for each field of a body."""
    return [row for heading in (*SHARED.get(body, ()), body) for row in rows_below(heading)]


def rows_below(heading: str) -> list[FieldRow]:
    """Return a row for each field of a table."""
    return [
        FieldRow(name, json.loads(example), served, why)
        for served, fields, why in _rows(heading)
        for name, example in re.findall(r"`(\w+): ([^`]+)`", fields)
    ]


def control_rows() -> dict[str, set[str]]:
    """Return the fields of each control route by path."""
    return {
        path: set(re.findall(r"`(\w+)`", fields)) for cell, fields in _rows("Commands") for _, path in _routes(cell)
    }


def names(body: type[msgspec.Struct]) -> set[str]:
    """Return the field names of a struct as they are in JSON."""
    return {field.encode_name for field in msgspec.structs.fields(body)}


def plain(path: str) -> str:
    """Return a path without the types of its parameters."""
    return re.sub(r":path}", "}", path)


def test_the_table_lists_every_route_of_rollbus() -> None:
    """The table lists each route of the service once with its method, and no other route as known."""
    rows = [(row.method, row.path) for row in route_rows() if row.served != "404"]
    assert sorted(rows) == sorted((method, plain(path)) for method, path in {**OPEN, **DATA, **ADMIN})


@pytest.mark.parametrize("body", BODIES)
def test_the_table_lists_every_field_of_rollbus(body: str) -> None:
    """The table lists each field of the body once, and no other field as served."""
    rows = field_rows(body)
    assert len({row.name for row in rows}) == len(rows)
    served = {row.name for row in rows if row.why != "is unknown"}
    assert served == names(BODIES[body][0])


def test_the_table_lists_every_field_of_a_command() -> None:
    """The table lists the fields of each command, apart from the fields that all commands share."""
    bodies = {path: route.body for (method, path), route in ADMIN.items() if method == "POST" and route.body}
    found = {path: names(body) - names(SendBody) for path, body in bodies.items()}
    assert control_rows() == found


@pytest.mark.parametrize("body", VLLM_PROTOCOLS)
def test_the_table_lists_every_field_of_vllm(body: str) -> None:
    """The table lists all public fields of the installed vLLM release."""
    pytest.importorskip("vllm")
    module, name = VLLM_PROTOCOLS[body]
    kind = getattr(__import__(module, fromlist=[name]), name)
    fields = set(getattr(kind, "model_fields", None) or kind.__struct_fields__)
    rows = {row.name: row for row in field_rows(body)}
    assert {field for field in fields if not field.startswith("_")} - rows.keys() == set()
    if body == "sampling_params":
        # vLLM computes this one itself. All others are known to rollbus.
        assert {name for name, row in rows.items() if row.why == "is unknown"} <= {"output_text_buffer_length"}


def test_the_table_lists_every_route_of_vllm() -> None:
    """The table lists all routes in the sources of the installed vLLM release."""
    pytest.importorskip("vllm")
    spec = find_spec("vllm.entrypoints")
    root = Path(str(spec.origin)).parent
    found = {
        (method.upper(), path)
        for source in root.rglob("*.py")
        for method, path in re.findall(r'@router\.(get|post)\(\s*"(/[^"]*)"', source.read_text())
    }
    assert len(found) > 50
    assert found - {(row.method, row.path) for row in route_rows()} == set()


async def test_routes_are_served_or_refused_as_in_the_table(serve_fleet: Serve) -> None:
    """Served routes exist. The other routes are refused, with the reason in the table if they are known."""
    async with serve_fleet() as http:
        for row in route_rows():
            async with http.client.stream(row.method, re.sub(r"{\w+}", "x", row.path)) as answer:
                content = await answer.aread() if answer.status_code >= 400 else b""
            error = answer.json()["error"] if content[:9] == b'{"error":' else {}
            if row.served == "yes":
                assert answer.status_code not in (405, 501), row
                assert error.get("code") != "unknown_route" or row.path == "/assets/{name}", row
            elif row.served == "501":
                assert (answer.status_code, error["code"]) == (501, "not_served"), row
                assert row.why.replace("`", "") in error["message"].replace("`", ""), row
            else:
                assert (answer.status_code in (404, 405), row.served) == (True, "404"), row


async def test_fields_are_accepted_or_refused_as_in_the_table(talk: Talk) -> None:
    """Served fields are accepted. The other fields are refused by name with the reason in the table."""
    async with talk() as (http, _):
        wrong: list[str] = []
        for body, (_, path, base, prefix) in BODIES.items():
            for row in field_rows(body):
                answer = await http.client.post(path, json=_with(base, prefix, row))
                if not _agrees_with_row(row, prefix, answer.status_code, answer.text):
                    wrong.append(f"{body}: {row} {answer.status_code} {answer.text[:300]}")
    assert wrong == []


def _with(base: dict[str, Any], prefix: str, row: FieldRow) -> dict[str, Any]:
    """Return a body with the example of the row. Fields that exclude the row's field are left out."""
    owner = prefix.removesuffix(".")
    if owner:
        return {**base, owner: {**base.get(owner, {}), row.name: row.example}}
    left = {name: value for name, value in base.items() if (name, row.name) not in EXCLUSIVE}
    more = {} if "input" in base and row.name == "top_logprobs" else WITH.get(row.name, {})
    return {**left, row.name: row.example, **more}


EXCLUSIVE = {("prompt", "messages"), ("max_tokens", "max_completion_tokens")}
WITH: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
"""The other fields that a field requires."""


def _agrees_with_row(row: FieldRow, prefix: str, status: int, text: str) -> bool:
    error = msgspec.json.decode(text).get("error") if status >= 400 else None
    if row.served in ("yes", "no effect"):
        return status == 200
    if error is None or status != 400:
        return False
    reason = "is unknown to synthetic" if row.served == "engine" else row.why.replace("`", "")
    return f"{prefix}{row.name}" == error["param"] and reason in error["message"]


async def test_fields_of_commands_in_the_table_are_known(serve_fleet: Serve) -> None:
    """Each field of a command is known: an invalid value is refused as wrong and not as unknown."""
    async with serve_fleet() as http:
        for path, fields in control_rows().items():
            for field in fields:
                answer = await http.client.post(path, json={field: [[]]})
                error = answer.json()["error"]
                assert answer.status_code == 400, (path, field)
                assert error["param"].startswith(field), (path, field, error)
                assert "is unknown" not in error["message"], (path, field, error)


# Sampling fields have the same names and meanings on all token routes.


PROMPT = [5, 6, 7, 8]
SAMPLING = rows_below("Sampling")
EXTRA = {row.name: row.example for row in SAMPLING if row.served == "engine"}
"""Fields that only engines that support them receive."""
CHECKED_BEFORE = ("prompt_logprobs", "thinking_token_budget")
"""Fields that OpenAI's routes of vLLM do not read leniently."""
FOR_THE_ANSWER = ("routed_experts_prompt_start", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
"""Fields whose examples do not change the request to the bus."""


def test_all_bodies_share_the_sampling_fields() -> None:
    """All three bodies share the sampling fields unchanged, and the table has each of them."""
    shared = {field.name: field for field in msgspec.structs.fields(SamplingFields)}
    assert sorted(row.name for row in SAMPLING) == sorted(shared)
    for body in (SamplingBody, ChatBody, CompletionBody):
        own = {field.name: field for field in msgspec.structs.fields(body)}
        for name, field in shared.items():
            assert own[name].default is field.default
            if body is SamplingBody or name not in CHECKED_BEFORE:
                assert own[name].type == field.type
    assert all(field.default is None for field in shared.values())
    # Each route has its own field for logprobs of sampled tokens. The other differences have no effect.
    without_effect = {"reasoning_effort", "return_token_ids", "return_tokens_as_token_ids"}
    assert set(SamplingBody.__struct_fields__) - set(shared) == {"logprobs"} | without_effect


class Routes:
    """The three token routes of one service, which receive the same fields."""

    def __init__(self, http: Http, asked: list[rollbus.GenerateRequest]) -> None:
        self._http = http
        self._asked = asked

    async def each(self, fields: dict[str, Any], **more: Any) -> list[tuple[int, str | None, Any]]:
        """Return for each route the status, the wrong field without the route's prefix, and the request to the bus."""
        sampling = {"max_tokens": 3, **fields}
        tokens = {"tokens": PROMPT, **sampling, **more}
        found: list[tuple[int, str | None, Any]] = []
        for path, body in (
            ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling, **more}),
            ("/v1/chat/completions", tokens),
            ("/v1/completions", tokens),
        ):
            answer = await self._http.client.post(path, json=body)
            wrong = answer.json()["error"]["param"] if answer.status_code >= 400 else None
            if wrong is not None:
                assert ("sampling_params." in wrong) == ("sampling_params" in body and wrong.split(".")[-1] not in more)
                found.append((answer.status_code, wrong.removeprefix("sampling_params."), None))
            else:
                asked = self._asked.pop()
                found.append((200, None, (asked.sampling, asked.routed_experts_prompt_start)))
            assert not self._asked
        return found


@asynccontextmanager
async def routes_of(
    nats_url: str, fleet: str, folder: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...] = ()
) -> AsyncIterator[Routes]:
    """Serve a synthetic model whose engine supports these extra parameters."""
    engine = SyntheticEngine(SyntheticConfig(vocab_size=264, eos_token_id=262, max_model_len=64))
    engine.capabilities = replace(engine.capabilities, extra=extra)
    settings = Settings(tokenizer=save(make_byte_level(), folder))
    asked = noted_requests(monkeypatch)
    async with running(nats_url, fleet, engine), http_before(nats_url, fleet, settings) as http:
        await http.own.fleet.wait_for_workers()
        yield Routes(http, asked)


async def test_all_routes_make_the_same_request_to_the_bus(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all routes, a field makes the same request to the bus. Only a field of the bus changes the request.

    Null is the same as a missing field.
    """
    async with routes_of(nats_url, fleet, tmp_path, monkeypatch) as routes:
        (first, *others) = plain = await routes.each({})
        assert [first, first] == others
        # With stop strings, the service reads chunks, which are not noted.
        for row in (row for row in SAMPLING if row.served in ("yes", "no effect") and row.name != "stop"):
            first, *others = await routes.each({row.name: row.example})
            assert (first[0], [first, first]) == (200, others), row
            assert (first[2] == plain[0][2]) == (row.served == "no effect" or row.name in FOR_THE_ANSWER), row
        start = await routes.each({"routed_experts_prompt_start": 2})
        assert [asked[1] for _, _, asked in start] == [2, 2, 2]
        assert await routes.each(dict.fromkeys(set(SamplingFields.__struct_fields__) - {"max_tokens"})) == plain


async def test_all_routes_refuse_unsupported_fields(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All routes refuse unsupported fields with the field's name."""
    async with routes_of(nats_url, fleet, tmp_path, monkeypatch) as routes:
        for row in (row for row in SAMPLING if row.served in ("engine", "no")):
            assert await routes.each({row.name: row.example}) == [(400, row.name, None)] * 3
        assert await routes.each({}, kv_hints={"actions": []}) == [(400, "kv_hints", None)] * 3
        assert await routes.each({"stop": ["x"], "detokenize": False}) == [(400, "detokenize", None)] * 3
        assert await routes.each({"prompt_logprobs": 1}, stream=True) == [(400, "prompt_logprobs", None)] * 3
        wrong = [("bad_words_token_ids", [[264]], "bad_words_token_ids[0]"), ("bad_words", [" "], "bad_words")]
        for name, value, param in [*wrong, ("temperature", 3, "temperature"), ("seed", -2, "seed")]:
            assert await routes.each({name: value}) == [(400, param, None)] * 3


async def test_extra_parameters_reach_an_engine_that_supports_them(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extra parameters that the engine supports reach it by their names from all routes."""
    async with routes_of(nats_url, fleet, tmp_path, monkeypatch, (*EXTRA, "kv_hints")) as routes:
        for name, value in EXTRA.items():
            found = await routes.each({name: value})
            assert [(status, asked[0].extra) for status, _, asked in found] == [(200, {name: value})] * 3
        hints: dict[str, Any] = {"actions": []}
        found = await routes.each({"extra_args": {"a": 1}}, kv_hints=hints)
        assert [asked[0].extra for _, _, asked in found] == [{"extra_args": {"a": 1}, "kv_hints": hints}] * 3


async def test_two_names_of_a_field_must_agree(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names of a field must agree if both are set, and `continue_final_message` alone continues a message."""
    async with routes_of(nats_url, fleet, tmp_path, monkeypatch, ("extra_args",)) as routes:
        post, asked = routes._http.client.post, routes._asked
        chat = {"messages": [USER, {"role": "assistant", "content": "a"}], "max_tokens": 2, "return_token_ids": True}
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"vllm_xargs": {"a": 1}, "extra_args": {"a": 2}}, "extra_args"),
            ({"chat_template_kwargs": {"a": 1}, "chat_template_args": {"a": 2}}, "chat_template_args"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ]
        for body, param in wrong:
            answer = await post("/v1/chat/completions", json={**chat, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        prompts = []
        same: list[dict[str, Any]] = [
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False, "vllm_xargs": {"a": 1}},
            {"chat_template_args": {"a": 1}, "chat_template_kwargs": {"a": 1}, "extra_args": {"a": 1}},
        ]
        for body in same:
            answer = await post("/v1/chat/completions", json={**chat, **body})
            assert answer.status_code == 200, answer.text
            prompts.append(answer.json()["prompt_token_ids"])
        assert prompts[0] == prompts[1] != prompts[2]
        assert [each.sampling.extra for each in asked] == [None, *[{"extra_args": {"a": 1}}] * 2]

"""docs/http-compatibility.md states for each route and field whether it is served. The tests try each row."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollbus.frontend.http.app import ADMIN, DATA, OPEN
from rollbus.frontend.http.chat import DetokenizeBody, TokenizeBody
from rollbus.frontend.http.control.bodies import SendBody
from rollbus.frontend.http.generate import GenerateBody, SamplingBody
from rollbus.frontend.http.openai.body import ChatBody, CompletionBody, NvExt
from tests.http.compatibility_table import FieldRow, control_rows, field_rows, route_rows
from tests.http.openai_support import talking
from tests.http.support import http_before

USER = {"role": "user", "content": "the"}
BODIES: dict[str, tuple[type[msgspec.Struct], str, dict[str, Any], str]] = {
    "Chat": (ChatBody, "/v1/chat/completions", {"messages": [USER], "max_tokens": 2}, ""),
    "Completions": (CompletionBody, "/v1/completions", {"prompt": "the", "max_tokens": 2}, ""),
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
    "Tokenize": (TokenizeBody, "/v1/tokenize", {"prompt": "the"}, ""),
    "Detokenize": (DetokenizeBody, "/v1/detokenize", {"tokens": [5]}, ""),
}
"""By heading: the body, its route, the other fields of a request, and the prefix of the field."""
VLLM_PROTOCOLS = {
    "Chat": ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    "Completions": ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    "Generate": ("vllm.entrypoints.scale_out.token_in_token_out.protocol", "GenerateRequest"),
    "sampling_params": ("vllm.sampling_params", "SamplingParams"),
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
    found = {path: names(body) - names(SendBody) for path, body in bodies.items() if isinstance(body, type)}
    assert control_rows() == found


@pytest.mark.parametrize("body", VLLM_PROTOCOLS)
def test_the_table_lists_every_field_of_vllm(body: str) -> None:
    """The table lists all public fields of the installed vLLM release."""
    pytest.importorskip("vllm")
    module, name = VLLM_PROTOCOLS[body]
    kind = getattr(__import__(module, fromlist=[name]), name)
    fields = set(getattr(kind, "model_fields", None) or kind.__struct_fields__)
    assert {field for field in fields if not field.startswith("_")} - {row.name for row in field_rows(body)} == set()


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


async def test_routes_are_served_or_refused_as_in_the_table(nats_url: str, fleet: str) -> None:
    """Served routes exist. The other routes are refused, with the reason in the table if they are known."""
    async with http_before(nats_url, fleet) as http:
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


async def test_fields_are_accepted_or_refused_as_in_the_table(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Served fields are accepted. The other fields are refused by name with the reason in the table."""
    async with talking(nats_url, fleet, tmp_path) as (http, _):
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
    return {**left, row.name: row.example, **WITH.get(row.name, {})}


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


async def test_fields_of_commands_in_the_table_are_known(nats_url: str, fleet: str) -> None:
    """Each field of a command is known: an invalid value is refused as wrong and not as unknown."""
    async with http_before(nats_url, fleet) as http:
        for path, fields in control_rows().items():
            for field in fields:
                answer = await http.client.post(path, json={field: [[]]})
                error = answer.json()["error"]
                assert answer.status_code == 400, (path, field)
                assert error["param"].startswith(field), (path, field, error)
                assert "is unknown" not in error["message"], (path, field, error)

"""Wrong input to each route gives 4xx with the field, and leaves no request in the engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import rollbus
from rollbus.frontend.http.app import ADMIN, DATA
from rollbus.frontend.http.body import STRICT
from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.small_tokenizers import make_byte_level, save
from tests.http.support import Http, http_service
from tests.support.fleet import until_idle

BASES: dict[str, dict[str, Any]] = {
    "GenerateBody": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    "ChatBody": {"model": "synthetic", "messages": [{"role": "user", "content": "the"}], "max_tokens": 1},
    "CompletionBody": {"model": "synthetic", "prompt": [1, 2], "max_tokens": 1},
    "TokenizeBody": {"prompt": "the"},
    "DetokenizeBody": {"tokens": [1]},
    "InitTransferBody": {"init_info": {}},
    "AddLoraBody": {"lora_name": "x", "source": {"uri": "file:///x"}},
    "AbortBody": {"request_ids": ["x"]},
    "DrainBody": {"workers": ["x"]},
}
"""A valid request by the name of the decoded type. The bodies of other types may be empty."""
VALUES: list[Any] = [
    *("", "x", "\u0000", [], {}, True, 1.5, -1, 2**31, 2**63, 2**70, 1e308, None, [[]], [None], [-1], [2**70], [1.5]),
    *({"x": 1}, [{}], [""], {"": {"": [[[]]]}}, "x" * 10_000, [[[[[[]]]]]]),
]
NO_JSON = (
    *(b"{", b"{]", b'{"a":}', b'"', b"nul", b"\x00", b"\xff\xfe", b"{} {}", b"{'a': 1}", b'{"a": 1,}'),
    *(
        '{"model": "é"}'.encode("latin-1"),
        '{"model": "x"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"model": "\\ud800"}',
    ),
    *(b'{"model": ' * 100_000, b"[" * 100_000, b'{"model": NaN}', b'{"model": Infinity}', b'{"model": -Infinity}'),
)
ROUTES = {**DATA, **ADMIN}
NO_OBJECT = (b"[]", b"1", b'"x"', b"true", b"null", b"[{}]")


def kind_of(route: tuple[str, str]) -> type[msgspec.Struct]:
    """Return the type that a route decodes."""
    kind = ROUTES[route].body
    assert isinstance(kind, type)
    assert issubclass(kind, msgspec.Struct)
    return kind


def base_of(kind: type) -> dict[str, Any]:
    """Return a valid request of the type."""
    return BASES.get(kind.__name__, {})


def paths(
    kind: type[msgspec.Struct], base: dict[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], msgspec.structs.FieldInfo]]:
    """Yield each field of a body and of its nested structs."""
    for field in msgspec.structs.fields(kind):
        path = (*prefix, field.encode_name)
        yield path, field
        for inner in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from paths(inner, base, path)


def with_value(base: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of the body with another value at that path."""
    name, *rest = path
    if rest:
        inner = base.get(name)
        value = with_value(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    return {**base, name: value}


def is_refused(body: dict[str, Any], kind: type) -> bool:
    """Return True if the types and bounds alone refuse the body."""
    try:
        msgspec.json.decode(msgspec.json.encode(body), type=kind)
    except (msgspec.ValidationError, OverflowError):
        return True
    return False


def is_strict(kind: Any) -> bool:
    """Return True if a field of this type is read strictly, as `test_lax.py` compares with vLLM."""
    return STRICT in getattr(kind, "__metadata__", ()) or any(map(is_strict, get_args(kind)))


def encode(body: Any) -> bytes:
    """Return JSON with numbers of any size."""
    return json.dumps(body).encode()


async def sent(http: Http, route: tuple[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status, and the error if there is one."""
    answer = await http.client.request(*route, content=body, headers={"Content-Type": "application/json"})
    if answer.status_code < 400:
        return answer.status_code, {}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 20_000
    return answer.status_code, error


@pytest.mark.parametrize(
    "route", sorted(key for key, route in ROUTES.items() if route.body is not None), ids=lambda r: r[1]
)
async def test_wrong_input_gives_400_with_the_field(
    nats_url: str, fleet: str, tmp_path: Path, route: tuple[str, str]
) -> None:
    """Input of a wrong type, out of bounds, missing, unknown, repeated or not JSON gives 400 with the field."""
    kind, is_admin = kind_of(route), route in ADMIN
    base = base_of(kind)
    settings = Settings(max_body_bytes=4 << 20, tokenizer=save(make_byte_level(), tmp_path))
    config = SyntheticConfig(max_model_len=128)
    async with http_service(nats_url, fleet, settings, config=config) as http:
        wrong: list[tuple[bytes, str | None]] = [(body, None) for body in (*NO_JSON, *NO_OBJECT)]
        wrong.append((encode({**base, "no_such_field": 1}), "no_such_field"))
        for field in msgspec.structs.fields(kind):
            name, value = field.encode_name, base.get(field.encode_name, 1)
            if field.required:
                wrong.append((encode({k: v for k, v in base.items() if k != name}), name))
            rest = "".join(f", {json.dumps(k)}: {json.dumps(v)}" for k, v in base.items() if k != name)
            wrong.append((f'{{"{name}": {json.dumps(value)}, "{name}": {json.dumps(value)}{rest}}}'.encode(), name))
        problems: list[object] = []
        for body, wanted_name in wrong:
            status, error = await sent(http, route, body)
            if (status, error.get("code")) != (400, "invalid_request") or (
                wanted_name is not None and error["param"] != wanted_name
            ):
                problems.append((body[:80], status, error))
        for path, field in paths(kind, base):
            for value in VALUES:
                body_of = with_value(base, path, value)
                # Of these values, the lax reading accepts only `true` where the type refuses it: as the number 1.
                is_one = value is True and not is_strict(field.type)
                read_as = with_value(base, path, 1 if is_one else value)
                if is_refused(body_of, kind) and is_refused(read_as, kind):
                    status, error = await sent(http, route, encode(body_of))
                    named = (error.get("param") or "").startswith(path[0])
                    if (status, error.get("code"), named) != (400, "invalid_request", True):
                        problems.append((path, repr(value)[:40], status, error))
                elif not is_admin:
                    # The type alone does not decide whether this value is valid, but an error must name a field.
                    status, error = await sent(http, route, encode(body_of))
                    if status >= 500 or (error and not error["param"]):
                        problems.append((path, repr(value)[:40], status, error))
        assert problems == []

        assert (await http.client.get("/health")).status_code == 200
        assert http.engine is not None
        await until_idle(http.engine, http.rb)
        assert (await http.rb.fleet.state()).workers[0].in_flight == 0
        request = rollbus.GenerateRequest(prompt_token_ids=[1], sampling=rollbus.SamplingParams(max_tokens=1))
        assert len((await http.rb.complete(request)).token_ids) == 1

"""Bodies whose values have another JSON type than the field: they are read as vLLM's own server reads them.

Each field gets the same values through rollbus's struct and through vLLM's pydantic model.
"""

import importlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from rollbus.frontend.http import Settings
from rollbus.frontend.http import body as lax
from rollbus.frontend.http import text as loads_module
from rollbus.frontend.http.body import decode_body
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.generate import GenerateBody
from rollbus.frontend.http.openai.body import ChatBody, CompletionBody
from rollbus.frontend.tokenization import Tokenizer
from rollbus.schemas.decoding import nearest
from rollbus.schemas.limits import DEFAULT_TIMEOUT_S
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import CHAT, COMPLETIONS, CONFIG, Serve, Talk, byte_level, make_byte_level, noted_requests, save
from tests.support.waits import SOON_S

pytestmark = pytest.mark.vllm

VLLMValidationError = pytest.importorskip("vllm.exceptions").VLLMValidationError
SAMPLING_FIELDS = pytest.importorskip("vllm.sampling_params").SamplingParams.__struct_fields__
GENERATE = "/inference/v1/generate"
SCALARS = [
    *("true", "false", "0", "1", "2", "-0", "4.0", "4.5", "1e2", "1e19", "1.0", "0.0", "9223372036854775808"),
    *('"2"', '" 2 "', '"2.0"', '"2.50"', '"2."', '"+3"', '"1_000"', '"1__0"', '"_1"', '"007"', '"-0"', '"1e3"'),
    *('".5"', '"0.5"', '"+0.5"', '"1_0.5"', '"0x10"', '"--3"', '"+ 3"', '"\\t2\\n"', '"\\u00a03"', '"\\uff10"'),
    *('"true"', '"TRUE"', '"yes"', '"off"', '"t"', '"1"', '"0"', '" true "', '""', '" "', '"x"', "[]", "{}", '["2"]'),
]
NOT_FINITE = ['"nan"', '"inf"', '"-Infinity"', "1e400", "NaN", "Infinity"]
"""Numbers that pydantic reads and rollbus refuses."""
LISTS = [
    '[1, "2", 3.0, true]',
    '["1"]',
    "[1.5]",
    '["x"]',
    '"12"',
    "1",
    "[[1]]",
    '[["1"], [2]]',
    '["1", "2"]',
    '{"5": 1}',
]
OBJECTS = ['{"5": "1.5"}', '{"5": true, "6": 2}', '{"x": "y"}', "[]", "5"]
MIXED = ("prompt", '[1, "2", 3.0, true]')
"""A prompt that the struct cannot read: `test_texts_between_ids_are_ids` has it."""
MISSING = "missing"
OUT_OF_RANGE = "out of range"


@dataclass(frozen=True)
class Route:
    """A body of both servers."""

    struct: Any
    module: str
    model: str
    base: dict[str, Any]
    owner: str = ""
    """The field that contains the fields; an empty string: the body itself."""


ROUTES = {
    CHAT: Route(
        ChatBody,
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest",
        {"messages": [{"role": "user", "content": "a"}]},
    ),
    COMPLETIONS: Route(
        CompletionBody, "vllm.entrypoints.openai.completion.protocol", "CompletionRequest", {"prompt": "a"}
    ),
    GENERATE: Route(
        GenerateBody,
        "vllm.entrypoints.scale_out.token_in_token_out.protocol",
        "GenerateRequest",
        {"token_ids": [1], "sampling_params": {}},
    ),
    "sampling_params": Route(
        GenerateBody,
        "vllm.entrypoints.scale_out.token_in_token_out.protocol",
        "GenerateRequest",
        {"token_ids": [1], "sampling_params": {}},
        "sampling_params",
    ),
}
READ = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "top_k", "n"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "seed", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("priority", "routed_experts_prompt_start", "thinking_token_budget", "stream", "ignore_eos", "echo"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("add_special_tokens", "add_generation_prompt", "continue_final_message", "include_reasoning", "length_penalty"),
    *("parallel_tool_calls", "use_beam_search", "watermarking", "detokenize"),
    *("stop", "stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words", "prompt", "token_ids", "model"),
    *("cache_salt", "session_id", "request_id", "user", "suffix", "logprob_token_ids", "assistant_tokens_mask"),
)
"""Fields that both servers have with the same meaning, and whose ranges do not hide the type."""


def cases() -> Iterator[Any]:
    """Yield each route with each of its fields that vLLM has too."""
    for name, route in ROUTES.items():
        kind = route.struct
        if route.owner:
            kind = next(each.type for each in fields(kind) if each.encode_name == route.owner)
        for field in sorted({each.encode_name for each in fields(kind)} & set(READ)):
            yield pytest.param(name, field, id=f"{name.strip('/')}-{field}")


def read_by(read: Callable[[str], Any], route: Route, field: str, text: str) -> Any:
    """Return what a server reads for a field from this JSON value; `missing` if it refuses the body."""
    base = dict(route.base)
    base.pop(field, None)
    inner = dict(base.pop(route.owner)) if route.owner else base
    whole = json.dumps(inner)[:-1] + (", " if inner else "") + f'"{field}": {text}}}'
    if route.owner:
        whole = json.dumps(base)[:-1] + f', "{route.owner}": {whole}}}'
    try:
        found = read(whole)
    except (ValueError, HttpError):
        return MISSING
    except VLLMValidationError as error:
        # vLLM reports a wrong range in the same way as a wrong type.
        return MISSING if "integer" in str(error) else OUT_OF_RANGE
    value = getattr(getattr(found, route.owner) if route.owner else found, field, MISSING)
    if isinstance(value, dict):
        # vLLM converts these keys later.
        return {str(key): each for key, each in value.items()}
    return value


def in_range(*values: Any) -> bool:
    """Return True if neither server refuses one of these values because of its range."""
    numbers = [number for value in values for number in (value if isinstance(value, list) else [value])]
    is_small = all(not isinstance(number, int | float) or 0 <= number < 20 for number in numbers)
    return is_small and not any(value in (OUT_OF_RANGE, "", []) for value in values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:max_tokens is deprecated")
@pytest.mark.parametrize(("name", "field"), list(cases()))
def test_each_value_is_read_as_by_vllm(name: str, field: str) -> None:
    """Each value of a field is read as by vLLM's own model: the same value, or refused by both."""
    route = ROUTES[name]
    model = getattr(importlib.import_module(route.module), route.model)
    if field not in (SAMPLING_FIELDS if route.owner else model.model_fields):
        pytest.skip("vLLM does not know this field on this route")
    wrong = []
    for text in [*SCALARS, *LISTS, *OBJECTS]:
        theirs = read_by(model.model_validate_json, route, field, text)
        own = read_by(lambda data: decode_body(data.encode(), route.struct), route, field, text)
        if route.owner and isinstance(theirs, list):
            # vLLM's SamplingParams already has a list without duplicates.
            own = [own] if isinstance(own, str) and own != MISSING else own
            own, theirs = (list(dict.fromkeys(each)) if isinstance(each, list) else each for each in (own, theirs))
        if in_range(theirs, own) and (own, type(own)) != (theirs, type(theirs)) and (field, text) != MIXED:
            wrong.append(f"{text}: {own!r}, vLLM: {theirs!r}")
    assert wrong == []


def test_numbers_are_finite() -> None:
    """A number that is not finite is refused, also as text. vLLM's model reads some of them."""
    for text in NOT_FINITE:
        for field in ("temperature", "max_tokens"):
            with pytest.raises(HttpError, match="not JSON" if text[0] in "NI" else field):
                decode_body(f'{{"prompt": "a", "{field}": {text}}}'.encode(), CompletionBody)


def test_errors_name_the_value_that_fits_no_rule() -> None:
    """If one value is lenient and another is wrong, the error names the wrong one."""
    with pytest.raises(HttpError, match="top_p") as raised:
        decode_body(b'{"prompt": "a", "n": "2", "top_p": "high", "seed": "1"}', CompletionBody)
    assert raised.value.param == "top_p"
    with pytest.raises(HttpError, match="n is given twice"):
        decode_body(b'{"prompt": "a", "n": "2", "n": 2}', CompletionBody)
    with pytest.raises(HttpError, match="model") as raised:
        decode_body(b'{"prompt": "a", "model": 5, "n": "2"}', CompletionBody)
    assert raised.value.param == "model"


def test_the_time_for_one_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body with too many lenient items is refused. Items of the right type do not count."""
    monkeypatch.setattr(lax, "MAX_ITEMS", 100)
    few, many = [str(each) for each in range(100)], list(range(10_000))
    body = {"prompt": many, "stop_token_ids": few, "temperature": "1"}
    assert decode_body(json.dumps(body).encode(), CompletionBody).stop_token_ids == list(range(100))
    with pytest.raises(HttpError, match="stop_token_ids"):
        decode_body(json.dumps({**body, "stop_token_ids": [*few, "1"]}).encode(), CompletionBody)


async def test_texts_between_ids_are_ids(talk: Talk) -> None:
    """A list with ids and texts of ids is one prompt of ids, as in vLLM. A list of texts has one prompt in each."""
    async with talk() as (http, _):

        async def prompts_of(prompt: object) -> Any:
            answer = await http.client.post(
                COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
            )
            found = answer.json()
            return [choice["prompt_token_ids"] for choice in found["choices"]] if "choices" in found else found["error"]

        assert await prompts_of([1, "2", 3.0, True]) == [[1, 2, 3, 1]]
        assert await prompts_of([["1", 2.0]]) == [[1, 2]]
        assert len(await prompts_of(["1", "2"])) == 2
        assert (await prompts_of([1, "x"]))["param"] == "prompt"


async def test_bodies_of_other_clients_are_served(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """`logprobs` as a boolean, seed -1, numbers as text and an empty model have the effect that they have in vLLM."""
    asked = noted_requests(monkeypatch)
    async with talk() as (http, _):

        async def post(**body: Any) -> Any:
            answer = await http.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        widths = [
            None if (found := (await post(logprobs=given))["choices"][0]["logprobs"]) is None else len(found["tokens"])
            for given in (True, False, None)
        ]
        assert widths == [2, 2, None]
        assert [request.sampling.logprobs for request in asked] == [1, 0, None]
        await post(seed=-1, n="2", max_tokens=4.0, temperature="0.5", ignore_eos="yes", model="")
        sampling = asked[-1].sampling
        assert (sampling.seed, sampling.n, sampling.max_tokens, sampling.temperature) == (None, 2, 4, 0.5)
        assert sampling.ignore_eos is True
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": "2", "logprobs": 1, "model": ""}
        answer = await http.client.post(CHAT, json={**chat, "stream": "false", "seed": "-1"})
        assert answer.status_code == 200, answer.text
        assert asked[-1].sampling.seed is None
        body = {"token_ids": ["1", 2.0], "sampling_params": {"n": "1", "logprobs": False, "seed": -1}, "model": ""}
        answer = await http.client.post(GENERATE, json=body)
        assert answer.status_code == 200, answer.text
        assert list(asked[-1].prompt_token_ids) == [1, 2]


async def test_queries_are_read_in_the_same_way(serve: Serve) -> None:
    """Parameters of a query have the same rules, because all of them are texts."""
    async with serve(Settings(), config=CONFIG) as http:
        post = http.client.post
        assert (await post("/pause?clear_cache=No&timeout_s=60.0&wait_for_inflight_requests=1")).status_code == 200
        assert (await post("/resume?timeout_s=+60")).status_code == 200
        assert (await post("/pause?clear_cache=maybe")).json()["error"]["param"] == "clear_cache"


# Timeouts, token ids without a tokenizer, and errors with the allowed values.


PROMPT = [5, 6, 7, 8]
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
    CHAT: {"tokens": PROMPT, "max_tokens": 2, "detokenize": False},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2, "detokenize": False},
}


async def test_the_timeout_is_that_of_body_header_or_service_in_this_order(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout is that of the body, the header or the service, in this order.

    A wrong header gives 400 with its name.
    """
    asked = noted_requests(monkeypatch)
    header = {"X-Request-Timeout": "20.5"}
    async with serve(Settings(timeout_s=50.0)) as http:
        for path, body in BODIES.items():
            for fields, headers in (({"timeout_s": 10}, header), ({}, header), ({}, {})):
                answer = await http.client.post(path, json={**body, **fields}, headers=headers)
                assert answer.status_code == 200, answer.text
            assert [each.timeout_s for each in asked] == [10.0, 20.5, 50.0]
            asked.clear()
            for wrong in ("soon", "0", "-1", "nan", "inf", "1e12"):
                answer = await http.client.post(path, json=body, headers={"X-Request-Timeout": wrong})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "X-Request-Timeout")
                assert wrong in error["message"]
                assert "seconds, above 0" in error["message"]
        assert Settings().timeout_s == DEFAULT_TIMEOUT_S


async def test_a_request_that_exceeds_its_timeout_gives_504(serve: Serve) -> None:
    """A request that exceeds its timeout gives 504."""
    config = SyntheticConfig(step_s=0.05)
    async with serve(config=config) as http:
        body = {"token_ids": PROMPT, "sampling_params": {"ignore_eos": True}, "timeout_s": 0.2}
        answer = await http.client.post(GENERATE, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


async def test_without_detokenization_no_tokenizer_is_needed(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `detokenize` false, no tokenizer is needed and the text is empty.

    A tokenizer in the current directory is not used.
    """
    save(make_byte_level(), tmp_path)
    monkeypatch.chdir(tmp_path)
    body: dict[str, Any] = {"nvext": {"token_data": PROMPT, "extra_fields": ["token_ids"]}, "max_tokens": 3}
    async with serve() as http:
        for path, logprobs, entries in ((CHAT, True, "content"), (COMPLETIONS, 1, "tokens")):
            asked = {**body, "logprobs": logprobs}
            streamed = await http.client.post(path, json={**asked, "detokenize": False, "stream": True})
            assert streamed.status_code == 200, streamed.text
            found = (await http.client.post(path, json={**asked, "detokenize": False})).json()
            (choice,) = found["choices"]
            assert (choice["message"]["content"] if path == CHAT else choice["text"]) == ""
            assert len(found["nvext"]["token_ids"]) == 3
            names = [each["token"] if path == CHAT else each for each in choice["logprobs"][entries]]
            assert names == [f"token_id:{each}" for each in found["nvext"]["token_ids"]]
            with_text = await http.client.post(path, json=body)
            assert (with_text.status_code, with_text.json()["error"]["code"]) == (501, "no_tokenizer")
        assert (await http.client.get("/ready")).status_code == 200


async def test_a_service_that_always_returns_tokens(serve: Serve, tmp_path: Path) -> None:
    """With `returns_tokens`, each response has token ids and logprobs, without a field in the request."""
    settings = Settings(returns_tokens=True, tokenizer=save(make_byte_level(), tmp_path))
    # No token ends an answer before its length.
    config = SyntheticConfig(vocab_size=264, eos_token_id=264, max_model_len=64)
    async with serve(settings, config=config) as http:
        found = {path: (await http.client.post(path, json=body)).json() for path, body in BODIES.items()}
    for path, answer in found.items():
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == 2
        assert (choice if path == COMPLETIONS else answer)["prompt_token_ids"] == PROMPT
        assert len(choice["logprobs"]["tokens" if path == COMPLETIONS else "content"]) == 2


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (GENERATE, {"sampling_params": {"temprature": 1}}, "sampling_params.temprature", "did you mean temperature?"),
    (GENERATE, {"tokenids": [1]}, "tokenids", "did you mean token_ids?"),
    (CHAT, {"max_completion_token": 1}, "max_completion_token", "did you mean max_completion_tokens?"),
    (CHAT, {"modalities": ["audio"]}, "modalities[0]", "allowed: text"),
    (CHAT, {"nvext": {"extra_fields": ["timming"]}}, "nvext.extra_fields[0]", "did you mean timing?"),
    (CHAT, {"nvext": {"extra_fields": ["timming"]}}, "nvext.extra_fields[0]", "engine_data"),
    (COMPLETIONS, {"top_pp": 1}, "top_pp", "did you mean top_p?"),
]


async def test_a_wrong_field_is_refused_before_the_tokenizer_is_loaded(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors name the nearest field and the allowed values. A wrong field is refused before the tokenizer is loaded."""
    loads: list[Path] = []

    def load(folder: Path) -> Tokenizer:
        loads.append(folder)
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    async with serve(Settings(tokenizer=tmp_path)) as http:
        for path, fields, param, said in WRONG:
            answer = await http.client.post(path, json={**BODIES[path], **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert said in error["message"], error
        for path, prompt in ((CHAT, {"messages": [{"role": "user", "content": "a"}]}), (COMPLETIONS, {"prompt": "a"})):
            for wrong in ({"temperature": 3}, {"n": 0}, {"structured_outputs": {"regex": "a"}}, {"stop": [1]}):
                assert (await http.client.post(path, json={**prompt, **wrong})).status_code == 400
        assert loads == []
        assert (await http.client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
        assert loads == [tmp_path]


def test_a_long_name_gets_no_suggestion() -> None:
    """A name of more than 200 characters gets no suggestion, because the time to compare grows with its length."""
    allowed = "x" * 200
    assert nearest("x" * 199 + "y", [allowed]) == f" (did you mean {allowed}?)"
    assert nearest("x" * 200 + "y", [allowed]) == ""


async def test_the_tokenizer_is_loaded_before_the_service_is_ready(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/ready` gives 503 while the tokenizer loads, also to probes that do not wait. The tokenizer is loaded once."""
    may_end, loads = threading.Event(), []

    def load(folder: Path) -> Tokenizer:
        loads.append(folder)
        may_end.wait(SOON_S)
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", 0.05)
    async with serve(Settings(tokenizer=tmp_path)) as http:
        for _ in range(2):
            assert (await http.client.get("/ready")).status_code == 503
        may_end.set()
        monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", SOON_S)
        assert (await http.client.get("/ready")).status_code == 200
        assert loads == [tmp_path]

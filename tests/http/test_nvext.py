"""`nvext` of Dynamo in the OpenAI routes, on a synthetic engine."""

import json
import threading
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from starlette.datastructures import Headers

import rollbus
from rollbus.frontend.http.answers import AnswerChoice
from rollbus.frontend.http.openai.shapes import RequestClock, nvext_json
from rollbus.frontend.http.requests import RequestTarget, given_trace
from rollbus.frontend.http.text import text_of
from rollbus.frontend.http.tokens import Scores, Tokens
from rollbus.frontend.tokenization import Tokenizer
from tests.http.support import CHAT, COMPLETIONS, CONFIG, Http, Talk, by_bus, byte_level, noted_requests, rows_of
from tests.support.fleet import presence

PROMPT = [5, 6, 7, 8, 9]
ALL = [
    *("engine_data", "completion_token_ids", "token_ids", "prompt_token_ids", "worker_id", "timing"),
    *("weight_version", "stop_reason"),
]
WITH_ALL: dict[str, Any] = {"nvext": {"extra_fields": ALL}}
MARK = b'"routed_experts":{"data":"'
"""The marker that clients search for in the bytes."""


def renderers_body(**fields: Any) -> dict[str, Any]:
    """Return the body of the `dynamo` transport of renderers: its placeholder, its fields, and no null."""
    nvext = {"token_data": PROMPT, "extra_fields": ["engine_data"], **fields.pop("nvext", {})}
    sent = {"model": "synthetic", "messages": [{"role": "user", "content": ""}], "stream": False, "nvext": nvext}
    sampling = {"stop_token_ids": [262], "logprobs": True, "skip_special_tokens": False, "temperature": 1.0}
    return {**sent, "max_completion_tokens": 7, **sampling, **fields}


async def ask(http: Http, path: str = CHAT, **body: Any) -> httpx.Response:
    """Return the response to a valid request."""
    answer = await http.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_each_turn_returns_tokens_logprobs_and_rows_of_the_engine(talk: Talk) -> None:
    """Each turn returns the tokens, logprobs and rows of the engine. The rows occur once, at the expected place."""
    async with talk() as (http, _):
        prompt, start = PROMPT, 0
        for _turn in range(3):
            hints = {"cache_salt": "ckpt-9", "agent_hints": {"priority": 5, "osl": 3}, "anything": 1}
            if start:
                hints["routed_experts_prompt_start"] = start
            answer = await ask(http, **renderers_body(seed=1, nvext={**hints, "token_data": prompt}))
            assert answer.content.count(MARK) == 1
            engine = answer.json()["nvext"]["engine_data"]
            direct = await by_bus(http.rb, prompt, start, max_tokens=7, seed=1, stop_token_ids=[262])
            assert engine["prompt_token_ids"] == prompt
            assert engine["completion_token_ids"] == direct.token_ids.tolist()
            assert engine["completion_logprobs"] == direct.logprobs.tolist()
            assert np.array_equal(rows_of(engine["routed_experts"]), direct.routed_experts)
            assert engine["routed_experts"]["start"] == start
            prompt = [*prompt, *engine["completion_token_ids"]]
            start = len(prompt) - 1
            prompt = [*prompt, 10, 11]


async def test_the_last_event_of_a_stream_has_the_nvext_of_the_response(talk: Talk) -> None:
    """The last event of a stream has the nvext of the whole response, and its chunks have all token ids."""
    stream = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    answers = []
    async with talk() as (http, _):
        (worker,) = http.rb.fleet.workers
        for path in (CHAT, COMPLETIONS):
            for body in ({"nvext": {"token_data": PROMPT, "extra_fields": ALL}}, {"tokens": PROMPT, **WITH_ALL}):
                asked = {"max_tokens": 6, "seed": 2, **body}
                answers.append(((await ask(http, path, **asked)).json(), await ask(http, path, **asked, **stream)))
    for whole, streamed in answers:
        *texts, done, _ = streamed.text.split("\n\n")
        assert done == "data: [DONE]"
        *events, last, usage = [json.loads(text.removeprefix("data: ")) for text in texts]
        assert usage["usage"] == whole["usage"]
        assert not any("nvext" in event for event in events)
        ids = [token_id for event in [*events, last] for token_id in event["choices"][0].get("token_ids", [])]
        for found in (whole["nvext"], last["nvext"]):
            assert found["completion_token_ids"] == found["token_ids"] == ids
            assert found["prompt_token_ids"] == PROMPT
            assert found["engine_data"]["completion_weight_versions"] == [0] * 6
            assert len(found["engine_data"]["completion_logprobs"]) == 6
            assert found["weight_version"] == 0
            assert found["timing"]["total_time_ms"] > 0
            assert found["engine_data"] == whole["nvext"]["engine_data"]
            assert found["worker_id"] == {"prefill_worker_id": worker.worker, "decode_worker_id": worker.worker}
        assert last["nvext"]["timing"]["ttft_ms"] > 0
        assert "stop_reason" not in whole["nvext"]


async def test_rows_are_in_a_response_at_most_once(talk: Talk) -> None:
    """Rows requested by name are beside `engine_data`. Rows that are not requested are not in the response."""
    async with talk() as (http, _):
        both = await ask(
            http, nvext={"token_data": PROMPT, "extra_fields": ["engine_data", "routed_experts"]}, max_tokens=3
        )
        only = await ask(http, nvext={"token_data": PROMPT, "extra_fields": ["routed_experts"]}, max_tokens=3)
        none = await ask(http, nvext={"token_data": PROMPT, "extra_fields": ["timing"]}, max_tokens=3)
    assert both.content.count(MARK) == only.content.count(MARK) == 1
    assert set(both.json()["nvext"]) == {"engine_data", "routed_experts"}
    assert set(only.json()["nvext"]) == {"routed_experts"}
    assert rows_of(only.json()["nvext"]["routed_experts"]).shape == (7, 4, 4)
    assert set(none.json()["nvext"]) == {"timing"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_choice_has_the_rows_of_the_engine(talk: Talk, path: str) -> None:
    """With `return_routed_experts`, each choice has the engine's rows, and each event the rows of its tokens."""
    body = {"tokens": PROMPT, "n": 2, "seed": 3, "max_tokens": 6, "ignore_eos": True, "return_routed_experts": True}
    async with talk() as (http, _):
        whole = (await ask(http, path, **body)).json()
        *texts, _, _ = (await ask(http, path, **body, stream=True)).text.split("\n\n")
        expected = [(await by_bus(http.rb, PROMPT, seed=3 + i, max_tokens=6, ignore_eos=True)) for i in range(2)]
    deltas = [json.loads(text.removeprefix("data: "))["choices"][0] for text in texts]
    for child, direct in enumerate(expected):
        choice = whole["choices"][child]
        assert choice["routed_experts"]["start"] == 0
        assert np.array_equal(rows_of(choice["routed_experts"]), direct.routed_experts)
        found = [each.get("routed_experts") for each in deltas if each["index"] == child]
        streamed = np.concatenate([rows_of(each) for each in found if each is not None])
        assert np.array_equal(streamed, direct.routed_experts)


async def test_hints_reach_the_bus(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus receives salt, session, group, sampling and the negated priority. Headers count if the body has none."""
    wanted, encode, threads = noted_requests(monkeypatch), Tokenizer.encode, dict[str, int]()

    def note_thread(self: Tokenizer, text: str, **options: bool) -> list[int]:
        threads.setdefault(text, threading.get_ident())
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", note_thread)
    async with talk() as (http, _):
        hints = {"agent_hints": {"priority": 7}, "cache_salt": "s", "session_control": {"session_id": "a"}}
        await ask(http, **renderers_body(nvext={**hints, "greed_sampling": True}, prompt_cache_key="k"))
        headers = {"X-Session-ID": "a", "X-Group-ID": "k", "X-Request-Id": "mine"}
        body = {"prompt": ["the", "é"], "priority": 3, "cache_salt": "t", "top_k": 5, "min_p": 0.1, "min_tokens": 2}
        more = {"bad_words": ["the"], "logit_bias": {"7": 1.5}, "repetition_penalty": 1.1, "ignore_eos": True}
        answer = await http.client.post(COMPLETIONS, json={**body, **more}, headers=headers)
        assert answer.status_code == 200, answer.text
    first, second, third = wanted
    assert (first.priority, first.cache_salt) == (-7, "s")
    assert None not in (first.session_id, first.group_id)
    assert (first.sampling.temperature, first.sampling.stop_token_ids) == (0.0, (262,))
    assert {second.request_id, third.request_id} == {"mine", "mine-1"}
    assert (second.priority, second.cache_salt) == (3, "t")
    assert (second.session_id, second.group_id) == (first.session_id, first.group_id)
    sampling = second.sampling
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens, sampling.ignore_eos) == (5, 0.1, 2, True)
    assert (sampling.logit_bias, sampling.repetition_penalty) == ({7: 1.5}, 1.1)
    the = byte_level().encode("the", add_special_tokens=False)
    spaced = byte_level().encode(" the", add_special_tokens=False)
    assert sampling.bad_words_token_ids == (tuple(the), tuple(spaced))
    assert threads["é"] == threading.get_ident() != threads[" the"]  # many bad words take seconds
    assert (sampling.logprobs, second.return_routed_experts, sampling.max_tokens) == (None, False, 16)
    assert answer.headers["X-Request-Id"] == "mine"


async def test_a_model_without_experts_has_no_rows(talk: Talk) -> None:
    """Without experts, `engine_data` has no rows, and a request for rows by name is refused."""
    config = type(CONFIG)(vocab_size=264, num_experts=0)
    async with talk(config) as (http, _):
        answer = await ask(http, **renderers_body())
        refused = await http.client.post(CHAT, json=renderers_body(nvext={"extra_fields": ["routed_experts"]}))
    assert "routed_experts" not in answer.json()["nvext"]["engine_data"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "nvext.extra_fields")


def target() -> RequestTarget:
    """Return the target of a synthetic worker."""
    model = CONFIG.capabilities
    return RequestTarget(worker=presence(capabilities=model), capabilities=model, lora=None)


def choice() -> tuple[rollbus.GenerateRequest, AnswerChoice, Tokens]:
    """Return a new choice and three tokens for it."""
    wanted = rollbus.GenerateRequest(prompt_token_ids=PROMPT, sampling=rollbus.SamplingParams(logprobs=0))
    text = text_of(wanted, byte_level(), (), include_stop=False, skip_special_tokens=True)
    tokens = Tokens(
        scores=Scores(np.array([1, 2, 3], "i4"), np.array([-1, -2, -np.inf], "f4")),
        weight_versions=np.array([4, 4, 5], "i4"),
        rows=np.ones((7, 4, 4), "u1"),
        finish_reason=rollbus.FinishReason.LENGTH,
    )
    return wanted, AnswerChoice(0, wanted, text, keep=True), tokens


def nvext(wanted: rollbus.GenerateRequest, tokens: Tokens) -> Any:
    """Return the complete nvext."""
    made = nvext_json(frozenset(ALL), wanted, target(), tokens, RequestClock())
    return json.loads(msgspec.json.encode(made) if isinstance(made, dict) else b"".join(made))


def test_an_answer_without_tokens_has_empty_lists() -> None:
    """Without tokens, the lists and rows are empty but present, because clients treat a missing list as an error."""
    wanted, answer, tokens = choice()
    answer.add(replace(tokens.cut(0, 0), rows=None, finish_reason=rollbus.FinishReason.ABORT))
    whole = answer.pop_update()
    found = nvext(wanted, whole.tokens)
    assert (whole.text, answer.finish_reason, answer.num_tokens) == ("", "abort", 0)
    assert (found["completion_token_ids"], found["weight_version"]) == ([], None)
    engine = found["engine_data"]
    assert engine["completion_token_ids"] == engine["completion_logprobs"] == []
    assert rows_of(engine["routed_experts"]).shape == (0, 4, 4)


def test_minus_infinity_is_a_number() -> None:
    """Minus infinity becomes -9999, as on other servers, because JSON has no infinity."""
    wanted, _, tokens = choice()
    found = nvext(wanted, tokens)
    assert found["engine_data"]["completion_logprobs"] == [-1, -2, -9999]
    assert found["weight_version"] == 5


# The trace that an HTTP request belongs to.


IDS = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([f"00-{IDS}-01"], f"00-{IDS}-01"),
        ([f" 00-{IDS}-00\t"], f"00-{IDS}-00"),
        # Of a later version, the known part counts.
        ([f"cc-{IDS}-01"], f"00-{IDS}-01"),
        ([f"cc-{IDS}-01-what comes later"], f"00-{IDS}-01"),
        ([], None),
        ([""], None),
        (["nonsense"], None),
        ([f"00-{IDS}-01", f"00-{IDS}-01"], None),
        ([f"00-{IDS}-01-more"], None),
        ([f"00-{IDS}-01-"], None),
        ([f"00-{IDS}"], None),
        ([f"00-{IDS}-1"], None),
        ([f"ff-{IDS}-01"], None),
        ([f"cc-{IDS}-01.more"], None),
        ([f"00-{IDS.upper()}-01"], None),
        ([f"00-{'0' * 32}-{'b' * 16}-01"], None),
        ([f"00-{'a' * 32}-{'0' * 16}-01"], None),
    ],
)
def test_an_invalid_traceparent_counts_as_none(given: list[str], expected: str | None) -> None:
    """As W3C Trace Context requires, malformed, forbidden and repeated traceparent values count as none."""
    trace = given_trace(_headers("traceparent", given), is_trusted=True)

    assert (trace and trace.traceparent) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a=1"], "a=1"),
        ([" a=1 ,\tb@c=2 3 ", "", "d/e=~"], "a=1,b@c=2 3,d/e=~"),
        ([","], None),
        (["a=1,B=2"], None),
        (["a=1", "a=2"], None),
        (["a=é"], None),
        ([",".join(f"k{i}=1" for i in range(32))], ",".join(f"k{i}=1" for i in range(32))),
        ([",".join(f"k{i}=1" for i in range(33))], None),
        # Above the length that all systems forward, whole members are removed from the end.
        ([f"a={'1' * 250},b={'2' * 250},c=3456,d=7"], f"a={'1' * 250},b={'2' * 250},c=3456"),
        ([f"a={'1' * 257}"], None),
    ],
)
def test_an_invalid_tracestate_counts_as_none(given: list[str], expected: str | None) -> None:
    """A tracestate with malformed, repeated or too many members counts as none, but the trace remains."""
    headers = Headers(raw=[(b"traceparent", f"00-{IDS}-01".encode()), *_headers("tracestate", given).raw])

    trace = given_trace(headers, is_trusted=True)

    assert trace == (f"00-{IDS}-01", expected)
    assert given_trace(_headers("tracestate", given), is_trusted=True) is None


@pytest.mark.parametrize("flags", ["00", "01", "03", "ff"])
def test_trace_flags_are_forwarded_only_from_trusted_senders(flags: str) -> None:
    """The ids of a trace are always forwarded, its flags only if the sender is trusted."""
    headers = _headers("traceparent", [f"00-{IDS}-{flags}"])

    assert given_trace(headers, is_trusted=False) == (f"00-{IDS}-00", None)
    assert given_trace(headers, is_trusted=True) == (f"00-{IDS}-{flags}", None)


def _headers(name: str, given: list[str]) -> Headers:
    return Headers(raw=[(name.encode(), value.encode("latin-1")) for value in given])

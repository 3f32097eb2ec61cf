"""Timeouts, token ids without a tokenizer, and errors with the allowed values."""

import threading
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.http import text as loads_module
from rollbus.frontend.http.settings import Settings
from rollbus.frontend.tokenization import Tokenizer
from rollbus.schemas.decoding import nearest
from rollbus.schemas.limits import DEFAULT_TIMEOUT_S
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.openai_support import CHAT, COMPLETIONS
from tests.http.small_tokenizers import byte_level, make_byte_level, save
from tests.http.support import http_service, noted_requests
from tests.support.patience import SOON_S

GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 7, 8]
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
    CHAT: {"tokens": PROMPT, "max_tokens": 2, "detokenize": False},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2, "detokenize": False},
}


async def test_the_timeout_is_that_of_body_header_or_service_in_this_order(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout is that of the body, the header or the service, in this order.

    A wrong header gives 400 with its name.
    """
    asked = noted_requests(monkeypatch)
    header = {"X-Request-Timeout": "20.5"}
    async with http_service(nats_url, fleet, Settings(timeout_s=50.0)) as http:
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


async def test_a_request_that_exceeds_its_timeout_gives_504(nats_url: str, fleet: str) -> None:
    """A request that exceeds its timeout gives 504."""
    config = SyntheticConfig(step_s=0.05)
    async with http_service(nats_url, fleet, config=config) as http:
        body = {"token_ids": PROMPT, "sampling_params": {"ignore_eos": True}, "timeout_s": 0.2}
        answer = await http.client.post(GENERATE, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_detokenization_no_tokenizer_is_needed(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """With `detokenize` false, no tokenizer is needed and the text is empty.

    A tokenizer in the current folder is not used.
    """
    save(make_byte_level(), tmp_path)
    monkeypatch.chdir(tmp_path)
    body: dict[str, Any] = {"nvext": {"token_data": PROMPT, "extra_fields": ["token_ids"]}, "max_tokens": 3}
    body |= {"logprobs": True} if path == CHAT else {"logprobs": 1}
    async with http_service(nats_url, fleet) as http:
        answer = await http.client.post(path, json={**body, "detokenize": False, "stream": stream})
        assert answer.status_code == 200, answer.text
        with_text = await http.client.post(path, json=body)
        assert (await http.client.get("/ready")).status_code == 200
    assert (with_text.status_code, with_text.json()["error"]["code"]) == (501, "no_tokenizer")
    if not stream:
        found = answer.json()
        (choice,) = found["choices"]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == ""
        assert len(found["nvext"]["token_ids"]) == 3
        names = (
            [each["token"] for each in choice["logprobs"]["content"]] if path == CHAT else choice["logprobs"]["tokens"]
        )
        assert names == [f"token_id:{each}" for each in found["nvext"]["token_ids"]]


async def test_a_service_that_always_returns_tokens(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """With `returns_tokens`, each response has token ids and logprobs, without a field in the request."""
    settings = Settings(returns_tokens=True, tokenizer=save(make_byte_level(), tmp_path))
    config = SyntheticConfig(vocab_size=264, eos_token_id=262, max_model_len=64)
    async with http_service(nats_url, fleet, settings, config=config) as http:
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
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors name the nearest field and the allowed values. A wrong field is refused before the tokenizer is loaded."""
    loads: list[Path] = []

    def load(folder: Path) -> Tokenizer:
        loads.append(folder)
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    async with http_service(nats_url, fleet, Settings(tokenizer=tmp_path)) as http:
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
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/ready` gives 503 while the tokenizer loads, also to probes that do not wait. The tokenizer is loaded once."""
    may_end, loads = threading.Event(), []

    def load(folder: Path) -> Tokenizer:
        loads.append(folder)
        may_end.wait(SOON_S)
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", 0.05)
    async with http_service(nats_url, fleet, Settings(tokenizer=tmp_path)) as http:
        for _ in range(2):
            assert (await http.client.get("/ready")).status_code == 503
        may_end.set()
        monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", SOON_S)
        assert (await http.client.get("/ready")).status_code == 200
        assert loads == [tmp_path]

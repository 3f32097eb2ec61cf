"""`POST /inference/v1/generate` on a synthetic engine: responses, refused requests and aborts."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import renderers  # type: ignore[import-untyped]

import rollbus
from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.chunk import FinishReason
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import SyntheticModel
from tests.http.support import Http, Serve, by_bus, noted_requests, rows_of
from tests.support.checkpoints import write_adapter
from tests.support.hand_worker import running
from tests.support.waits import until_true

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7, 8]
CHOICE_KEYS = {
    *("index", "logprobs", "finish_reason", "token_ids", "weight_versions", "routed_experts", "sampling_mask"),
}


async def generate(http: Http, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    """Send a request for tokens."""
    return await http.client.post(PATH, json={"token_ids": PROMPT, **fields}, headers=headers)


def events_of(answer: httpx.Response) -> list[Any]:
    """Return the JSON of all events of a successful stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def of_bus(generation: rollbus.Generation) -> list[tuple[list[int], list[float], int]]:
    """Return tokens, logprobs and first position of all samples."""
    samples = (generation, *generation.siblings)
    return [(s.token_ids.tolist(), s.logprobs.tolist(), s.start) for s in samples if s.logprobs is not None]


async def test_the_response_has_the_fields_of_vllm_and_the_tokens_of_the_bus(serve: Serve) -> None:
    """The response has all fields of vLLM's response, and the exact tokens, logprobs and rows of all samples."""
    sampling = {"max_tokens": 5, "n": 3, "seed": 7, "logprobs": 2, "prompt_logprobs": 1}
    async with serve() as http:
        answer = await generate(http, sampling_params=sampling, return_token_ids=True, model="synthetic")
        expected = await by_bus(http.rb, PROMPT, **sampling)

    body = answer.json()
    assert (answer.status_code, body["model"], body["prompt_token_ids"]) == (200, "synthetic", PROMPT)
    assert body.keys() == {
        *("request_id", "model", "lora", "created", "choices", "usage", "prompt_logprobs", "prompt_token_ids"),
        *("mm_placeholders", "kv_transfer_params", "ec_transfer_params"),
    }
    usage = {"prompt_tokens": 4, "completion_tokens": 15, "total_tokens": 19}
    assert {name: body["usage"][name] for name in usage} == usage
    found = []
    for choice, sample in zip(body["choices"], (expected, *expected.siblings), strict=True):
        assert (choice.keys(), choice["finish_reason"]) == (CHOICE_KEYS, "length")
        assert choice["weight_versions"] == sample.weight_versions.tolist()
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
        found.append((choice["token_ids"], [entry["logprob"] for entry in content], choice["routed_experts"]["start"]))
        assert np.array_equal(rows_of(choice["routed_experts"]), sample.routed_experts)
        # As in vLLM, the sampled token is the first of the requested top logprobs.
        assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
        assert {len(entry["top_logprobs"]) for entry in content} == {2}
    assert found == of_bus(expected)
    nothing, *positions = body["prompt_logprobs"]
    assert nothing is None
    assert [position[str(i)]["logprob"] for i, position in zip(PROMPT[1:], positions, strict=True)] == (
        expected.prompt_logprobs.tolist()
    )


async def test_masks_are_lists_of_ids(serve: Serve) -> None:
    """Sampling masks are lists of ids for each choice, as in vLLM, and an event has the masks of its tokens."""
    config = SyntheticConfig(sampling_mask=True)
    sampling = {"max_tokens": 5, "n": 2, "seed": 7, "top_k": 9}
    async with serve(config=config) as http:
        whole = (await generate(http, sampling_params=sampling)).json()
        streamed = events_of(await generate(http, sampling_params=sampling, stream=True))
        refused = await generate(http, sampling_params={"max_tokens": 5})

    model = SyntheticModel(config, None)
    for choice in whole["choices"]:
        expected = [model.sampling_mask(token, 9).token_ids.tolist() for token in choice["token_ids"]]
        parts = [part for event in streamed for part in event["choices"] if part["index"] == choice["index"]]
        assert choice["sampling_mask"] == expected
        assert [ids for part in parts for ids in part["sampling_mask"]] == expected
    assert (refused.status_code, "top_k" in refused.text) == (400, True)


async def test_a_stream_has_the_same_tokens_and_rows(serve: Serve) -> None:
    """The events of each sample join to the choices of the whole response, with rows from the start position."""
    sampling = {"max_tokens": 5, "n": 2, "seed": 7, "logprobs": 0, "routed_experts_prompt_start": 2}
    async with serve() as http:
        whole = (await generate(http, sampling_params=sampling)).json()
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await generate(
            http, sampling_params=sampling, stream=True, stream_options=options, return_token_ids=True
        )

    assert answer.status_code == 200
    *events, last = events_of(answer)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10)
    assert [event.get("prompt_token_ids") for event in events] == [PROMPT] + [None] * (len(events) - 1)
    for index, expected in enumerate(whole["choices"]):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        parts = [event["choices"][0] for event in mine]
        for name in ("token_ids", "weight_versions"):
            assert [each for part in parts for each in part[name]] == expected[name]
        assert [entry for part in parts for entry in part["logprobs"]["content"]] == expected["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        counts = accumulate(len(part["token_ids"]) for part in parts)
        assert [event["usage"]["completion_tokens"] for event in mine] == list(counts)
        position = 2
        for part in parts:
            assert part["routed_experts"]["start"] == position
            position += part["routed_experts"]["shape"][0]
        rows = np.concatenate([rows_of(part["routed_experts"]) for part in parts])
        assert np.array_equal(rows, rows_of(expected["routed_experts"]))


async def test_the_context_limits_the_tokens_of_a_response(serve: Serve) -> None:
    """As in vLLM, the context limits the tokens, and a prompt without room is refused with vLLM's message.

    Logprobs not requested and experts of a dense model are null.
    """
    async with serve(config=SyntheticConfig(num_experts=0, max_model_len=64)) as http:
        whole = [
            await generate(http, sampling_params={"ignore_eos": True, **more}) for more in ({}, {"max_tokens": 61})
        ]
        full = await generate(http, token_ids=[5] * 64, sampling_params={"max_tokens": 1})

    for body in (answer.json() for answer in whole):
        (choice,) = body["choices"]
        assert (choice["logprobs"], choice["routed_experts"], body["prompt_logprobs"]) == (None, None, None)
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (60, "length")
    error = full.json()["error"]
    assert (full.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "token_ids")
    assert "maximum context length is 64 tokens" in error["message"]


SAMPLING_REFUSED: list[tuple[dict[str, object], str]] = [
    ({"typical_p": 0.5}, "typical_p"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 61}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"n": 0}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop_token_ids": [32_000]}, "stop_token_ids"),
    ({"logit_bias": {"32000": 1}}, "logit_bias"),
    ({"stop": "."}, "stop"),
    ({"stop": ".", "detokenize": False}, "detokenize"),
    ({"bad_words": ["no"]}, "bad_words"),
    ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "allowed_token_ids"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"routed_experts_prompt_start": 5}, "routed_experts_prompt_start"),
]
BODY_REFUSED: list[tuple[dict[str, object], str]] = [
    ({"token_ids": [1, 32_000]}, "token_ids[1]"),
    ({"token_ids": [1, -1]}, "token_ids[1]"),
    ({"token_ids": [1] * 64}, "token_ids"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 2**31}, "priority"),
    ({"request_id": "a "}, "request_id"),
    ({"stream": True, "sampling_params": {"prompt_logprobs": 0}}, "sampling_params.prompt_logprobs"),
    ({"stream_options": {"include": True}}, "stream_options.include"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
]


async def test_a_refused_request_names_its_field_and_is_not_published(serve: Serve) -> None:
    """A refused request gives 400 with vLLM's name of the field, streamed or not, and never reaches the fleet."""
    refused: list[tuple[dict[str, object], str]] = [
        ({"sampling_params": fields}, f"sampling_params.{name}") for fields, name in SAMPLING_REFUSED
    ]
    async with serve(config=SyntheticConfig(max_model_len=64)) as http:
        for fields, name in [*refused, *BODY_REFUSED]:
            for stream in (False, True):
                body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {}, "stream": stream, **fields}
                answer = await http.client.post(PATH, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
                assert error["param"].split("[")[0] == name.split("[")[0], error
                assert error["message"].startswith(name), error
        missing = await http.client.post(PATH, json={"sampling_params": {}})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "token_ids")
        unknown = await generate(http, sampling_params={}, model="other")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_model")
        assert http.own.stats().requests == 0


async def test_the_request_fields_reach_the_bus(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus receives salt, priority, session, group and trace. An invalid trace is dropped, as W3C requires."""
    seen = noted_requests(monkeypatch)
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    fields: dict[str, Any] = {"sampling_params": {"max_tokens": 1, "stop_token_ids": [9]}, "cache_salt": "salt"}
    async with serve() as http:
        for given in (trace, "nonsense"):
            headers = {"X-Session-ID": "mine", "X-Group-ID": "ours", "traceparent": given}
            assert (await generate(http, headers, **fields, priority=-3)).status_code == 200

    first, second = seen
    assert (first.cache_salt, first.priority, first.sampling.stop_token_ids) == ("salt", -3, (9,))
    assert (first.session_id, first.group_id) == (second.session_id, second.group_id)
    assert None not in (first.session_id, first.group_id)
    assert (first.traceparent, second.traceparent) == (f"{trace[:-2]}00", None)


async def test_an_adapter_is_named_as_a_model(serve: Serve, tmp_path: Path) -> None:
    """The name of a loaded adapter as model samples with the adapter, and the response has its name."""
    folder = write_adapter(tmp_path / "adapter")
    few: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    async with serve(weight_roots=(str(tmp_path),)) as http:
        await http.rb.fleet.load_lora("polite", folder)
        await until_true(lambda: any(worker.loras for worker in http.own.fleet.workers))
        base = (await generate(http, sampling_params=few, model="synthetic")).json()
        adapted = (await generate(http, sampling_params=few, model="polite")).json()
        request = rollbus.GenerateRequest(
            prompt_token_ids=PROMPT, sampling=rollbus.SamplingParams(**few), lora="polite"
        )
        expected = await http.rb.complete(request)

    assert (base["model"], adapted["model"]) == ("synthetic", "polite")
    assert adapted["choices"][0]["token_ids"] == expected.token_ids.tolist() != base["choices"][0]["token_ids"]


async def test_a_request_aborted_before_its_first_token_has_a_valid_response(serve: Serve) -> None:
    """A request that is aborted before its first token gives a valid response without tokens and rows."""
    async with serve() as http, asyncio.TaskGroup() as tasks:
        await http.rb.fleet.pause(mode="keep")
        asked = tasks.create_task(generate(http, sampling_params={"logprobs": 1, "prompt_logprobs": 0}, request_id="a"))
        while not await http.own.abort(["a"]):
            await http.rb.fleet.state()
        answer = await asked
        await http.rb.fleet.resume()

    choice = renderers.client.parse_generate_response(answer.content)["choices"][0]
    assert (answer.status_code, choice["finish_reason"], choice["token_ids"]) == (200, "abort", [])
    assert (choice["logprobs"], answer.json()["prompt_logprobs"]) == ({"content": []}, None)
    assert answer.json()["choices"][0]["routed_experts"] == {
        "data": "",
        "shape": [0, 4, 4],
        "start": 0,
        "dtype": "uint8",
    }


class FailingEngine(SyntheticEngine):
    """An engine that fails each request after some steps."""

    after = 2

    async def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Yield the steps, and fail each request that has had its steps."""
        seen: dict[str, int] = {}
        async for steps in super().steps():
            for step in split(steps):
                seen[step.key] = seen.get(step.key, 0) + 1
            failed = [step.key for step in split(steps) if seen[step.key] == self.after]
            await self.abort(failed)
            yield [
                RequestStep(
                    key=step.key,
                    token_ids=np.empty(0, np.int32),
                    finish_reason=FinishReason.ERROR,
                    error="failed as told",
                )
                if step.key in failed
                else step
                for step in split(steps)
                if seen[step.key] <= self.after
            ]


async def test_an_engine_error_gives_502(serve_fleet: Serve, nats_url: str, fleet: str) -> None:
    """An engine error gives 502, also as a stream's first event. Later, it is the last event, without [DONE]."""
    engine = FailingEngine()
    async with running(nats_url, fleet, engine), serve_fleet() as http:
        await http.own.fleet.wait_for_workers()
        few = {"max_tokens": 8, "ignore_eos": True}
        whole = await generate(http, sampling_params=few)
        later = await generate(http, sampling_params=few, stream=True)
        engine.after = 1
        at_once = await generate(http, sampling_params=few, stream=True)

    for answer in (whole, at_once):
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")
        assert answer.headers["X-Request-Id"]
    first, last, rest = later.text.split("\n\n")
    assert (later.status_code, rest) == (200, "")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["token_ids"]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_error", "server_error")


# Routed experts in the bytes of `POST /inference/v1/generate`, which clients extract without a JSON parser.


@pytest.mark.parametrize(("num_experts", "n"), [(300, 1), (64, 3)])
async def test_the_rows_in_the_bytes_follow_their_marker(serve: Serve, num_experts: int, n: int) -> None:
    """The marker that clients search for occurs once for each choice, followed by the base64 of its rows."""
    sampling: dict[str, Any] = {"max_tokens": 3, "n": n, "seed": 5}
    async with serve(config=SyntheticConfig(num_experts=num_experts)) as http:
        raw = (await generate(http, sampling_params=sampling)).content
        expected = await by_bus(http.rb, PROMPT, **sampling)

    assert raw.count(b'"routed_experts":{"data":"') == n
    choices = renderers.client.parse_generate_response(raw)["choices"]
    routed = choices[0]["routed_experts"]
    # The client has cut the first rows out of the bytes.
    assert isinstance(routed["data"], memoryview)
    dtype = "uint16" if num_experts > 256 else "uint8"
    assert (routed["shape"], routed["start"], routed["dtype"]) == ([6, 4, 4], 0, dtype)
    for choice, sample in zip(choices, (expected, *expected.siblings), strict=True):
        assert base64.b64decode(choice["routed_experts"]["data"], validate=True) == sample.routed_experts.tobytes()

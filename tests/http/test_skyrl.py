"""The routes of SkyRL's servers on synthetic engines. `tests/integrations/skyrl` runs SkyRL's own client."""

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from rollbus.frontend.http.generate import WITH_ROWS
from rollbus.frontend.http.tokens import smallest_rows_json
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import Control, Serve, by_bus

PROMPT = [5, 6, 7, 8]
START = "sampling_params.routed_experts_prompt_start"
SAMPLING = {"max_tokens": 5, "seed": 7, "logprobs": 0, "temperature": 0.0}


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, "uint8"), (256, "int16"), (32767, "int16"), (32768, "int32"), (65535, "int32")]
)
def test_the_dtype_is_the_smallest_for_the_largest_id(largest: int, dtype: str) -> None:
    """The dtype depends on the largest id of the array, not on the model, and each id stays the same."""
    rows = np.array([[[0, largest], [1, 2]], [[3, 4], [5, 6]]], "<u2")
    text = b"".join(smallest_rows_json(rows, 3))
    found = json.loads(text)

    # SkyRL's client finds the data by these bytes.
    assert text.startswith(b'{"data":"')
    assert (found["dtype"], found["shape"], found["start"]) == (dtype, [2, 2, 2], 3)
    values = np.frombuffer(base64.b64decode(found["data"]), np.dtype(dtype).newbyteorder("<"))
    assert values.reshape(rows.shape).tolist() == rows.tolist()


def test_an_array_without_rows_is_uint8() -> None:
    """Rows of a model with many experts are uint8 if there are none."""
    assert json.loads(b"".join(smallest_rows_json(np.empty((0, 2, 2), "<u2"), 0)))["dtype"] == "uint8"


@pytest.mark.parametrize(("num_experts", "dtypes"), [(16, {"uint8"}), (40_000, {"int16", "int32"})])
async def test_generate_returns_the_rows_of_the_bus(serve: Serve, num_experts: int, dtypes: set[str]) -> None:
    """Tokens, log probabilities and rows are those of the bus, from the start position, in one JSON without blanks."""
    sampling = {**SAMPLING, "routed_experts_prompt_start": 2}
    async with serve(config=SyntheticConfig(num_experts=num_experts)) as http:
        body = {"model": "synthetic", "token_ids": PROMPT, "sampling_params": sampling, "cache_salt": "v1"}
        answer = await http.client.post("/skyrl/v1/generate", json=body, headers={"X-Session-ID": "a_0"})
        expected = await by_bus(http.rb, PROMPT, 2, **SAMPLING)

    assert answer.status_code == 200, answer.text
    assert answer.content.count(b'"routed_experts":{"data":"') == 1
    (choice,) = answer.json()["choices"]
    routed = choice["routed_experts"]
    assert choice["token_ids"] == expected.token_ids.tolist()
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(expected.logprobs)
    assert choice["finish_reason"] == "length"
    assert expected.routed_experts is not None
    values = np.frombuffer(base64.b64decode(routed["data"]), np.dtype(routed["dtype"]).newbyteorder("<"))
    assert np.array_equal(values.reshape(routed["shape"]), expected.routed_experts)
    assert routed["dtype"] in dtypes


async def test_a_model_without_experts_is_rejected(serve: Serve) -> None:
    """The route answers 400 with the other route for a model without experts, because the client rejects null."""
    async with serve(config=SyntheticConfig(num_experts=0)) as http:
        answer = await http.client.post(
            "/skyrl/v1/generate", json={"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
        )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "/inference/v1/generate" in answer.json()["error"]["message"]


async def test_a_request_aborted_before_its_first_token_has_rows(serve: Serve) -> None:
    """If the request is aborted before its first token, the rows are an empty array and not null."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}
    async with serve() as http, asyncio.TaskGroup() as tasks:
        await http.rb.fleet.pause(mode="keep")
        sent = http.client.post("/skyrl/v1/generate", json=body, headers={"X-Request-Id": "a"})
        asked = tasks.create_task(sent)
        while not await http.own.abort(["a"]):
            await http.rb.fleet.state()
        answer = await asked
        await http.rb.fleet.resume()
    (choice,) = answer.json()["choices"]
    for found in (choice, WITH_ROWS.nothing):
        assert found["token_ids"] == []
        assert (found["routed_experts"]["data"], found["routed_experts"]["shape"][0]) == ("", 0)
    assert (answer.status_code, choice["finish_reason"]) == (200, "abort")


WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("/skyrl/v1/generate", {"token_ids": PROMPT, "sampling_params": {}, **body}, param)
        for body, param in (
            ({"token_ids": []}, "token_ids"),
            ({"sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens"),
            ({"sampling_params": {"routed_experts_prompt_start": 5}}, START),
            ({"return_sample_support": True}, "return_sample_support"),
            ({"features": {"a": 1}}, "features"),
            ({"lora_request": 1}, "lora_request"),
        )
    ),
    ("/skyrl/v1/generate", {"token_ids": PROMPT}, "sampling_params"),
    ("/fetch_weights", {"uri": "/x"}, "target_version"),
    ("/fetch_weights", {"target_version": -1, "uri": "/x"}, "target_version"),
    ("/fetch_weights", {"target_version": 1}, "uri"),
    ("/fetch_weights", {"target_version": 1, "uri": "s3://bucket/x"}, "uri"),
    ("/fetch_weights", {"target_version": 1, "sync_dir": "gs://bucket"}, "sync_dir"),
    ("/skyrl/v1/load_lora_adapter", {"lora_name": "a"}, "lora_path"),
    ("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "in_memory": True}, "in_memory"),
    ("/skyrl/v1/load_lora_adapter", {"lora_path": "/x"}, "lora_name"),
]


async def test_wrong_requests_and_commands_name_the_field(serve: Serve) -> None:
    """A wrong field of a request or a command is 400, with the name of the field."""
    async with serve() as http:
        for path, body, param in WRONG:
            answer = await http.client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, body, answer.text)


async def test_the_end_of_a_session_is_200_and_needs_its_id(serve: Serve) -> None:
    """`/finish_session` answers 200 for any session, and 400 without an id or with other parameters."""
    async with serve() as http:
        answers = [
            await http.client.post("/finish_session", params=params)
            for params in ({"session_id": "a_0"}, {}, {"session_id": ""}, {"session_id": "a", "force": "1"})
        ]
    assert [answer.status_code for answer in answers] == [200, 400, 400, 400]
    assert answers[0].json() == {"status": "ok", "released": 0}
    assert [answer.json()["error"]["param"] for answer in answers[1:]] == ["session_id", "session_id", "force"]


async def test_fetch_weights_updates_the_whole_fleet(control: Control) -> None:
    """All workers serve the version when the route answers. A repeat succeeds; an older version fails."""
    async with control(2) as c:
        (c.root / "delta-00000009").symlink_to(c.root / "one")
        fetched = await c.http.client.post(
            "/fetch_weights", json={"target_version": 8, "uri": f"file://{c.root}/two", "sync_dir": "/none"}
        )
        versions = [worker.weight_version for worker in (await c.http.rb.fleet.state(settle_s=1.0)).workers]
        repeated = await c.post("/fetch_weights", {"target_version": 8, "uri": str(c.root / "two")})
        older = await c.post("/fetch_weights", {"target_version": 7, "uri": str(c.root / "one")})
        outside = await c.post("/fetch_weights", {"target_version": 9, "uri": "/etc"})
        by_version = await c.post("/fetch_weights", {"target_version": 9, "sync_dir": f"{c.root}/"})

    assert (fetched.status_code, fetched.json()["target_version"], versions) == (200, 8, [8, 8])
    # SkyRL's client ignores bodies without a length.
    assert int(fetched.headers["Content-Length"]) == len(fetched.content)
    assert {line["result"] for line in fetched.json()["workers"]} == {"applied"}
    assert (repeated[0], older[0], outside[0], by_version[0]) == (200, 409, 403, 200)


async def test_adapters_are_loaded_and_replaced(control: Control) -> None:
    """The same name loads an adapter again in its place, and then answers as a model."""
    async with control(2) as c:
        body = {"lora_name": "polite", "lora_path": str(c.root / "adapter")}
        answers = [await c.post("/skyrl/v1/load_lora_adapter", body) for _ in range(2)]
        missing = await c.post("/skyrl/v1/load_lora_adapter", {**body, "lora_path": str(c.root / "none")})
        given = {"model": "polite", "token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
        generated = await c.post("/skyrl/v1/generate", given)
    assert [(status, answer["lora_name"]) for status, answer in answers] == [(200, "polite")] * 2
    assert (missing[0], generated[0], generated[1]["model"]) == (404, 200, "polite")

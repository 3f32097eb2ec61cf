"""Routed experts in the bytes of `POST /inference/v1/generate`, which clients extract without a JSON parser."""

import base64
from typing import Any

from renderers.client import parse_generate_response  # type: ignore[import-untyped]

from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import by_bus, http_service
from tests.http.test_generate import PROMPT, generate


async def test_the_marker_of_the_rows_occurs_once_before_their_base64(nats_url: str, fleet: str) -> None:
    """The marker that clients search for occurs once, followed by the base64 of the rows."""
    async with http_service(nats_url, fleet, config=SyntheticConfig(num_experts=300)) as http:
        raw = (await generate(http, sampling_params={"max_tokens": 2, "temperature": 0})).content
        expected = (await by_bus(http.rb, PROMPT, max_tokens=2, temperature=0)).routed_experts

    assert raw.count(b'"routed_experts":{"data":"') == 1
    routed = parse_generate_response(raw)["choices"][0]["routed_experts"]
    assert isinstance(routed["data"], memoryview)
    assert (routed["shape"], routed["start"], routed["dtype"]) == ([5, 4, 4], 0, "uint16")
    assert base64.b64decode(routed["data"], validate=True) == expected.tobytes()


async def test_the_first_rows_in_the_bytes_belong_to_the_first_choice(nats_url: str, fleet: str) -> None:
    """Each of several samples has its rows, and the first rows in the bytes belong to the first choice."""
    sampling: dict[str, Any] = {"max_tokens": 3, "n": 3, "seed": 5}
    async with http_service(nats_url, fleet) as http:
        raw = (await generate(http, sampling_params=sampling)).content
        expected = await by_bus(http.rb, PROMPT, **sampling)

    assert raw.count(b'"routed_experts":{"data":"') == 3
    choices = parse_generate_response(raw)["choices"]
    assert isinstance(choices[0]["routed_experts"]["data"], memoryview)
    for choice, sample in zip(choices, (expected, *expected.siblings), strict=True):
        assert base64.b64decode(choice["routed_experts"]["data"], validate=True) == sample.routed_experts.tobytes()

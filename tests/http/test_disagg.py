"""Prefill and decode workers with the HTTP service: equal responses, and counters of both phases."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rollbus
from rollbus import bus
from rollbus.frontend.cli.app import build_parser
from rollbus.frontend.cli.local.http import serve_http, settings_from_environment
from rollbus.frontend.http import Settings
from rollbus.frontend.http.server import listen
from tests.http.support import CHAT, CONFIG, Http, http_before, make_byte_level, save
from tests.support.disagg import disaggregated, until_paired
from tests.support.fleet import synthetic_worker

pytestmark = pytest.mark.usefixtures("unhurried")

PROMPT = [index % 250 for index in range(100)]
EXTRA = ["worker_id", "engine_data"]


@contextlib.asynccontextmanager
async def behind(nats_url: str, fleet: str, folder: Path) -> AsyncIterator[Http]:
    """Serve the fleet that the test has started."""
    settings = Settings(tokenizer=save(make_byte_level(), folder))
    async with http_before(nats_url, fleet, settings) as http:
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers()
        yield http


async def answers(http: Http) -> dict[str, Any]:
    """Return the responses of all token routes to one prompt, without fields that always differ."""
    sampling = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    tokens = await http.client.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling})
    nvext = {"token_data": PROMPT, "extra_fields": EXTRA}
    found = {"generate": tokens.json()["choices"]}
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "x"}], "nvext": nvext, "stream": stream, **sampling}
        answer = await http.client.post(CHAT, json=body)
        text = answer.text
        found[f"chat stream={stream}"] = [text[text.index('"nvext"') :].partition('"engine_data"')[2][:200]]
        found[f"workers stream={stream}"] = text.partition('"worker_id":')[2].partition("}")[0]
    return found


async def test_two_workers_give_the_same_response_as_a_single_worker(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """On each route, two workers give the same tokens, logprobs and routed experts as one.

    `worker_id` names both workers, and `/metrics` counts the prefills.
    """
    other = f"{fleet}-one"
    async with (
        synthetic_worker(nats_url, other, config=CONFIG, worker_id="w"),
        behind(nats_url, other, tmp_path) as http,
    ):
        expected = await answers(http)
    async with (
        disaggregated(nats_url, fleet, prefill=CONFIG, decode=CONFIG) as both,
        behind(nats_url, fleet, tmp_path) as http,
    ):
        await until_paired(http.own, "p", "d")
        found = await answers(http)
        metrics = (await http.client.get("/metrics")).text
        assert len(both.given["p"]) == 3

    for stream in (False, True):
        assert found.pop(f"workers stream={stream}") == '{"prefill_worker_id":"p","decode_worker_id":"d"'
        assert expected.pop(f"workers stream={stream}") == '{"prefill_worker_id":"w","decode_worker_id":"w"'
    assert found == expected
    assert "rollbus_client_prefill_legs_total 3.0" in metrics
    assert 'rollbus_client_prefill_fallbacks_total{reason="busy"} 0.0' in metrics


async def test_an_option_sets_the_prefill_threshold(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--prefill-min-tokens` sets the threshold of the service's client."""
    seen: list[int] = []
    connect = rollbus.connect

    def noting(*args: Any, **kwargs: Any) -> rollbus.Client:
        seen.append(kwargs["prefill_min_tokens"])
        return connect(*args, **kwargs)

    monkeypatch.setattr(bus, "connect", noting)
    args = build_parser().parse_args(["frontend", "--prefill-min-tokens", "7"])
    settings = replace(settings_from_environment(), prefill_min_tokens=args.prefill_min_tokens)
    async with serve_http(nats_url, fleet, settings, listen("127.0.0.1", 0)):
        assert seen == [7]

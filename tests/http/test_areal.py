"""The commands of AReaL's remote engine, and the field that rllm-model-gateway copies, on the synthetic engine."""

import asyncio
from typing import Any

from rollbus import FinishReason
from rollbus.schemas.presence import WorkerState
from tests.http.support import CHAT, COMPLETIONS, Control, Talk, in_flight
from tests.support.fleet import all_serve, until_state


async def test_a_pause_of_areal_aborts_and_an_update_under_it_stays_paused(control: Control) -> None:
    """A pause ends the requests in flight with `abort`, new weights get the next version, and only resume ends it.

    AReaL's client retries any command, so each of them may come twice.
    """
    async with control(2) as c:
        async with in_flight(c.http) as chunks:
            paused = [await c.post("/areal_pause_generation", {}) for _ in range(2)]
            await until_state(c.http.own, lambda state: not any(worker.in_flight for worker in state.workers))
        ended = chunks[-1].finish_reason if chunks else None
        updated = await c.post("/areal_update_weights", {"model_path": str(c.root / "two"), "abort_all_requests": True})
        state = await until_state(c.http.own, lambda state: {worker.weight_version for worker in state.workers} == {2})
        repeated = await c.post("/areal_update_weights", {"model_path": str(c.root / "two")})
        resumed = await c.post("/areal_continue_generation", {})
        after = await until_state(c.http.own, all_serve)

    for status, answer in (*paused, updated, repeated, resumed):
        assert (status, answer["success"], answer["complete"]) == (200, True, True)
    assert ended == FinishReason.ABORT
    assert {worker.state for worker in state.workers} == {WorkerState.PAUSED}
    assert {worker.weight_version for worker in after.workers} == {3}


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/areal_pause_generation", {"mode": "keep"}, 400, "mode"),
    ("/areal_continue_generation", {"a": 1}, 400, "a"),
    ("/areal_update_weights", {}, 400, "model_path"),
    ("/areal_update_weights", {"model_path": "/x", "load_format": "dummy"}, 400, "load_format"),
    ("/areal_update_weights", {"model_path": "/etc"}, 403, None),
    ("/areal_init_weights_update_group", {"master_address": "h"}, 501, None),
    ("/areal_update_weights_xccl", {}, 501, None),
]


async def test_bad_commands_of_areal_change_nothing(control: Control) -> None:
    """An unknown field, a directory outside of the weight roots and broadcasts are rejected, and the workers serve."""
    async with control() as c:
        for path, body, status, param in BAD:
            got, answer = await c.post(path, body)
            assert (got, answer["error"]["param"]) == (status, param), (path, body)
        state = await c.http.rb.fleet.state()
    assert [(worker.state, worker.weight_version) for worker in state.workers] == [(WorkerState.SERVING, 1)]


async def test_extra_body_may_only_repeat_fields_of_the_body(talk: Talk) -> None:
    """`extra_body` may have only copies of fields: any other field in it would have no effect, so it is rejected."""
    async with talk() as (http, _):
        for path, base in (
            (CHAT, {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2, "logprobs": True}),
            (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 2, "logprobs": True}),
        ):
            same = {**base, "return_token_ids": True, "extra_body": {"return_token_ids": True}}
            others: dict[str, dict[str, Any]] = {
                "return_token_ids": {**base, "extra_body": {"return_token_ids": True}},
                "top_k": {**base, "top_k": 5, "extra_body": {"top_k": 6}},
                "frobnicate": {**base, "extra_body": {"frobnicate": None}},
                "__class__": {**base, "extra_body": {"__class__": 1}},
            }
            async with asyncio.TaskGroup() as tasks:
                good = tasks.create_task(http.client.post(path, json=same))
                bad = {name: tasks.create_task(http.client.post(path, json=body)) for name, body in others.items()}
            assert good.result().status_code == 200
            assert len(good.result().json()["choices"][0]["token_ids"]) == 2
            for name, answer in bad.items():
                error = answer.result().json()["error"]
                assert (answer.result().status_code, error["param"]) == (400, f"extra_body.{name}")
                assert f"allowed: {name} as a field of the body itself" in error["message"]

"""The control routes support clients of vLLM and prime-rl: their paths and bodies, and the fields that they read."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.bus.client.generation import Group
from rollbus.frontend.http import Settings
from rollbus.frontend.http.app import ADMIN, DATA, OPEN
from rollbus.frontend.http.control import INSTEAD
from rollbus.frontend.http.service import Service
from rollbus.schemas.errors import RequestTimeout
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.control.support import write_adapter
from tests.http.support import CHAT, CONFIG, Control, ControlHttp, Serve, Talk, in_flight, make_byte_level, save
from tests.http.test_edge import GENERATING, SLOW
from tests.support.fleet import synthetic_worker, until_idle, until_state, until_worker
from tests.support.requests import greedy
from tests.support.waits import until, until_true


async def test_the_routes_support_the_update_of_prime_rl(control: Control) -> None:
    """The routes support prime-rl's update: pause by query, weights by folder, resume without a body, and adapters."""
    async with control(2) as c, in_flight(c.http) as chunks:
        client = c.http.client
        answers = [
            await client.post("/pause", params={"mode": "keep", "clear_cache": "false"}),
            await c.told("/is_paused", WorkerState.PAUSED),
            await client.post("/update_weights", json={"weight_dir": (c.root / "two").as_posix()}),
            await c.told("/is_paused", WorkerState.PAUSED),
            await client.post("/resume"),
            await c.told("/is_paused", WorkerState.SERVING),
        ]
        seen = len(chunks)
        again = await client.post("/update_weights", json={"weight_dir": (c.root / "two").as_posix()})
        adapter = {"lora_name": "r16", "lora_path": (c.root / "adapter").as_posix()}
        loaded = [await client.post("/load_lora_adapter", json=adapter) for _ in range(2)]
        state = await until_state(
            c.http.rb, lambda state: [[it.version for it in worker.loras] for worker in state.workers] == [[2], [2]]
        )
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "r16"})
        live = await client.get("/liveness")

    bodies = [answer.json() for answer in answers]
    assert [answer.status_code for answer in (*answers, again, *loaded, unloaded, live)] == [200] * 11
    assert [bodies[i]["is_paused"] for i in (1, 3, 5)] == [True, True, False]
    assert [bodies[i]["status"] for i in (0, 2, 4)] == ["paused", "ok", "resumed"]
    assert bodies[0]["inflight_requests"] == 1  # The request is paused and continues later.
    assert all(line["in_flight"] <= 1 for line in bodies[0]["workers"])
    assert {chunk.weight_version for chunk in chunks[:seen]} <= {1, 2}
    assert (bodies[2]["weight_version"], again.json()["weight_version"]) == (2, 3)
    assert [answer.json()["status"] for answer in loaded] == ["ok", "ok"]
    assert [[(it.name, it.version) for it in worker.loras] for worker in state.workers] == [[("r16", 2)]] * 2
    assert live.json() == {"status": "ok"}


async def test_the_routes_support_the_weight_transfer_of_vllm(control: Control) -> None:
    """The weight transfer of vLLM shares a route with prime-rl, and the body decides.

    Versions are strings, or the next number.
    """
    async with control() as c:
        client = c.http.client

        async def transfer(seed: int, finish: dict[str, str] | None) -> list[str]:
            answers = [
                await client.post("/pause", params={"mode": "keep"}),
                await client.post("/start_weight_update"),
                await client.post("/update_weights", json={"update_info": {"seed": seed}}),
                await client.post("/finish_weight_update", json=finish),
                await client.post("/resume"),
            ]
            assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]
            return [answer.json()["message"] for answer in answers[1:4]]

        initialized = await client.post("/init_weight_transfer_engine", json={"init_info": {"port": 1}})
        said = [await transfer(4, {"weight_version": "7"}), await transfer(5, None)]
        await until_worker(c.http.own, "w0", lambda worker: worker.weight_version == 8)
        version = (await client.get("/weight_info")).json()
        wrong = [
            await client.post("/finish_weight_update", json={"weight_version": ""}),
            await client.post("/init_weight_transfer_engine", json={}),
            await client.post("/update_weights", json={"weight_dir": None}),
        ]
        unstarted = await client.post("/update_weights", json={"update_info": {"seed": 1}})
        huge = await client.post("/init_weight_transfer_engine", json={"init_info": {"a": "x" * (9 << 20)}})
        state = await c.http.rb.fleet.state()

    assert (initialized.status_code, initialized.json()["message"]) == (200, "Weight transfer initialized")
    assert said == [["Weight update started", "Weights updated", "Weight update finished"]] * 2
    assert version == {"weight_version": "8", "version": 8}
    assert [answer.json()["error"]["param"] for answer in wrong] == ["weight_version", "init_info", "weight_dir"]
    assert [answer.status_code for answer in wrong] == [400] * 3
    assert (unstarted.status_code, unstarted.json()["error"]["code"]) == (409, "transfer_expired")
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "too_large")
    assert (state.workers[0].state, state.workers[0].weight_version) == (WorkerState.SERVING, 8)


async def test_the_pause_route_of_vllm_keeps_requests_by_default(control: Control) -> None:
    """Without a mode, requests are kept.

    As in vLLM, the other modes reset the cache unless the query says otherwise.
    """
    async with control() as c:
        modes = [
            ("", "keep", False),
            ("?mode=abort", "abort", True),
            ("?mode=wait&clear_cache=false", "wait", False),
            ("?wait_for_inflight_requests=true", "wait", True),
            ("?mode=keep&clear_cache=true", "keep", True),
        ]
        for query, mode, clears in modes:
            status, _ = await c.post(f"/pause{query}")
            recorded = (await c.http.rb.fleet.state()).desired["synthetic"].registers["pause"].command
            assert (status, recorded.mode, recorded.clear_cache) == (200, mode, clears), query  # type: ignore[union-attr]


async def test_the_cache_routes_of_vllm_report_success_or_failure(control: Control) -> None:
    """`success` states whether the caches were reset. A cache in use requires `reset_running_requests`."""
    async with control() as c:
        request = GenerateRequest(prompt_token_ids=[5] * 64, sampling=SamplingParams(max_tokens=1))
        idle = await c.post("/reset_prefix_cache")
        async with in_flight(c.http):
            busy = await c.post("/reset_prefix_cache")
            forced = await c.post("/reset_prefix_cache?reset_running_requests=true&reset_external=false")
        assert (await c.http.rb.complete(request)).error is None

    assert (idle[0], idle[1]["success"]) == (200, True)
    assert (busy[0], busy[1]["error"]["code"]) == (502, "cache_in_use")
    assert busy[1].get("success") is not True
    assert (forced[0], forced[1]["success"]) == (200, True)


async def test_the_adapter_routes_of_vllm_respond_with_a_line_of_text(control: Control) -> None:
    """The response is a line of text.

    A loaded name is refused without `load_inplace`, and a missing folder gives 404.
    """
    async with control() as c:
        client = c.http.client
        adapter = {"lora_name": "a", "lora_path": str(c.root / "adapter")}
        loaded = await client.post("/v1/load_lora_adapter", json={**adapter, "is_3d_lora_weight": False})
        twice = await client.post("/v1/load_lora_adapter", json=adapter)
        replaced = await client.post("/v1/load_lora_adapter", json={**adapter, "load_inplace": True})
        absent = {"lora_name": "b", "lora_path": str(c.root / "absent")}
        absents = [await client.post(f"{prefix}/load_lora_adapter", json=absent) for prefix in ("", "/v1", "/v1/rl")]
        unloaded = [
            await client.post(f"{prefix}/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 1})
            for prefix in ("/v1", "")
        ]

    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter added successfully.")
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "lora_name")
    assert replaced.status_code == 200
    assert [answer.status_code for answer in absents] == [404, 404, 400]
    assert [answer.json()["error"]["code"] for answer in absents] == ["bad_source"] * 3
    # As in vLLM, the second unload finds no adapter.
    assert [answer.status_code for answer in unloaded] == [200, 404]
    assert unloaded[1].json()["error"]["code"] == "not_found"


async def test_a_partial_result_is_502_under_names_of_other_engines(control: Control) -> None:
    """Under names of other engines, a partial result gives 502 instead of 207, because their clients accept any 2xx."""
    async with control(2) as c:
        c.engines[0].faults = replace(c.engines[0].faults, reset_cache=True, load="refused", load_lora=True)
        adapter = {"lora_name": "a", "lora_path": str(c.root / "adapter")}
        answers = [
            await c.post("/reset_prefix_cache"),
            await c.post("/load_lora_adapter", adapter),
            await c.post("/v1/load_lora_adapter", {**adapter, "load_inplace": True}),
            await c.post("/update_weights", {"weight_dir": str(c.root / "two")}),
        ]

    assert [(status, answer["error"]["code"]) for status, answer in answers] == [(502, "partial")] * 4


# More names of vLLM and prime-rl: abort by request id, sleep and wake, and routes that are not served.


GENERATE = "/inference/v1/generate"
RESOLVES_S = 0.3
"""Seconds for which requests resolve their model after an abort."""
ENDLESS = rollbus.SamplingParams(max_tokens=10_000, ignore_eos=True)


async def test_requests_are_aborted_by_their_ids(serve: Serve) -> None:
    """The route of vLLM aborts requests of any client and counts them.

    Only rollbus's route gives 404 for an ended request.
    """
    async with serve(config=SyntheticConfig(step_s=0.01)) as http:
        body = {**GENERATING[GENERATE], "stream": True, "request_id": "mine"}
        async with http.client.stream("POST", GENERATE, json=body) as stream:
            lines = aiter(stream.aiter_lines())
            await anext(lines)
            # A response of the OpenAI routes would have this id.
            ended = await http.client.post("/abort_requests", json={"request_ids": ["chatcmpl-mine", "other"]})
            assert ended.status_code == 200, ended.text
            *_, last, _, done, _ = [line async for line in lines]
        await until_idle(http.engine, http.rb)
        again = await http.client.post("/abort_requests", params={"request_ids": ["mine", "other"]})
        ours = await http.client.post("/v1/rl/abort", json={"request_ids": ["mine"]})
        without = await http.client.post("/v1/rl/abort", json={})
    assert ('"finish_reason":"abort"' in last, done) == (True, "data: [DONE]")
    assert (ended.status_code, ended.json()["status"], ended.json()["aborted"]) == (200, "aborted", 1)
    assert (again.status_code, again.json()["aborted"], again.json()["not_found"]) == (200, 0, ["mine", "other"])
    assert (ours.status_code, ours.json()["error"]["code"]) == (404, "not_found")
    assert (without.status_code, without.json()["error"]["param"]) == (400, "request_ids")


async def test_all_requests_are_aborted(serve: Serve) -> None:
    """Without ids, vLLM's route aborts the requests of this service, also those that wait, and of other clients."""
    config = SyntheticConfig(step_s=0.01, max_num_seqs=2)
    settings = Settings(token="data", admin_token="admin")
    admin = {"Authorization": "Bearer admin"}
    body = GENERATING[GENERATE]
    async with serve(settings, config=config) as http:
        stream = http.rb.generate(request := rollbus.GenerateRequest(prompt_token_ids=[5], sampling=ENDLESS))
        await anext(stream)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(http.client.post(GENERATE, json=body, headers=admin)) for _ in range(30)]

            async def load() -> object:
                return (await http.client.get("/load", headers=admin)).json()["server_load"]

            await until(load, len(asked))
            refused = await http.client.post("/abort_requests", json={}, headers={"Authorization": "Bearer data"})
            answer = await http.client.post("/abort_requests", json={}, headers=admin)
        *_, last = [chunk async for chunk in stream]
        left = await load()
    assert refused.status_code == 401
    assert (answer.status_code, answer.json()["aborted"]) == (200, len(asked) + 1), answer.text
    assert {task.result().json()["choices"][0]["finish_reason"] for task in asked} == {"abort"}
    assert last.finish_reason is rollbus.FinishReason.ABORT
    assert request.request_id == last.request_id
    assert left == 0


@pytest.mark.parametrize("body", [{}, {"model": "synthetic"}])
async def test_requests_without_a_known_model_yet_are_aborted(
    serve: Serve, tmp_path: Path, body: dict[str, Any]
) -> None:
    """An abort of all requests includes those that still resolve their model, on each route, streamed or not."""
    gate = asyncio.Event()
    known_models, abort_open = rollbus.Fleet.known_models, Service.abort_open

    async def known_late(self: rollbus.Fleet) -> tuple[str, ...]:
        await gate.wait()
        return await known_models(self)

    async def abort(self: Service, model: str | None, ids: tuple[str, ...] | None) -> dict[str, str]:
        # Long enough that an abort that does not wait has ended before.
        asyncio.get_running_loop().call_later(RESOLVES_S, gate.set)
        return await abort_open(self, model, ids)

    settings = Settings(tokenizer=save(make_byte_level(), tmp_path))
    async with serve(settings, config=SLOW) as http:

        async def last_reason(path: str, *, stream: bool) -> str | None:
            answer = await http.client.post(path, json={**GENERATING[path], "model": None, "stream": stream})
            text = answer.text.split("data: ")[-2] if stream else answer.text
            return str(json.loads(text)["choices"][0]["finish_reason"])

        async def load() -> object:
            return (await http.client.get("/load")).json()["server_load"]

        with (
            mock.patch.object(rollbus.Fleet, "known_models", known_late),
            mock.patch.object(Service, "abort_open", abort),
        ):
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(last_reason(path, stream=stream))
                    for path in GENERATING
                    for stream in (False, True)
                ]
                await until(load, len(asked))
                answer = await http.client.post("/abort_requests", json=body)
    assert answer.json()["aborted"] == len(asked), answer.text
    assert [task.result() for task in asked] == ["abort"] * len(asked)


async def test_engines_sleep_and_wake(control: Control) -> None:
    """`sleep` and `wake_up` accept vLLM's query parameters. They reject those with another effect and name them."""
    async with control() as c:
        client = c.http.client
        answers = [
            await client.post("/sleep", params={"level": "1"}),
            await c.told("/is_sleeping", WorkerState.ASLEEP),
            await client.post("/wake_up"),
            await c.told("/is_sleeping", WorkerState.SERVING),
            await client.post("/sleep"),
            await client.post("/wake_up", params={"tags": ["weights"]}),
            await client.post("/wake_up", params={"tags": ["kv_cache"]}),
            await c.told("/is_sleeping", WorkerState.SERVING),
        ]
        wrong = [
            await client.post("/sleep", params={"level": "0"}),
            await client.post("/sleep", params={"mode": "wait"}),
            await client.post("/wake_up", params={"tags": ["weights", "kv"]}),
        ]
        state = await c.http.rb.fleet.state()
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    assert [answers[i].json()["is_sleeping"] for i in (1, 3, 7)] == [True, False, False]
    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in wrong] == [
        (400, "level"),
        (400, "mode"),
        (400, "tags[1]"),
    ]
    assert state.workers[0].state is WorkerState.SERVING


def test_a_known_route_that_is_not_served_names_a_served_route() -> None:
    """The reason of each route with 501 names a served route, or says that none can do it."""
    served = {path for _, path in {**OPEN, **DATA, **ADMIN}} - INSTEAD.keys()
    for path, instead in INSTEAD.items():
        assert any(other in instead for other in served), path


async def test_the_token_route_of_prime_rl_equals_the_chat_route(talk: Talk) -> None:
    """prime-rl's token route equals the chat route with the token ids of the prompt in `tokens`."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3, "seed": 1}
    async with talk(CONFIG) as (http, _):
        body = {**asked, "tokens": [5, 6, 7], "return_token_ids": True}
        answer = (await http.client.post(f"{CHAT}/tokens", json=body)).json()
        sampling = rollbus.SamplingParams(max_tokens=3, seed=1)
        direct = await http.rb.complete(rollbus.GenerateRequest(prompt_token_ids=[5, 6, 7], sampling=sampling))
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["choices"][0]["token_ids"] == direct.token_ids.tolist()


# prime-rl's update with the directory of an adapter: the adapter answers under the name of the model.


def versions(generation: Generation) -> tuple[set[int], set[int] | None]:
    """Return the versions of the weights and of the adapter."""
    loras = generation.lora_versions
    return set(generation.weight_versions.tolist()), None if loras is None else set(loras.tolist())


async def update(c: ControlHttp, name: str, **fields: Any) -> int:
    """Update to a directory. Return the answered version."""
    status, body = await c.post("/update_weights", {"weight_dir": str(c.root / name), **fields})
    assert status == 200, body
    return int(body["weight_version"])


async def test_an_adapter_in_an_update_answers_under_the_models_name(
    control: Control, nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An adapter in prime-rl's update answers the requests for the model, also those in flight and at a late worker.

    Its versions continue those of the weights. A later update by a checkpoint ends it.
    """
    async with control(2) as c:
        write_adapter(c.root / "second", module="model.layers.0.mlp.down_proj")
        rb = c.http.rb
        plain = await rb.complete(greedy(1, 8))
        async with in_flight(c.http) as chunks:
            await until_true(lambda: chunks)
            answered = [await update(c, "adapter")]
            await until_true(lambda: chunks[-1].lora_version == 2)
            answered.append(await update(c, "second"))
            await until_true(lambda: chunks[-1].lora_version == 3)
        found = [await rb.complete(greedy(1, 8)) for _ in range(6)]
        body = {"model": "synthetic", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
        http = await c.post("/inference/v1/generate", body)
        listed = await c.get("/v1/models")
        info = await c.get("/weight_info")
        await rb.complete(greedy(1, 2, min_weight_version=3))
        late: dict[str, Any] = {"model_path": str(c.root / "one"), "weight_roots": (str(c.root),), "weight_version": 1}
        late |= {"cache_dir": str(tmp_path / "cache"), "model": "synthetic"}
        async with synthetic_worker(nats_url, fleet, worker_id="late", **late):
            await until_worker(c.http.own, "late", lambda worker: worker.served_version == 3)
            found += [await rb.complete(greedy(1, 8)) for _ in range(6)]
        answered.append(await update(c, "two"))
        after = await rb.complete(greedy(1, 8))
        state = await until_state(c.http.own, lambda state: not any(worker.loras for worker in state.workers))

    assert answered == [2, 3, 4]
    assert {worker.weight_version for worker in state.workers} == {4}
    assert (versions(plain), versions(after)) == (({1}, None), ({4}, None))
    assert all(versions(result) == ({1}, {3}) for result in found)
    assert len({tuple(result.token_ids.tolist()) for result in found}) == 1
    assert found[0].token_ids.tolist() != plain.token_ids.tolist()
    group = Group(key=None, request=found[0].request, generations=tuple(found), steps=1, error=None)
    assert group.oldest_version == 3
    assert (http[0], http[1]["lora"]) == (200, None), http
    assert [model["id"] for model in listed[1]["data"]] == ["synthetic"]
    assert info[1] == {"weight_version": "3", "version": 3}


async def test_an_unload_ends_the_adapter_under_the_models_name(control: Control) -> None:
    """An unload of the model's name ends the adapter, and requests in flight continue on the weights."""
    async with control() as c, in_flight(c.http) as chunks:
        assert await update(c, "adapter", version=9) == 9
        again = await update(c, "adapter", version=9)
        await until_true(lambda: chunks and chunks[-1].lora_version == 9)
        unloaded = await c.post("/unload_lora_adapter", {"lora_name": "synthetic"})
        await until_true(lambda: chunks[-1].lora_version is None)
        after = await c.http.rb.complete(greedy(1, 4))
        with pytest.raises(RequestTimeout, match="the newest version of a serving worker is 1"):
            await c.http.rb.complete(greedy(1, 4, min_weight_version=2, timeout_s=0.5))
        missing = await c.post("/unload_lora_adapter", {"lora_name": "synthetic"})

    assert again == 9
    assert (unloaded[0], missing[0]) == (200, 404)
    assert versions(after) == ({1}, None)


async def test_only_prime_rls_update_takes_an_adapter_for_the_weights(control: Control) -> None:
    """Other routes reject an adapter for the weights, and the model's name for an adapter, by name."""
    async with control() as c:
        path = str(c.root / "adapter")
        own = await c.post("/v1/rl/update_weights", {"path": path})
        named = await c.post("/load_lora_adapter", {"lora_name": "synthetic", "lora_path": path})
        useless = await c.post("/update_weights", {"weight_dir": path, "mode": "abort"})
        state = await c.http.own.fleet.state()

    assert (own[0], own[1]["error"]["code"]) == (400, "is_adapter")
    assert "load it with load_lora" in own[1]["error"]["message"]
    assert (named[0], named[1]["error"]["param"]) == (400, "lora_name")
    assert (useless[0], useless[1]["error"]["param"]) == (400, "mode")
    assert not state.desired

"""The control routes support clients of vLLM and prime-rl: their paths and bodies, and the fields that they read."""

from pathlib import Path

from msgspec.structs import replace

from rollbus import GenerateRequest, SamplingParams
from rollbus.schemas.presence import WorkerState
from tests.http.control_support import control_http, in_flight, together
from tests.http.support import http_before
from tests.support.fleet_states import until_state, until_worker


async def test_the_routes_support_the_update_of_prime_rl(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The routes support prime-rl's update: pause by query, weights by folder, resume without a body, and adapters."""
    async with control_http(nats_url, fleet, tmp_path, 2) as c, in_flight(c.http) as chunks:
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


async def test_the_routes_support_the_weight_transfer_of_vllm(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The weight transfer of vLLM shares a route with prime-rl, and the body decides.

    Versions are strings, or the next number.
    """
    async with control_http(nats_url, fleet, tmp_path) as c:
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


async def test_the_pause_route_of_vllm_keeps_requests_by_default(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Without a mode, requests are kept.

    As in vLLM, the other modes reset the cache unless the query says otherwise.
    """
    async with control_http(nats_url, fleet, tmp_path) as c:
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


async def test_the_cache_routes_of_vllm_report_success_or_failure(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`success` states whether the caches were reset. A cache in use requires `reset_running_requests`."""
    async with control_http(nats_url, fleet, tmp_path) as c:
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


async def test_the_adapter_routes_of_vllm_respond_with_a_line_of_text(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """The response is a line of text.

    A loaded name is refused without `load_inplace`, and a missing folder gives 404.
    """
    async with control_http(nats_url, fleet, tmp_path) as c:
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


async def test_a_partial_result_is_502_under_names_of_other_engines(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Under names of other engines, a partial result gives 502 instead of 207, because their clients accept any 2xx.

    An empty fleet gives 503.
    """
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        c.engines[0].faults = replace(c.engines[0].faults, reset_cache=True, load="refused", load_lora=True)
        adapter = {"lora_name": "a", "lora_path": str(c.root / "adapter")}
        weights = {"weight_dir": str(c.root / "two")}
        answers = [
            await c.post("/reset_prefix_cache"),
            await c.post("/load_lora_adapter", adapter),
            await c.post("/v1/load_lora_adapter", {**adapter, "load_inplace": True}),
            await c.post("/update_weights", weights),
        ]
    async with http_before(nats_url, f"{fleet}-empty") as http:
        reads = ("/is_paused", "/liveness", "/v1/rl/health", "/v1/rl/weight_version", "/weight_info")
        empty = await together(
            *(http.client.post(path, json=weights) for path in ("/update_weights", "/v1/rl/update_weights")),
            *(http.client.post(path) for path in ("/pause", "/resume", "/reset_prefix_cache")),
            *(http.client.get(path) for path in reads),
        )

    assert [(status, answer["error"]["code"]) for status, answer in answers] == [(502, "partial")] * 4
    assert [answer.status_code for answer in empty] == [503] * 10

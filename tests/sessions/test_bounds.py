"""Bounds of sessions, and sessions that two services answer: ends, retries, costs and numbers."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from msgspec.structs import replace

from rollbus import bus
from rollbus.bus.nats.jetstream import Unanswered
from rollbus.frontend.http import Settings
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.sessions import manager, running, turns
from rollbus.frontend.http.sessions.store import Claim, SessionStore, TurnRecord
from rollbus.frontend.sessions.tree import SessionError
from tests.http.support import Http, http_before
from tests.sessions.support import CONFIG, Owner, Serving, agent_of
from tests.support.waits import until

USER = {"role": "user", "content": "How much is 1 + 2?"}
ASKED: dict[str, Any] = {"model": "synthetic", "messages": [USER]}


@pytest.fixture
def two_services(serve: Serving, nats_url: str, fleet: str, tmp_path: Path) -> Any:
    """Return a function that serves one fleet, whose engine is slow, with two services."""

    @contextlib.asynccontextmanager
    async def both() -> AsyncIterator[tuple[Http, Owner, Http]]:
        settings = Settings(tokenizer=tmp_path, tool_call_parser="hermes", reasoning_parser="qwen3")
        async with (
            serve(config=replace(CONFIG, step_s=0.005)) as (http, owner),
            http_before(nats_url, fleet, settings) as other,
        ):
            await other.own.fleet.wait_for_workers()
            yield http, owner, other

    return both


async def begin(agent: "openai.AsyncOpenAI", **fields: Any) -> Any:
    """Return the stream of a turn that has begun."""
    events = await agent.chat.completions.create(**ASKED, **fields, stream=True)
    async for event in events:
        if event.choices[0].delta.content:
            return events
    raise AssertionError("the turn has no content")


async def test_an_end_at_another_service_stops_a_running_turn(
    two_services: Any, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn stops and keeps its tokens if its session ends at another service. Later turns are 410 at both."""
    monkeypatch.setattr(manager, "WATCH_S", 0.05)
    writes += ["Slowly, " * 800]
    async with two_services() as (http, owner, other):
        session = await owner.open()
        async with agent_of(session) as agent:
            events = await begin(agent)
            assert (await other.client.delete(f"/v1/rl/sessions/{session['id']}")).status_code == 200
            assert [event async for event in events][-1].choices[0].finish_reason == "abort"
            (turn,) = (await owner.read(session))["turns"]
            assert (turn["is_complete"], turn["num_sampled"] > 0) == (False, True)
            for url in (http.url, other.url):
                moved = {**session, "base_url": session["base_url"].replace(http.url, url)}
                async with agent_of(moved) as later:
                    with pytest.raises(openai.APIStatusError) as caught:
                        await later.chat.completions.create(**ASKED)
                    assert (caught.value.status_code, caught.value.code) == (410, "session_ended")


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, {"X-Stainless-Retry-Count": "1"}])
async def test_a_retry_of_a_running_turn_at_another_service_generates_nothing(
    two_services: Any, writes: list[str], headers: dict[str, str]
) -> None:
    """While a turn runs at one service, its retry at another is a 409 that clients repeat; then it is its answer."""
    writes += ["Slowly, " * 60, "Again."]
    async with two_services() as (http, owner, other):
        session = await owner.open()
        moved = {**session, "base_url": session["base_url"].replace(http.url, other.url)}
        first_headers = {"X-Stainless-Retry-Count": "0"} | {each: v for each, v in headers.items() if "Key" in each}
        async with agent_of(session) as agent, agent_of(moved) as retrying:
            events = await begin(agent, extra_headers=first_headers)
            with pytest.raises(openai.ConflictError) as caught:
                await retrying.chat.completions.create(**ASKED, stream=True, extra_headers=headers)
            assert caught.value.code == "turn_running"
            assert "Retry-After" in caught.value.response.headers
            text = "".join([event.choices[0].delta.content or "" async for event in events])
            again = await retrying.chat.completions.create(**ASKED, stream=True, extra_headers=headers)
            repeated = "".join([event.choices[0].delta.content or "" async for event in again])
        assert repeated.endswith(text)
        assert (await owner.read(session))["num_turns"] == 1


async def test_two_services_that_get_a_turn_at_once_run_it_once(two_services: Any, writes: list[str]) -> None:
    """Of several simultaneous requests with one key, at two services, one is generated. The others are 409 or equal."""
    writes += ["One.", "Two.", "Three.", "Four.", "Five.", "Six."]
    async with two_services() as (http, owner, other):
        session = await owner.open()
        headers = {"Authorization": f"Bearer {session['api_key']}", "Idempotency-Key": "k"}
        path = f"/sessions/{session['id']}/v1/chat/completions"
        async with asyncio.TaskGroup() as tasks:
            posts = [each.client.post(path, json=ASKED, headers=headers) for each in (http, other) for _ in range(3)]
            running = [tasks.create_task(post) for post in posts]
        answers = [task.result() for task in running]
        assert {answer.status_code for answer in answers} <= {200, 409}
        assert len({answer.text for answer in answers if answer.status_code == 200}) == 1
        assert (await owner.read(session))["num_turns"] == 1


async def test_the_turn_of_a_service_that_is_gone_runs_again(
    two_services: Any, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running turn renews its claim, and a claim that its service does not renew any more stops no retry.

    This holds even if the clock of that service is fast.
    """
    monkeypatch.setattr(manager, "WATCH_S", 0.02)
    writes += ["Slowly, " * 60, "Again."]
    keyed = {"Idempotency-Key": "k"}
    async with two_services() as (http, owner, _):
        session, gone = await owner.open(), await owner.open()
        store = SessionStore(http.own)
        async with agent_of(session) as agent:
            events = await begin(agent, extra_headers=keyed)
            found = await store.read_claim(session["id"], "run.>")

            async def is_renewed() -> bool:
                renewed = await store.read_claim(session["id"], "run.>")
                return renewed is not None and renewed[0].until > found[0].until

            await until(is_renewed, True)
            await events.close()
        key, sequence = f"run.{hashlib.blake2b(b'k', digest_size=16).hexdigest()}.key", 0
        async with agent_of(gone) as agent:
            for claim_s in (manager.CLAIM_S, 0.0):
                monkeypatch.setattr(manager, "CLAIM_S", claim_s)
                claim = Claim(key=key, service="gone", until=time.time() + 1e6)
                sequence = await store.write_claim(gone["id"], claim, sequence) or -1
                if claim_s > 0:
                    with pytest.raises(openai.ConflictError):
                        await agent.chat.completions.create(**ASKED, extra_headers=keyed)
            answer = await agent.chat.completions.create(**ASKED, extra_headers=keyed)
            assert "Again." in str(answer.choices[0].message.content)

        async def is_released() -> bool:
            return await store.read_claim(gone["id"], "run.>") is None

        await until(is_released, True)


async def test_claims_without_an_answer_or_of_another_version_delay_no_retry(
    serve: Serving, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that NATS stored without an answer is its service's own. What no service can read is no claim."""
    writes += ["One.", "Two.", "Three."]
    async with serve() as (http, owner), agent_of(session := await owner.open()) as agent:
        store, write = SessionStore(http.own), SessionStore.write_claim

        async def unanswered(*args: Any) -> None:
            await write(*args)
            monkeypatch.setattr(SessionStore, "write_claim", write)
            raise Unanswered("JetStream did not answer")

        for headers in ({}, {"Idempotency-Key": "k"}):
            monkeypatch.setattr(SessionStore, "write_claim", unanswered)
            await agent.with_options(max_retries=1).chat.completions.create(**ASKED, extra_headers=headers)
        for key, written in (("a", b'{"service":"old","until":1}'), ("b", b'"\xff"')):
            digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
            await store._put(f"{session['id']}.run.{digest}.key", written, 0)
            await agent.chat.completions.create(**ASKED, extra_headers={"Idempotency-Key": key})
        assert await _turns_of(owner, session) == [True] * 4


async def test_heads_and_turns_that_cannot_be_read_concern_only_their_sessions(
    serve: Serving, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Junk, what another version wrote and what `nats kv del` deleted end neither the service nor later openings."""
    monkeypatch.setattr(manager, "WATCH_S", 0.01)
    writes += ["Slowly, " * 100]
    slow = replace(CONFIG, step_s=0.005)
    async with serve(config=slow) as (http, owner), agent_of(await owner.open()) as agent:
        store, events = SessionStore(http.own), await begin(agent)
        (name,) = await store.names()
        found = await store._get(f"{name}.head")
        for key, data in (("junk", b"{"), ("other", found[0].replace(b'"keep"', b'"drop"')), ("deleted", b"")):
            await store._put(f"{key}.head", data, None)
        record = TurnRecord(id="x", parts=1)
        for damaged in (b"{", msgspec.json.encode(replace(await store.read(name), turns=(record,)))):
            await store._put(f"{name}.turn.x.0", b"\xc1", None)
            await store._put(f"{name}.head", damaged, None)
            await asyncio.sleep(0.1)
            await store._put(f"{name}.head", found[0], None)
        assert [event async for event in events][-1].choices[0].finish_reason == "stop"
        monkeypatch.setattr(manager, "SWEEP_S", 0.0)
        await owner.open()
        assert await _turns_of(owner, {"id": name}) == [True]


async def test_a_turn_that_has_ended_takes_no_claim_of_its_retry(serve: Serving) -> None:
    """A turn may end while its claim is renewed, and its retry may begin then: the retry keeps its claim."""
    async with serve() as (http, owner):
        sessions, name = manager.Sessions(http.own), (await owner.open())["id"]
        session = await sessions.load(name)
        turn, retry = (running.RunningTurn("k", "", is_stream=False) for _ in range(2))
        await sessions.claim(session, turn, is_retry=True)
        turn.end()
        await sessions.claim(session, retry, is_retry=True)
        await sessions._renew_claim(name, turn)
        await sessions.release(session, turn)
        await sessions._renew_claim(name, retry)
        assert (turn.claim is None, retry.claim is None, retry.is_lost) == (True, False, False)


async def test_a_key_counts_as_a_whole_and_a_retry_only_in_its_api(serve: Serving, writes: list[str]) -> None:
    """One body in two APIs is two turns, and one key for both is an error. Long keys may differ at the end."""
    writes += ["One.", "Two.", "Three.", "Four."]
    body = {"model": "synthetic", "messages": [USER], "max_tokens": 60}
    async with serve() as (http, owner):
        session = await owner.open()

        async def post(api: str, **headers: str) -> httpx.Response:
            key = {"Authorization": f"Bearer {session['api_key']}"}
            return await http.client.post(f"/sessions/{session['id']}/v1/{api}", json=body, headers={**key, **headers})

        again = {"X-Stainless-Retry-Count": "1"}
        chat, message = await post("chat/completions"), await post("messages", **again)
        assert (await post("messages", **again)).text == message.text
        assert chat.json()["object"] == "chat.completion"
        assert message.json()["type"] == "message"
        keyed = [await post("chat/completions", **{"Idempotency-Key": "k" * 600 + end}) for end in ("a", "b", "a")]
        assert [answer.status_code for answer in keyed] == [200] * 3
        assert (keyed[0].text != keyed[1].text, keyed[0].text == keyed[2].text) == (True, True)
        refused = await post("messages", **{"Idempotency-Key": "k" * 600 + "a"})
        assert (refused.status_code, "another body or API" in refused.text) == (400, True)
        assert (await owner.read(session))["num_turns"] == 4


async def test_each_read_renews_the_lease_and_models_that_start_delay_samples_once(
    serve: Serving, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading samples renews the lease as reading the session does. All leaves wait for models for one time in all."""
    left: list[float] = []

    async def wait(_service: Any, _request: Any, _model: str, seconds: float) -> None:
        left.append(seconds)
        await asyncio.sleep(0.05)
        raise HttpError(503, "the workers start", code="no_workers")

    async with serve() as (http, owner), agent_of(session := await owner.open()) as agent:
        history: list[Any] = []
        for number in range(5):
            asked = {"model": "synthetic", "messages": [*history, USER]}
            message = (await agent.chat.completions.create(**asked)).choices[0].message  # type: ignore[call-overload]
            if number < 2:
                history += [USER, message.model_dump(exclude_none=True)]
        with monkeypatch.context() as patched:
            patched.setattr(turns, "find_target", wait)
            samples = await owner.samples(session)
        store = SessionStore(http.own)
        for path in ("", "/samples"):
            aged = await store.change(session["id"], lambda head: replace(head, used_at=head.used_at - 1000.0))
            assert (await owner.client.get(f"/v1/rl/sessions/{session['id']}{path}")).status_code == 200
            head = await store.read(session["id"])
            assert head.used_at >= aged.used_at + 1000.0
    assert [sample["joins"][-1] for sample in samples] == ["unchecked"] * 3
    assert left == sorted(left, reverse=True)
    assert left[0] - left[-1] >= 0.1


async def test_a_service_whose_claim_was_replaced_abandons_its_turn(
    two_services: Any, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that was frozen notices that another one has its turn: it ends it and leaves the claim as it is."""
    monkeypatch.setattr(manager, "WATCH_S", 0.02)
    writes += ["Slowly, " * 800]
    async with two_services() as (http, owner, _):
        session, store = await owner.open(), SessionStore(http.own)
        async with agent_of(session) as agent:
            events = await begin(agent, extra_headers={"Idempotency-Key": "k"})
            found, taken = None, None
            while taken is None:
                # The service renews its claim until this write is the first one after a read.
                found = await store.read_claim(session["id"], "run.>")
                taken = await store.write_claim(session["id"], replace(found[0], service="other"), found[1])
            with pytest.raises(openai.APIError, match="another service"):
                assert [event async for event in events]
        await until(lambda: _turns_of(owner, session), [False])
        left = await store.read_claim(session["id"], "run.>")
        assert left[0].service == "other"


async def test_of_two_services_that_run_a_turn_one_closes_it(
    two_services: Any, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that goes on after its service was frozen, while its retry ran elsewhere, is no second complete turn."""
    headers: Any = {"X-Stainless-Retry-Count": "1"}
    monkeypatch.setattr(manager, "WATCH_S", 600.0)
    monkeypatch.setattr(manager, "CLAIM_S", 0.1)
    writes += ["Slowly, " * 100, "Again."]
    async with two_services() as (http, owner, other):
        session = await owner.open()
        moved = {**session, "base_url": session["base_url"].replace(http.url, other.url)}
        async with agent_of(session) as agent, agent_of(moved) as retrying:
            events = await begin(agent, extra_headers={"X-Stainless-Retry-Count": "0"})
            await asyncio.sleep(2 * manager.CLAIM_S)
            answer = await retrying.chat.completions.create(**ASKED, stream=True, extra_headers=headers)
            text = "".join([event.choices[0].delta.content or "" async for event in answer])
            with pytest.raises(openai.APIError, match="another service"):
                assert [event async for event in events]
            again = await agent.chat.completions.create(**ASKED, stream=True, extra_headers=headers)
            assert "".join([event.choices[0].delta.content or "" async for event in again]) == text
        assert text.endswith("Again.")
        assert await _turns_of(owner, session) == [True, False]


async def test_a_turn_that_is_stored_stays_as_it_is(serve: Serving, writes: list[str]) -> None:
    """An error after a turn was closed does not make it interrupted: no later turn could have its claim."""
    writes += ["It is 3."]
    async with serve() as (http, owner):
        session = await owner.open()
        async with agent_of(session) as agent:
            await agent.chat.completions.create(**ASKED, extra_headers={"Idempotency-Key": "k"})
        sessions = manager.Sessions(http.own)
        (turn,) = (loaded := await sessions.load(session["id"])).tree.turns.values()
        await sessions.close_turn(loaded, replace(turn, is_complete=False), None, b"", None)
        again = await manager.Sessions(http.own).load(session["id"])
        assert turn.is_complete
        assert again.tree.turns == {turn.id: turn}
        assert await sessions.answer(again, turn)


def test_a_turn_without_its_claim_is_not_complete_even_at_a_limit() -> None:
    """If another service has the turn, what this one has is interrupted, although the session's time has ended it."""
    turn = running.RunningTurn("", "", is_stream=True)
    turn.stop(bus.FinishReason.LENGTH)
    turn.abandon()
    assert turn.was_aborted


async def _turns_of(owner: Owner, session: dict[str, Any]) -> list[bool]:
    """Return for each turn whether it is complete."""
    return [turn["is_complete"] for turn in (await owner.read(session))["turns"]]


async def test_a_session_ends_at_its_cost(serve: Serving, writes: list[str]) -> None:
    """At the bound of the cost a turn ends with `length`, and the next one is a 400. The cost follows the prices."""
    writes += ["It is three, I think. " * 60, "No."]
    async with serve() as (_, owner):
        session = await owner.open(max_cost=1.0, prompt_price=1000.0, sampled_price=10_000.0)
        async with agent_of(session, max_retries=2) as agent:
            answer = await agent.chat.completions.create(**ASKED)
            usage, (choice,) = answer.usage, answer.choices
            assert choice.finish_reason == "length"
            cost = (usage.prompt_tokens * 1000 + usage.completion_tokens * 10_000) / 1e6
            assert 0.98 < cost <= 1.0
            assert (await owner.read(session))["cost"] == pytest.approx(cost)
            with pytest.raises(openai.BadRequestError) as caught:
                await agent.chat.completions.create(**ASKED)
            assert (caught.value.code, "cost" in caught.value.message) == ("session_limit", True)
        session = await owner.open(max_cost=1.0, cached_price=1e6, sampled_price=1.0)
        async with agent_of(session) as agent:
            with pytest.raises(openai.BadRequestError) as caught:
                await agent.chat.completions.create(**ASKED)
            assert caught.value.code == "session_limit", "the whole prompt may be cached"
        refused = await owner.client.post("/v1/rl/sessions", json={"max_cost": 1.0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_cost")


async def test_a_fleet_has_no_more_sessions_than_it_may(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening is counted, also of several at once, and a session whose retention has ended makes room."""
    monkeypatch.setattr(manager, "MAX_SESSIONS", 3)
    monkeypatch.setattr(manager, "FULL_SWEEP_S", 0.0)
    async with serve() as (_, owner):

        async def open_one(**fields: Any) -> httpx.Response:
            return await owner.client.post("/v1/rl/sessions", json=fields)

        first = (await open_one(retention_s=0.001)).json()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(open_one()) for _ in range(6)]
        answers = [task.result() for task in running]
        assert {answer.status_code for answer in answers} <= {200, 429}
        assert all(answer.json()["error"]["code"] == "session_limit" for answer in answers if answer.status_code == 429)
        assert sum(answer.status_code == 200 for answer in answers) <= 2
        while (answer := await open_one()).status_code == 200:
            pass
        assert "has 3 sessions" in answer.text
        assert (await owner.read(first))["is_open"]
        await owner.client.delete(f"/v1/rl/sessions/{first['id']}")

        async def opened() -> int:
            return (await open_one()).status_code

        await until(opened, 200)
        assert (await owner.client.get(f"/v1/rl/sessions/{first['id']}")).status_code == 404
        assert (await open_one()).status_code == 429


async def test_a_reward_that_cannot_be_stored_has_the_code_of_its_reason(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the session is gone or the bucket is full when the owner writes, the answer is that of a turn, and not 502."""
    async with serve() as (_, owner):
        session = await owner.open()

        async def change(*_: Any) -> None:
            raise SessionError("session_limit", "the bucket of sessions is full")

        monkeypatch.setattr(SessionStore, "change", change)
        path = f"/v1/rl/sessions/{session['id']}"
        for answer in (
            await owner.client.post(f"{path}/rewards", json={"reward": 1.0}),
            await owner.client.delete(path),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "session_limit")

"""The invariants that hold after every test and fault, as checks.

I1 to I3 are of results, I4 and I5 of what workers said to commands, I6 to I8 of what is left behind.

async with observing(server.url, fleet) as observer:
    async with ...workers and clients...:
        ...
        check_results(results, requests)
        await observer.check_at_rest()
# here: no task, thread, connection or subscription is left
"""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from nats import errors as nats_errors
from nats.aio.msg import Msg

from rollbus.bus.client.generation import Generation
from rollbus.bus.nats.connection import Connection, publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.messages import decode_presence
from rollbus.schemas.presence import WorkerPresence
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import expected_rows
from tests.support.connections import opened
from tests.support.control_history import ControlHistory
from tests.support.fleet import check_generation
from tests.support.patience import SOON_S, patient
from tests.support.waits import until

__all__ = ["Observer", "assert_equal", "check_results", "check_stream", "observing"]

ANSWER_S = patient(6.0)
"""For one answer of JetStream: a cluster's list of consumers takes 4 s where one has no leader."""
SOON_AFTER_S = 0.25
"""For the answers of other servers of a cluster on the same machine."""
ARRAYS = (
    "token_ids",
    "logprobs",
    "weight_versions",
    "lora_versions",
    "routed_experts",
    "top_token_ids",
    "top_logprobs",
    "prompt_logprobs",
    "prompt_top_token_ids",
    "prompt_top_logprobs",
)


def check_results(results: Sequence[Generation], requests: Iterable[GenerateRequest], *, legs: int = 1) -> None:
    """Each request has exactly one result, complete and by the row rule; attempts and workers fit (I1 to I3).

    Args:
        legs: how many workers may serve one attempt.
    """
    by_id = {request.request_id: request for request in requests}

    assert Counter(result.request_id for result in results) == Counter(list(by_id))
    for result in results:
        request = by_id[result.request_id]
        children = (result, *result.siblings)
        assert [child.child for child in children] == list(range(request.sampling.n))
        for child in children:
            check_generation(child, request, routing=request.return_routed_experts is not False)
            assert 1 <= len(child.worker_ids) <= legs * child.attempts


def assert_equal(received: Generation, expected: Generation) -> None:
    """Both are the same byte for byte, siblings included; how they came about may differ."""
    assert (received.finish_reason, received.stop_reason) == (expected.finish_reason, expected.stop_reason)
    for name in ARRAYS:
        mine, other = getattr(received, name), getattr(expected, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype, name
            np.testing.assert_array_equal(mine, other, err_msg=name)
    masks, others = received.sampling_mask, expected.sampling_mask
    assert (masks is None) == (others is None)
    if masks is not None and others is not None:
        np.testing.assert_array_equal(masks.counts, others.counts)
        np.testing.assert_array_equal(masks.token_ids, others.token_ids)
    for mine, other in zip(received.siblings, expected.siblings, strict=True):
        assert_equal(mine, other)


def check_stream(chunks: Sequence[Chunk], request: GenerateRequest) -> None:
    """The chunks of each child are numbered without a gap, end once, and bring rows with their tokens (I1 to I3)."""
    assert {chunk.child for chunk in chunks} == set(range(request.sampling.n))
    for child in range(request.sampling.n):
        _check_child([chunk for chunk in chunks if chunk.child == child], request)


def _check_child(chunks: Sequence[Chunk], request: GenerateRequest) -> None:
    start = position = request.routed_experts_prompt_start
    attempt = num_tokens = 0
    for index, chunk in enumerate(chunks):
        assert chunk.chunk_index == index
        assert chunk.attempt >= attempt
        attempt = chunk.attempt
        num_tokens += chunk.num_tokens
        if chunk.routed_experts is not None:
            assert chunk.routed_experts.start == position
            position += chunk.routed_experts.shape[0]
        if num_tokens and request.return_routed_experts is not False:
            assert position - start >= expected_rows(request.prompt_len, start, num_tokens)
        assert (chunk.end is not None) == (index == len(chunks) - 1)
    end = chunks[-1].end
    assert end is not None
    assert (end.num_tokens, end.num_rows) == (num_tokens, position - start)


@contextlib.asynccontextmanager
async def observing(url: str, fleet: str, *, num_servers: int = 1) -> AsyncIterator["Observer"]:
    """Look at a fleet from outside; on leaving, nothing of what the block began is left (I7), nor was dropped (I8).

    Of commands that were given in the block, workers have kept what they said (I4, I5).

    Args:
        num_servers: of the cluster at `url`, all of which must run whenever the observer is asked. Messages of several
            servers have no common order, and some are not heard: nothing is said of I4 and I5 there.
    """
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    async with opened(url) as connection:
        observer = Observer(connection, fleet, num_servers)
        await observer.listen()
        yield observer
        assert num_servers > 1 or observer.history.problems == [], observer.history.problems
        await until(observer.connections, [])
        assert await observer.num_slow_consumers() == 0

    async def tasks_left() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() - tasks]

    async def threads_left() -> list[str]:
        # What `asyncio.to_thread` uses stays with its event loop, and idles.
        return [
            thread.name for thread in set(threading.enumerate()) - threads if not thread.name.startswith("asyncio_")
        ]

    await until(tasks_left, [])
    await until(threads_left, [])


class Observer:
    """What the server and the workers say about one fleet; made by `observing`."""

    def __init__(self, connection: Connection, fleet: str, num_servers: int) -> None:
        self._nats = connection
        self._num_servers = num_servers
        self._subjects = Subjects(fleet)
        self._root = self._subjects.ping.removesuffix("ping")
        self._hears_frames = False
        self.history = ControlHistory()
        """What was heard of commands."""

    async def listen(self) -> None:
        """Hear of commands from now on, and of frames once there was one: most fleets are given none."""
        receive = self._nats._process_msg

        async def note(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
            self.history.take(subject.decode(), data)
            await receive(sid, subject, reply, data, headers)

        # Here messages still are in the order in which they came; handlers have one of their own for each subscription.
        self._nats._process_msg = note  # type: ignore[method-assign]
        for kind in ("control.*", "ack.*.*"):
            await subscribe(self._nats, f"{self._root}{kind}", self._hear_frames)
        await subscribe(self._nats, f"$KV.rollbus.{self._subjects.fleet}.*", self._hear_frames)
        assert await self._nats.confirm(timeout_s=SOON_S)

    async def _hear_frames(self, _message: Msg) -> None:
        if not self._hears_frames:
            self._hears_frames = True
            for kind in ("frame.*.*", "plain.>"):
                await subscribe(self._nats, f"{self._root}{kind}", _ignore)

    async def check_at_rest(self) -> None:
        """Once all requests have ended: nothing waits or is in hand, and no worker works or holds anything (I6, I7).

        No worker owes an answer to a command (I5).
        """
        await until(self.queued, {})
        await until(self.busy_workers, {})
        await until(self.unanswered, [])

    async def unanswered(self) -> list[str]:
        """Commands that a worker has accepted, and said nothing final of."""
        return self.history.unanswered({presence.incarnation for presence in (await self.presences()).values()})

    async def queued(self) -> dict[str, Mapping[str, int]]:
        """By stream and consumer, what is in it; those without are left out. Every stream is within its bounds (I6)."""
        found: dict[str, Mapping[str, int]] = {}
        names = await self._ask("$JS.API.STREAM.NAMES", {"subject": f"{self._root}>"})
        for name in names["streams"] or []:
            stream = await self._ask(f"$JS.API.STREAM.INFO.{name}")
            config, state = stream["config"], stream["state"]
            assert 0 < config["max_msgs"] >= state["messages"]
            # Where the disk is too small for its bound, the server's own bound holds.
            assert config["max_bytes"] == -1 or 0 < config["max_bytes"] >= state["bytes"]
            if state["messages"]:
                found[name] = {"messages": state["messages"]}
            listing = await self._ask(f"$JS.API.CONSUMER.LIST.{name}")
            for consumer in listing["consumers"] or []:
                counts = {key: consumer[key] for key in ("num_pending", "num_ack_pending") if consumer[key]}
                if counts:
                    found[f"{name} {consumer['name']}"] = counts
        return found

    async def busy_workers(self) -> dict[str, tuple[int, int]]:
        """Requests in flight and bytes held, by worker; those with neither are left out."""
        presences = await self.presences()
        return {
            worker: (presence.in_flight, presence.held_bytes)
            for worker, presence in presences.items()
            if presence.in_flight or presence.held_bytes
        }

    async def presences(self) -> dict[str, WorkerPresence]:
        """What each worker that is connected says now."""
        found: dict[str, WorkerPresence] = {}
        changed = asyncio.Event()

        async def take(message: Msg) -> None:
            presence = decode_presence(message.data)
            found[presence.worker] = presence
            changed.set()

        subscription = await subscribe(self._nats, self._subjects.presences, take)
        try:
            await publish(self._nats, self._subjects.ping, b"")
            async with asyncio.timeout(SOON_S):
                while await self.workers() - set(found):
                    await changed.wait()
                    changed.clear()
        finally:
            await subscription.unsubscribe()
        return found

    async def workers(self) -> set[str]:
        """Workers that are connected, by the names of their subscriptions."""
        links = self._subjects.links_to("x").removesuffix("x")
        connections = await self._list_connections()
        subjects = [subject for connection in connections for subject in connection.get("subscriptions_list") or []]
        return {subject.removeprefix(links) for subject in subjects if subject.startswith(links)}

    async def connections(self) -> list[str]:
        """The names of connections that have a subscription in the fleet."""
        return [
            str(connection.get("name"))
            for connection in await self._list_connections()
            if (connection["server"], connection["cid"]) != (self._nats._server_info["server_id"], self._nats.client_id)
            and any(subject.startswith(self._root) for subject in connection.get("subscriptions_list") or [])
        ]

    async def pending_bytes(self, name: str) -> int:
        """What lies in the server for the connections with `name` in their names."""
        found = [connection for connection in await self._list_connections() if name in str(connection.get("name"))]
        return sum(int(connection["pending_bytes"]) for connection in found)

    async def num_slow_consumers(self) -> int:
        """Connections that the server gave up for being slow, since its start: each means dropped messages."""
        # Servers without a connection of the account do not answer.
        answers = await self._ask_servers("$SYS.REQ.ACCOUNT.PING.STATZ", num_wanted=1)
        return sum(
            int(account["slow_consumers"]) for stats in answers for account in stats["data"]["account_statz"] or ()
        )

    async def _list_connections(self) -> list[dict[str, Any]]:
        answers = await self._ask_servers("$SYS.REQ.SERVER.PING.CONNZ", {"subscriptions": True})
        return [
            {**connection, "server": answer["server"]["id"]}
            for answer in answers
            for connection in answer["data"]["connections"] or ()
        ]

    async def _ask_servers(
        self, subject: str, question: object = None, *, num_wanted: int | None = None
    ) -> list[dict[str, Any]]:
        """The answers of all servers of the cluster; of some, with `num_wanted`, those that come soon after these."""
        num_wanted = num_wanted or self._num_servers
        answers: list[dict[str, Any]] = []
        has_all = asyncio.Event()

        async def take(message: Msg) -> None:
            answers.append(json.loads(message.data))
            if len(answers) >= num_wanted:
                has_all.set()

        inbox = self._nats.new_inbox()
        subscription = await subscribe(self._nats, inbox, take)
        try:
            await publish(self._nats, subject, b"" if question is None else json.dumps(question).encode(), reply=inbox)
            async with asyncio.timeout(SOON_S):
                await has_all.wait()
            if num_wanted < self._num_servers:
                await asyncio.sleep(SOON_AFTER_S)
        finally:
            await subscription.unsubscribe()
        return answers

    async def _ask(self, subject: str, question: object = None) -> dict[str, Any]:
        payload = b"" if question is None else json.dumps(question).encode()
        async with asyncio.timeout(SOON_S):
            while True:
                # A cluster leaves unanswered what comes while it elects a leader.
                with contextlib.suppress(nats_errors.TimeoutError):
                    answer = await self._nats.request(subject, payload, timeout=ANSWER_S)
                    break
        found: dict[str, Any] = json.loads(answer.data)
        assert "error" not in found, found["error"]
        return found


async def _ignore(_message: Msg) -> None:
    """The history has taken it."""

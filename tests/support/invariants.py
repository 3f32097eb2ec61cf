"""Checks of the invariants that hold after every test and fault.

I1 to I3 concern results, I4 and I5 concern the acks of workers to commands, and I6 to I8 concern leftovers.

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
from tests.support.control_history import ControlHistory
from tests.support.fleet import check_generation
from tests.support.nats_server import opened
from tests.support.patience import SOON_S, patient
from tests.support.waits import until

ANSWER_S = patient(6.0)
"""Timeout of one JetStream answer: a cluster needs 4 s to list consumers if one has no leader."""
SOON_AFTER_S = 0.25
"""Wait for the answers of the other servers of a cluster on the same machine."""
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
    """Assert that each request has one complete result with valid rows, attempts and workers (I1 to I3).

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
    """Assert that both results and their siblings are byte for byte equal; attempts and workers may differ."""
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
    """Assert that each child request has gapless chunks, one terminal chunk, and the rows of its tokens (I1 to I3)."""
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
    assert (end.num_tokens, end.num_rows) == (num_tokens, position - start)


@contextlib.asynccontextmanager
async def observing(url: str, fleet: str, *, num_servers: int = 1) -> AsyncIterator["Observer"]:
    """Observe a fleet from outside and check its invariants at the end of the block.

    At the end no task, thread or connection of the block is left (I7), and the server has dropped no message (I8). For
    the commands of the block, workers acted as their acks state (I4, I5).

    Args:
        num_servers: servers of the cluster at `url`. All must run at each query of the observer. With more than one
            server, I4 and I5 are not checked: messages of several servers have no common order, and the observer does
            not receive all.
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
        # The threads of `asyncio.to_thread` stay idle until their event loop closes.
        return [
            thread.name for thread in set(threading.enumerate()) - threads if not thread.name.startswith("asyncio_")
        ]

    await until(tasks_left, [])
    await until(threads_left, [])


class Observer:
    """Queries the server and the workers about one fleet; `observing` creates it."""

    def __init__(self, connection: Connection, fleet: str, num_servers: int) -> None:
        self._nats = connection
        self._num_servers = num_servers
        self._subjects = Subjects(fleet)
        self._root = self._subjects.ping.removesuffix("ping")
        self._is_subscribed_to_frames = False
        self.history = ControlHistory()
        """The observed commands, acks and frames."""

    async def listen(self) -> None:
        """Record commands from now on, and frames after the first command: most fleets receive no command."""
        receive = self._nats._process_msg

        async def note(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
            self.history.take(subject.decode(), data)
            await receive(sid, subject, reply, data, headers)

        # Here the messages still have their order of arrival; each subscription has a separate handler.
        self._nats._process_msg = note  # type: ignore[method-assign]
        for kind in ("control.*", "ack.*.*"):
            await subscribe(self._nats, f"{self._root}{kind}", self._subscribe_to_frames)
        await subscribe(self._nats, f"$KV.rollbus.{self._subjects.fleet}.*", self._subscribe_to_frames)
        assert await self._nats.confirm(timeout_s=SOON_S)

    async def _subscribe_to_frames(self, _message: Msg) -> None:
        if not self._is_subscribed_to_frames:
            self._is_subscribed_to_frames = True
            for kind in ("frame.*.*", "plain.>"):
                await subscribe(self._nats, f"{self._root}{kind}", _ignore)

    async def check_at_rest(self) -> None:
        """Wait until no queue holds a request and no worker has requests or buffered bytes (I6, I7).

        Wait also until each accepted command has its final ack (I5).
        """
        await until(self.queued, {})
        await until(self.busy_workers, {})
        await until(self.unanswered, [])

    async def unanswered(self) -> list[str]:
        """Return the commands that a worker has accepted without a final ack."""
        return self.history.unanswered({presence.incarnation for presence in (await self.presences()).values()})

    async def queued(self) -> dict[str, Mapping[str, int]]:
        """Return the counts of non-empty streams and consumers; assert that each stream is within its bounds (I6)."""
        found: dict[str, Mapping[str, int]] = {}
        names = await self._ask("$JS.API.STREAM.NAMES", {"subject": f"{self._root}>"})
        for name in names["streams"] or []:
            stream = await self._ask(f"$JS.API.STREAM.INFO.{name}")
            config, state = stream["config"], stream["state"]
            assert 0 < config["max_msgs"] >= state["messages"]
            # If the disk is too small for the bound of the stream, the server's own bound applies.
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
        """Return the requests in flight and the held bytes of each worker that has any."""
        presences = await self.presences()
        return {
            worker: (presence.in_flight, presence.held_bytes)
            for worker, presence in presences.items()
            if presence.in_flight or presence.held_bytes
        }

    async def presences(self) -> dict[str, WorkerPresence]:
        """Ping the workers and return the presence of each connected worker."""
        found: dict[str, WorkerPresence] = {}
        changed = asyncio.Event()

        async def receive(message: Msg) -> None:
            presence = decode_presence(message.data)
            found[presence.worker] = presence
            changed.set()

        subscription = await subscribe(self._nats, self._subjects.presences, receive)
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
        """Return the names of connected workers, as their subscriptions show them."""
        links = self._subjects.links_to("x").removesuffix("x")
        connections = await self._list_connections()
        subjects = [subject for connection in connections for subject in connection.get("subscriptions_list") or []]
        return {subject.removeprefix(links) for subject in subjects if subject.startswith(links)}

    async def connections(self) -> list[str]:
        """Return the names of all other connections with a subscription in the fleet."""
        return [
            str(connection.get("name"))
            for connection in await self._list_connections()
            if (connection["server"], connection["cid"]) != (self._nats._server_info["server_id"], self._nats.client_id)
            and any(subject.startswith(self._root) for subject in connection.get("subscriptions_list") or [])
        ]

    async def pending_bytes(self, name: str) -> int:
        """Return the bytes that the server buffers for connections whose names contain `name`."""
        found = [connection for connection in await self._list_connections() if name in str(connection.get("name"))]
        return sum(int(connection["pending_bytes"]) for connection in found)

    async def num_slow_consumers(self) -> int:
        """Return the number of connections that the server closed as slow consumers; each closed one lost messages."""
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
        """Return the answers of all servers; with `num_wanted`, wait for this number and then briefly for more."""
        num_wanted = num_wanted or self._num_servers
        answers: list[dict[str, Any]] = []
        has_all = asyncio.Event()

        async def receive(message: Msg) -> None:
            answers.append(json.loads(message.data))
            if len(answers) >= num_wanted:
                has_all.set()

        inbox = self._nats.new_inbox()
        subscription = await subscribe(self._nats, inbox, receive)
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
                # A cluster does not answer a request during a leader election.
                with contextlib.suppress(nats_errors.TimeoutError):
                    answer = await self._nats.request(subject, payload, timeout=ANSWER_S)
                    break
        found: dict[str, Any] = json.loads(answer.data)
        assert "error" not in found, found["error"]
        return found


async def _ignore(_message: Msg) -> None:
    """Ignore the message, which the history has already recorded."""

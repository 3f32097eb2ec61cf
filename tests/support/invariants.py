"""Checks of the invariants that hold after every test and fault.

- I1: a request ends once (P1). I2: its chunks have no gaps (P33). I3: it has the rows of its tokens (P14).
- I4: pauses and versions are as acked (P77, P16). I5: a command has one final ack (P18, P73).
- I6: each buffer stays within its bound (P61). I7: nothing is left at the end (P38). I8: drops are counted (P39).

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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nats import errors as nats_errors
from nats.aio.msg import Msg

from rollbus.bus.client.generation import Generation
from rollbus.bus.nats.connection import Connection, publish, subscribe
from rollbus.bus.protocol.fleet.desired import effective
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.control import DesiredState
from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import Frame, decode_ack, decode_command, decode_desired, decode_frame, decode_presence
from rollbus.schemas.presence import WorkerPresence
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import expected_rows
from tests.support.fleet import check_generation
from tests.support.nats_server import opened
from tests.support.waits import SOON_S, patient, until

# A history of commands, acks and frames, which checks that workers act as their acks state (I4, I5).

PAUSE, WEIGHTS = "pause", "weights"
REGISTERS = {"pause": PAUSE, "update_weights": WEIGHTS, "finish_weight_update": WEIGHTS}
"""The register of each command that limits the frames of a worker after the worker has applied it."""
REFUSED = "unreadable"
"""The command name in the ack of a worker that could not decode the command."""


@dataclass
class Promise:
    """A command that a worker has acked as applied and that no later command has overtaken."""

    ack: Ack
    register: str
    links: dict[str, int] = field(default_factory=dict)
    """Number of frames sent before the ack, by `<client>/<incarnation>`. A worker may send these frames again."""


class ControlHistory:
    """Receives all command messages, acks and frames of one fleet in the server's order.

    When a later command or a write of the desired state arrives, the promise of the earlier command ends. So the
    history reports no false violation, but it checks nothing between that moment and the next ack.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        """Violations in readable form; empty if all workers acted as their acks state."""
        self._accepted: dict[tuple[str, str, str], str] = {}
        self._finals: dict[tuple[str, str, str], Ack] = {}
        self._promises: dict[tuple[str, str], Promise] = {}
        self._desired: dict[str, DesiredState] = {}
        self._numbers: dict[str, dict[str, int]] = {}

    @property
    def num_answered(self) -> int:
        """Number of commands with a final ack, counted for each incarnation of each worker."""
        return len(self._finals)

    def unanswered(self, incarnations: set[str]) -> list[str]:
        """Return the accepted commands of these incarnations without a final ack, as worker and command name."""
        return sorted(
            f"{worker} {command}"
            for (worker, incarnation, command_id), command in self._accepted.items()
            if incarnation in incarnations and (worker, incarnation, command_id) not in self._finals
        )

    def take(self, subject: str, data: bytes) -> None:
        """Record a message; ignore it if it cannot be decoded."""
        tokens = subject.split(".")
        try:
            if tokens[0] == "$KV":
                self._add_desired(data)
            elif len(tokens) < 5:
                return  # answers to requests of the observer itself
            elif tokens[3] == "control":
                self._add_command(data)
            elif tokens[3] == "ack":
                self._add_ack(decode_ack(data))
            elif tokens[3] == "frame":
                self._add_frame(tokens[4], decode_frame(data))
            elif tokens[3] == "plain":
                self._add_frame("", decode_frame(data))
        except (InvalidRequest, RemoteProtocolError):
            return

    def _add_command(self, data: bytes) -> None:
        command = decode_command(data)
        for key, promise in list(self._promises.items()):
            ack = promise.ack
            is_meant = command.model in (None, ack.model) and ack.worker in (command.workers or (ack.worker,))
            is_news = (ack.worker, ack.incarnation, command.id) not in self._finals
            if command.register == promise.register and is_meant and is_news:
                del self._promises[key]

    def _add_desired(self, data: bytes) -> None:
        try:
            state = decode_desired(data)
        except RemoteProtocolError:
            self._promises.clear()  # deleted or invalid: the behavior of the workers is undefined
            return
        self._desired[state.model] = state
        for key, promise in list(self._promises.items()):
            recorded = effective(state, promise.ack.worker).get(promise.register)
            if promise.ack.model == state.model and (recorded is None or recorded.command.id != promise.ack.id):
                del self._promises[key]

    def _add_ack(self, ack: Ack) -> None:
        key = ack.worker, ack.incarnation, ack.id
        final = self._finals.get(key)
        if ack.status is AckStatus.ACCEPTED:
            self._accepted[key] = ack.command
        if not ack.status.is_final:
            if final is not None:
                self.problems.append(f"{ack.worker} said {ack.status} of {ack.command} after {final.status} (I5)")
            return
        if final is None:
            self._finals[key] = ack
        elif ack != final and (ack.command != REFUSED or ack.error != final.error):
            self.problems.append(f"{ack.worker} said {ack.status} of {ack.command} after {final.status} (I5)")
        register = REGISTERS.get(ack.command)
        if final is not None or ack.status is not AckStatus.APPLIED or register is None:
            return
        if not self._is_overtaken(ack, register):
            sent = {**self._numbers.get(ack.incarnation, {}), **(ack.frames or {})}
            self._promises[ack.incarnation, register] = Promise(ack, register, sent)

    def _is_overtaken(self, ack: Ack, register: str) -> bool:
        """Return True if a later command was recorded before this ack.

        The worker may already have read the later command from the desired state.
        """
        state = self._desired.get(ack.model)
        recorded = None if state is None else effective(state, ack.worker).get(register)
        return recorded is not None and ack.epoch is not None and recorded.epoch > ack.epoch

    def _add_frame(self, client: str, frame: Frame) -> None:
        link = f"{client}/{frame.client_incarnation}"
        numbers = self._numbers.setdefault(frame.incarnation, {})
        numbers[link] = max(numbers.get(link, 0), frame.number + 1)
        versions = {chunk.weight_version for chunk in frame.chunks if chunk.num_tokens}
        if not versions:
            return
        for register in (PAUSE, WEIGHTS):
            promise = self._promises.get((frame.incarnation, register))
            if promise is None or frame.number < promise.links.get(link, 0):
                continue
            ack = promise.ack
            if register == PAUSE:
                self.problems.append(f"{ack.worker} published tokens in frame {frame.number} while paused (I4)")
            elif versions != {ack.weight_version}:
                self.problems.append(
                    f"{ack.worker} published tokens of versions {sorted(versions)} in frame {frame.number} after its "
                    f"update to {ack.weight_version} (I4)"
                )


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

"""Command acks of workers that are lost, late, stale, repeated or forged, and workers that die before they answer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from rollbus.bus.auth.credentials import Role, User
from rollbus.bus.auth.permissions import rules
from rollbus.bus.control import controller
from rollbus.bus.control import store as module
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats import jetstream
from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.failures import Denials
from rollbus.bus.nats.jetstream import ApiError, Unanswered, put
from rollbus.bus.protocol.fleet import desired
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import AnyCommand, DesiredState, FlushCache, Pause, Resume
from rollbus.schemas.errors import BusBroken, InvalidRequest, PermissionDenied
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerState
from tests.support.hand_control import ACCEPTED, APPLIED, controlled, silent
from tests.support.nats_server import opened
from tests.support.requests import incomplete
from tests.support.tcp_proxy import tcp_proxy


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat commands soon, and wait for answers exactly as long as the command allows."""
    monkeypatch.setattr(controller, "REPEAT_S", 0.1)
    monkeypatch.setattr(controller, "MARGIN_S", 0.0)


@pytest.mark.proves("P76")
async def test_a_worker_that_stops_before_its_ack_is_missing_immediately(nats_url: str, fleet: str) -> None:
    """If a worker stops before it answers, the command ends without waiting for its timeout.

    The command result states the reason and includes the other workers.
    """
    async with controlled(nats_url, fleet, "a", "b") as control, asyncio.TaskGroup() as tasks:
        control["b"].reply = lambda _: (ACCEPTED,)
        pausing = tasks.create_task(incomplete(control.rb.fleet.pause(timeout_s=50)))
        await control["b"].waiting.get()
        await control["b"].announce(WorkerState.STOPPED)
        error = await pausing

        assert error.ledger.missing == {"b": "it is stopped"}
        assert set(error.ledger.applied) == {"a"}
        assert error.ledger.seconds < 50


@pytest.mark.usefixtures("brief")
async def test_a_lost_command_is_repeated_to_workers_without_a_final_ack(nats_url: str, fleet: str) -> None:
    """Workers without a final ack receive the command again with the same id and epoch.

    Workers with a final ack do not.
    """
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = lambda _: (ACCEPTED, APPLIED) if len(control["b"].heard) > 2 else ()
        ledger = await control.rb.fleet.pause()
        repeats = control["b"].heard

        assert ledger.is_complete
        assert len(control["a"].heard) == 1
        assert {(command.id, command.epoch) for command in repeats} == {(ledger.id, 1)}
        assert [command.workers for command in repeats] == [None, ("b",), ("b",)]


async def test_invalid_acks_and_acks_for_other_workers_are_ignored(nats_url: str, fleet: str) -> None:
    """The controller counts acks that do not decode or that name another worker, and ignores them."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        subjects = control["a"].subjects

        async def noise(command: AnyCommand) -> None:
            await control.nats.publish(subjects.ack("me", "a"), b"garbage")
            forged = Ack(
                id=command.id, command="pause", worker="b", incarnation="life-1", model="m", status=AckStatus.FAILED
            )
            await control.nats.publish(subjects.ack("me", "a"), encode_json(forged))
            await control["a"].ack(command, **APPLIED)

        control["a"].reply = silent
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(control.rb.fleet.pause())
            await noise(await control["a"].waiting.get())

        assert pausing.result().is_complete
        assert control.rb.fleet.bad_messages == 2


async def test_a_command_that_is_sent_again_keeps_its_epoch(nats_url: str, fleet: str) -> None:
    """A command that is sent again keeps its epoch. While it is open, it cannot be sent again."""
    async with controlled(nats_url, fleet, "a") as control:
        command = FlushCache(id="once")
        first = await control.rb.fleet.send(command)
        second = await control.rb.fleet.send(command)
        assert first.epochs == second.epochs == {"m": 1}

        control["a"].reply = silent
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(control.rb.fleet.send(FlushCache(id="slow")))
            while (heard := await control["a"].waiting.get()).id != "slow":
                pass
            with pytest.raises(InvalidRequest, match="id is slow, the id of an open command"):
                await control.rb.fleet.send(FlushCache(id="slow"))
            await control["a"].ack(heard, **APPLIED)
        assert running.result().is_complete


async def test_on_ack_receives_each_new_ack_once_and_in_order(nats_url: str, fleet: str) -> None:
    """`on_ack` receives each new ack once and in order. An error that it raises reaches the caller."""
    heard: list[tuple[str, str | None]] = []
    async with controlled(nats_url, fleet, "a") as control:
        loading = {"status": AckStatus.PROGRESS, "stage": "loading"}
        control["a"].reply = lambda _: (ACCEPTED, ACCEPTED, loading, loading, APPLIED, APPLIED)
        await control.rb.fleet.pause(on_ack=lambda ack: heard.append((ack.status, ack.stage)))
        assert heard == [("accepted", None), ("progress", "loading"), ("applied", None)]

        def fail(ack: Ack) -> None:
            raise ZeroDivisionError(ack.worker)

        with pytest.raises(ZeroDivisionError):
            await control.rb.fleet.pause(on_ack=fail)
        assert (await control.rb.fleet.resume()).is_complete


async def test_a_recorded_command_stays_after_its_caller_is_cancelled(nats_url: str, fleet: str) -> None:
    """If the caller is cancelled, the recorded command stays, and the client remains usable."""
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = silent
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(control.rb.fleet.pause())
            command = await control["a"].waiting.get()
            pausing.cancel()
        state = await control.store.read("m")

        assert state.registers["pause"].command.id == command.id
        control["a"].reply = lambda _: (APPLIED,)
        assert (await control.rb.fleet.resume()).is_complete


@pytest.mark.usefixtures("brief")
async def test_acks_that_were_missed_in_an_outage_are_requested_again(nats_url: str, fleet: str) -> None:
    """A controller that is disconnected while its workers answer sends the command again after the reconnect."""
    async with tcp_proxy(nats_url) as proxy, controlled(nats_url, fleet, "a", "b", client_url=proxy.url) as control:
        for name in ("a", "b"):
            control[name].reply = silent
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(control.rb.fleet.pause())
            heard = {name: await control[name].waiting.get() for name in ("a", "b")}
            proxy.cut()
            for name, command in heard.items():
                await control[name].ack(command, **APPLIED)
                control[name].reply = lambda _: (APPLIED,)
            await proxy.restore()

        assert set(pausing.result().applied) == {"a", "b"}
        assert {command.epoch for worker in control.workers.values() for command in worker.heard} == {1}


# Each command is recorded once, even if its write gets no answer, for example after the loss of a leader.


Write = Callable[[], Awaitable[int]]
MODEL = "m"


class Leader:
    """A replacement for `put` that handles the next writes as `fates` state, and then forwards writes to the server."""

    def __init__(self, *fates: str) -> None:
        self.fates = list(fates)
        self._later: Write | None = None

    async def put(
        self,
        nats: Connection,
        subject: str,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Write as `rollbus.bus.nats.jetstream.put` does, unless the next fate differs."""

        async def write() -> int:
            return await put(nats, subject, data, headers, timeout_s=timeout_s)

        fate = self.fates.pop(0) if self.fates else ""
        later, self._later = self._later, None
        if later is not None:
            # The next leader first decides about the write that the previous leader had forwarded.
            with contextlib.suppress(ApiError):
                await later()
        if fate == "answer lost":
            await write()
        elif fate == "stored later":
            self._later = write
        elif fate == "another was first":
            # The leader answers with this error while another write is in progress in the cluster.
            raise ApiError(10164, "wrong last sequence")
        elif not fate:
            return await write()
        raise Unanswered(f"{fate}: for the test")


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Leader:
    """Return a leader in front of all stores, and let stores retry immediately."""
    made = Leader()
    monkeypatch.setattr(module, "put", made.put)
    monkeypatch.setattr(jetstream, "AGAIN_S", 0.0)
    return made


@pytest.mark.proves("P73")
@pytest.mark.parametrize(
    "fates",
    [
        ["answer lost"],
        ["write lost"],
        ["stored later"],
        ["write lost", "stored later", "answer lost"],
        ["stored later", "stored later"],
        ["another was first"],
        ["stored later", "another was first"],
    ],
    ids="+".join,
)
async def test_a_command_without_an_answer_is_recorded_once(
    nats_url: str, fleet: str, leader: Leader, fates: list[str]
) -> None:
    """Whether or not the write was stored, the command is recorded once and decided on the state before it."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        await store.record(MODEL, Resume(id="before"))
        leader.fates = list(fates)
        befores: list[int] = []

        def change(state: DesiredState) -> DesiredState:
            befores.append(state.epoch)
            return desired.record(state, Pause(id="p"))[0]

        written = await store.change(MODEL, change)
        state, epoch = await store.record(MODEL, FlushCache(id="after"))

        assert set(befores) == {1}
        assert written.epoch == 2
        assert [(seen.id, seen.epoch) for seen in state.seen] == [("before", 1), ("p", 2), ("after", 3)]
        assert epoch == 3


async def test_a_command_is_recorded_after_another_command_if_its_write_was_lost(
    nats_url: str, fleet: str, leader: Leader
) -> None:
    """If the write is lost and another command is recorded first, the command is recorded after the other command."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        leader.fates = ["write lost"]
        is_first = True

        async def other(*args: object, **options: object) -> int:
            nonlocal is_first
            try:
                return await leader.put(*args, **options)  # type: ignore[arg-type]
            except Unanswered:
                if is_first:
                    is_first = False
                    await store.record(MODEL, Resume(id="other"))
                raise

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(module, "put", other)
            state, epoch = await store.record(MODEL, Pause(id="p"))

        assert [(seen.id, seen.epoch) for seen in state.seen] == [("other", 1), ("p", 2)]
        assert epoch == 2


@pytest.mark.parametrize("fate", ["answer lost", "write lost", "stored later"])
async def test_a_reset_without_an_answer_is_done_once(nats_url: str, fleet: str, leader: Leader, fate: str) -> None:
    """A reset without an answer clears the state once, in one epoch, and returns True."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        await store.record(MODEL, Pause())
        leader.fates = [fate]

        assert await store.reset(MODEL)
        state = await store.read(MODEL)
        assert (state.epoch, state.registers) == (2, {})


@pytest.mark.parametrize(
    ("fate", "problem"), [("write lost", "for the test"), ("another was first", "another write is on its way")]
)
async def test_the_wait_for_an_answer_to_a_write_is_bounded(
    nats_url: str, fleet: str, leader: Leader, monkeypatch: pytest.MonkeyPatch, fate: str, problem: str
) -> None:
    """If the server answers no write within the time of an election, the store raises an error with the reason."""
    monkeypatch.setattr(jetstream, "ELECTION_S", 0.05)
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        leader.fates = [fate] * 100_000
        with pytest.raises(BusBroken, match=problem):
            await store.record(MODEL, Pause())


# How a denial by the server reaches the task that waits for it.


SUBJECT = "$JS.API.STREAM.CREATE.rb"
WORDS = f'Permissions Violation for Publish to "{SUBJECT}"'


async def publish(denials: Denials) -> None:
    """Wait for an answer that never arrives."""
    async with denials.expected(SUBJECT):
        await asyncio.sleep(60)


async def test_each_of_two_concurrent_publications_receives_its_own_denial() -> None:
    """Each of two concurrent publications receives its own denial, also if the block of the first has ended by then."""
    denials = Denials(None)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(refused(denials)) for _ in range(2)]
        await asyncio.sleep(0)
        assert denials.add(WORDS) is None
        await asyncio.wait(waiting[:1])
        assert not waiting[1].done()
        assert denials.add(WORDS) is None

    assert denials.first is None


async def test_a_denial_without_a_waiting_block_is_returned() -> None:
    """`add` returns a denial for which no block waits: another subject, or a block that has ended."""
    denials = Denials(None)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await publish(denials)
    denial = denials.add(WORDS)

    assert denial is denials.first
    assert (denial.action, denial.subject) == ("publish", SUBJECT)


async def refused(denials: Denials) -> None:
    """Wait until the publication is denied."""
    with pytest.raises(PermissionDenied, match="a user without credentials may not publish on"):
        await publish(denials)


USER = User(fleet="F", role=Role.VIEWER, name="v", public_key="K")


@pytest.mark.parametrize(
    ("role", "action", "subject", "text"),
    [
        (
            Role.VIEWER,
            "publish",
            "rb.v1.F.req.v.m.normal",
            "send requests; roles that may: trainer, publisher, frontend",
        ),
        (Role.VIEWER, "publish", "rb.v1.F.req.~probe.m.low", "probe queues; roles that may: admin"),
        (Role.TRAINER, "publish", "rb.v1.F.req.other.m.low", "send requests under this name or for this model"),
        (Role.WORKER, "publish", "$KV.rollbus.F.m", "record commands; roles that may: frontend, admin"),
        (Role.VIEWER, "subscribe", "x.y", "subscribe to x.y"),
        (Role.VIEWER, "subscribe", ">", "subscribe to >"),
    ],
)
def test_a_denial_names_user_role_purpose_and_the_roles_that_may(
    role: Role, action: str, subject: str, text: str
) -> None:
    """A denial names the user, the role, the purpose and the roles that may. A traceback also shows the subject."""
    kind = "Publish" if action == "publish" else "Subscription"
    denial = Denials(replace(USER, role=role)).add(f'Permissions Violation for {kind} to "{subject}"')

    assert str(denial) == f"user v (role {role}) may not {text}"
    assert denial.__notes__ == [f"denied: {action} {subject}"]


def test_every_rule_has_a_purpose() -> None:
    """Each rule of the permissions states its purpose, because errors name it."""
    assert [rule.subject for rule in rules() if not rule.why] == []

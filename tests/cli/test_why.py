"""`rollbus why`: each cause with its author, its time and the next command."""

import asyncio
import json

import pytest
from msgspec.structs import replace

import rollbus
from rollbus import FleetState, QueueDepth, RequestList
from rollbus.frontend.cli.exits import CommandFailed, ExitCode
from rollbus.frontend.cli.options import check_known_model
from rollbus.frontend.cli.watch.status import of_model
from rollbus.frontend.cli.watch.why import MAX_REQUESTS, Cause, cause_lines, find_causes
from rollbus.schemas.control import DesiredState, Pause, Recorded, Sleep
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import OpenTransfer
from tests.cli.support import run_rollbus, run_together
from tests.cli.test_requests import SLOW, running
from tests.support.fleet import presence, synthetic_worker
from tests.support.requests import endless, start_stream
from tests.support.waits import until

SERVING = presence(worker="w", state=WorkerState.SERVING)
FLEET = FleetState(fleet="f", workers=(SERVING,))


def test_stops_name_their_author_and_their_end() -> None:
    """A pause and a sleep have their author, their age and the command that ends them. Their workers are no cause."""
    pause = Recorded(epoch=1, command=Pause(mode="wait"), by="http:ann", at=100.0)
    asleep = Recorded(epoch=2, command=Sleep(), by="boss", at=130.0)
    desired = DesiredState(model="m", epoch=2, registers={"pause": pause}, workers={"w": {"sleep": asleep}})
    paused = replace(SERVING, state=WorkerState.PAUSED, pause_mode="wait")

    assert find_causes(replace(FLEET, workers=(paused,), desired={"m": desired}), RequestList(), 160.0) == [
        Cause("paused (wait)", "m", 60.0, "http:ann", "rollbus resume --model m"),
        Cause("asleep", "w", 30.0, "boss", "rollbus wake --worker w"),
    ]


def test_workers_that_are_late_or_cannot_serve_are_causes() -> None:
    """A starting, failed, late or silent worker and an open transfer are causes."""
    transfer = OpenTransfer(id="t 1", by="carol", age_s=40.0, left_s=5.0, chunks=3)
    workers = (
        presence(worker="a", state=WorkerState.STARTING, uptime_s=12.0),
        presence(worker="b", state=WorkerState.POISONED, last_error="bad bytes"),
        replace(SERVING, worker="c", lease_age_s=4.0, transfer=transfer),
    )
    silent = RequestList(silent={"c": "it did not answer in time"})

    assert find_causes(replace(FLEET, workers=workers), silent, 0.0) == [
        Cause("a transfer of weights is open", "c", 40.0, "carol", "rollbus cancel-transfer --transfer 't 1'"),
        Cause("is starting", "a", 12.0, next="rollbus status"),
        Cause("is poisoned: bad bytes", "b", next="rollbus status"),
        Cause("its presence is late", "c", 4.0, next="rollbus doctor"),
        Cause("no answer: it did not answer in time", "c", next="rollbus doctor"),
    ]


def test_waiting_and_idle_requests_are_causes() -> None:
    """Requests that wait for slots or workers, and requests without a token are causes. A shell reads the ids whole."""
    queues = tuple(QueueDepth(model=model, lane="normal", waiting=7, in_hand=0) for model in ("m", "other"))
    idle = [running(f"r{n}; reboot", 60.0 - n) for n in range(MAX_REQUESTS + 5)]
    found = find_causes(replace(FLEET, queues=queues), RequestList(timelines=(*idle, running("busy", 0.5))), 0.0)

    assert [cause.of for cause in found[:2]] == ["m", "other"]
    assert found[1].cause == "7 requests wait, and no worker serves"
    assert found[2] == Cause("no token (decode at a)", "r0; reboot", 60.0, "alice", "rollbus trace 'r0; reboot'")
    assert len(found) == 2 + MAX_REQUESTS


def test_the_causes_of_one_model_are_those_of_its_workers_queues_and_commands() -> None:
    """The part of a fleet that serves a model has no worker, queue, problem or desired state of another model."""
    pause = Recorded(epoch=1, command=Pause(mode="wait"), by="ann", at=100.0)
    both = ("m", "other")
    state = FleetState(
        fleet="f",
        workers=tuple(presence(worker=f"w-{model}", model=model, state=WorkerState.FAILED) for model in both),
        queues=tuple(QueueDepth(model=model, lane="normal", waiting=1, in_hand=0) for model in both),
        queue_problems=dict.fromkeys(both, "no leader"),
        desired={model: DesiredState(model=model, epoch=1, registers={"pause": pause}) for model in both},
    )
    found = find_causes(of_model(state, "m"), None, 160.0)

    assert {cause.of for cause in found} == {"m", "w-m"}
    assert "1 request waits, and no worker serves" in [cause.cause for cause in found]
    assert len(find_causes(state, None, 160.0)) == 2 * len(found)
    with pytest.raises(CommandFailed, match="fleet f has no model nope; allowed: m, other"):
        check_known_model(state, "nope")


def test_a_fleet_without_problems_has_no_causes() -> None:
    """Serving workers and requests that make tokens are no cause, also if the requests may not be read."""
    assert find_causes(FLEET, RequestList(timelines=(running("r", 0.5),)), 0.0) == []
    assert find_causes(FLEET, None, 0.0) == []


def test_a_cause_is_a_sentence_and_a_command() -> None:
    """A cause has a line with its time and its author, and a line with the next command."""
    causes = [Cause("paused (keep)", "m", 61.4, "alice", "rollbus resume --model m"), Cause("late", "w", next="look")]
    assert list(cause_lines(causes, 80)) == [
        "m: paused (keep), for 61 s, by alice",
        "  -> rollbus resume --model m",
        "w: late",
        "  -> look",
    ]


def test_a_cause_cannot_control_the_terminal() -> None:
    """Escape sequences in names, reasons and ids of other programs are shown as text."""
    hostile = "x\x1b[2J\nrollbus: all is well"
    lines = list(cause_lines([Cause(hostile, hostile, None, hostile, hostile)], 1000))
    assert len(lines) == 2
    assert all(line.isprintable() and r"\x1b[2J\n" in line for line in lines)


async def test_why_shows_a_pause_on_one_screen(nats_url: str, fleet: str) -> None:
    """A healthy fleet has no cause. A pause is shown with its author and the request that it holds."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, client="alice") as rb,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        stream = await start_stream(tasks, rb, endless("r"))
        well = await run_rollbus(nats_url, fleet, "why")
        await rb.fleet.pause()

        async def causes() -> list[str]:
            told = json.loads((await run_rollbus(nats_url, fleet, "why", "--json")).stdout)
            return [each["cause"] for each in told["causes"]]

        await until(causes, ["paused (keep)", "no token (held by pause at w)"])
        await asyncio.sleep(1.1)  # a worker answers 20 reads within a second
        lines = ("why", "why --model synthetic", "why --model nope")
        paused, of_it, unknown = await run_together(nats_url, fleet, *lines)
        await rb.fleet.resume()
        await rb.fleet.abort(["r"])
        await stream.reading
    alone = await run_rollbus(nats_url, fleet, "why")

    assert (well.code, well.stderr) == (ExitCode.OK, "")
    assert well.stdout.startswith("1 of 1 workers serve; 1 request in flight, 0 wait\nNothing stops them.")
    assert "alice" in paused.stdout
    assert "rollbus resume --model synthetic" in paused.stdout
    assert "rollbus trace r" in paused.stdout
    assert alone.code == ExitCode.NO_WORKERS
    assert "rollbus trace r" in of_it.stdout
    assert (unknown.code, unknown.stderr) == (
        ExitCode.USAGE,
        f"rollbus: --model: fleet {fleet} has no model nope; allowed: synthetic\n",
    )

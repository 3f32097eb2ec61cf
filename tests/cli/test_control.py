"""The control commands of the CLI, with handmade workers whose acks are given by the test."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from rollbus.bus.nats.connection import publish, subscribe
from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.control import AnyCommand
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.messages import decode_command, encode_json
from tests.cli.support import rollbus, run_rollbus, run_together
from tests.support.hand_worker import HandWorker, worker_by_hand

pytestmark = pytest.mark.slow

ACCEPTED, APPLIED, FAILED, STALE = AckStatus.ACCEPTED, AckStatus.APPLIED, AckStatus.FAILED, AckStatus.STALE
APPLIES = (ACCEPTED, APPLIED)


@contextlib.asynccontextmanager
async def workers(
    nats_url: str, fleet: str, answers: Mapping[str, Sequence[AckStatus]]
) -> AsyncIterator[list[AnyCommand]]:
    """Run workers that answer the first arrival of each command with `answers`.

    Yield the commands that they received.
    """
    heard: list[AnyCommand] = []

    async def join(name: str, says: Sequence[AckStatus]) -> HandWorker:
        worker = await stack.enter_async_context(worker_by_hand(nats_url, fleet, name, pulls=False))
        known: set[str] = set()

        async def receive(message: Msg) -> None:
            given = decode_command(message.data)
            if given.id in known or (given.workers is not None and name not in given.workers):
                return
            known.add(given.id)
            heard.append(given)
            controller = message.subject.rpartition(".")[2]
            for status in says:
                await publish(worker.nats, worker.subjects.ack(controller, name), encode_json(ack(given, name, status)))

        await subscribe(worker.nats, worker.subjects.controls, receive)
        await worker.nats.flush()
        await worker.announce()
        return worker

    async with contextlib.AsyncExitStack() as stack:
        for name, says in answers.items():
            await join(name, says)
        yield heard


def ack(given: AnyCommand, worker: str, status: AckStatus) -> Ack:
    """Return a worker's ack of a command."""
    error = AckError(code=ControlCode.ENGINE_ERROR, message="the engine said no") if status is FAILED else None
    epoch = given.epoch
    return Ack(
        id=given.id, command=given.command, worker=worker, incarnation="life-1", model="m", status=status, error=error,
        epoch=epoch, request_ids=("r1",) if given.command == "abort" else None,
    )  # fmt: skip


SENT: list[tuple[str, str, dict[str, object]]] = [
    ("pause", "pause", {"mode": "keep", "clear_cache": False}),
    ("pause --mode wait --clear-cache", "pause", {"mode": "wait", "clear_cache": True}),
    ("resume --timeout-s 5", "resume", {"timeout_s": 5.0}),
    ("flush-cache --preempt", "flush_cache", {"preempt": True}),
    ("sleep --level 2", "sleep", {"level": 2}),
    ("wake --model m", "wake", {"model": "m"}),
    ("drain w0 w1", "drain", {"workers": ("w0", "w1")}),
    ("pause --worker w1", "pause", {"workers": ("w1",)}),
    ("abort r1 r2", "abort", {"request_ids": ("r1", "r2")}),
    ("load-lora math /a/b", "load_lora", {"name": "math", "version": 1}),
    ("load-lora math /a/b --version 3", "load_lora", {"name": "math", "version": 3}),
    ("unload-lora math", "unload_lora", {"name": "math"}),
    ("cancel-transfer --transfer t", "cancel_weight_update", {"transfer": "t"}),
    ("update-weights /a/b --check", "check_weights", {}),
    ("update-weights /a/b --version 9", "update_weights", {"version": 9, "allow_rollback": False}),
    (
        "update-weights /a/b --version 8 --mode abort --allow-rollback",
        "update_weights",
        {"version": 8, "mode": "abort", "allow_rollback": True},
    ),
]


async def test_options_reach_the_workers_as_fields_of_the_same_name(nats_url: str, fleet: str) -> None:
    """Each option reaches the workers as the field of the same name.

    If all workers apply the command, the exit code is 0.
    """
    async with workers(nats_url, fleet, {"w0": APPLIES, "w1": APPLIES}) as heard:
        for line, name, fields in SENT:
            ended = await run_rollbus(nats_url, fleet, *line.split())
            assert (ended.code, ended.stderr) == (ExitCode.OK, ""), line
            told = heard[-1]
            assert told.command == name
            assert {field: getattr(told, field) for field in fields} == fields
            assert f"\n{name}: applied by " in f"\n{ended.stdout}"


async def test_a_drain_needs_workers_or_an_order(nats_url: str, fleet: str) -> None:
    """A drain without workers, of all at once, or with an option of another form is wrong usage and sends nothing."""
    for line, why in (
        ("drain", "either ids of workers or --all"),
        ("drain --all", "--all needs --one-by-one"),
        ("drain w --all --one-by-one", "either ids of workers or --all"),
        ("drain w --allow-none", "--allow-none"),
        ("drain w --start-timeout 5", "--start-timeout"),
    ):
        ended = await run_rollbus(nats_url, fleet, *line.split())
        assert ended.code == ExitCode.USAGE, line
        assert why in ended.stderr


async def test_a_relative_source_path_becomes_absolute(nats_url: str, fleet: str) -> None:
    """A relative PATH becomes absolute in the current folder, with symbolic links unresolved.

    With --objects, it is unchanged.
    """
    async with workers(nats_url, fleet, {"w0": APPLIES}) as heard:
        await run_rollbus(nats_url, fleet, "update-weights", "some/folder", "--version", "1")
        await run_rollbus(nats_url, fleet, "load-lora", "code", "../adapter")
        await run_rollbus(nats_url, fleet, "load-lora", "math", "bucket/prefix", "--objects")

    sources = [str(getattr(told, "source", None)) for told in heard]
    here = Path.cwd()
    assert sources == [str(here / "some/folder")] * 2 + [str(here / "../adapter")] * 2 + ["objects:bucket/prefix"] * 2


async def test_the_table_lists_the_result_of_each_worker(nats_url: str, fleet: str) -> None:
    """If one of two workers fails, the exit code is 3.

    The table lists both, and stderr names the failed worker and the reason.
    """
    async with workers(nats_url, fleet, {"w0": APPLIES, "w1": (ACCEPTED, FAILED)}):
        ended = await run_rollbus(nats_url, fleet, "flush-cache")

    assert ended.code == ExitCode.PARTIAL
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert rows[0][:2] == ["result", "worker"]
    assert [row[:2] for row in rows[1:3]] == [["failed", "w1"], ["applied", "w0"]]
    assert ended.stdout.splitlines()[1].endswith("the engine said no")
    assert "applied by 1 of 2 workers" in ended.stdout.splitlines()[-1]
    [line] = ended.stderr.splitlines()
    assert line.startswith("rollbus: ")
    assert "w1 failed" in line
    assert "the engine said no" in line


async def test_the_command_result_as_json_is_one_line(nats_url: str, fleet: str) -> None:
    """With --json, the command prints one line on stdout, also if it fails."""
    async with workers(nats_url, fleet, {"w0": APPLIES, "w1": (STALE,)}):
        ended = await run_rollbus(nats_url, fleet, "pause", "--json")

    [line] = ended.stdout.splitlines()
    told: dict[str, Any] = json.loads(line)
    assert (ended.code, told["command"], told["complete"], told["epochs"]) == (3, "pause", False, {"m": 1})
    assert {worker["worker"]: worker["result"] for worker in told["workers"]} == {"w0": "applied", "w1": "stale"}


@pytest.mark.proves("P18")
@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ({"w0": (ACCEPTED, FAILED), "w1": (AckStatus.UNSUPPORTED,)}, ExitCode.FAILED),
        ({"w0": (ACCEPTED, APPLIED), "w1": ()}, ExitCode.PARTIAL),
        ({"w0": (ACCEPTED,), "w1": ()}, ExitCode.TIMEOUT),
    ],
)
async def test_the_acks_of_the_workers_decide_the_exit_code(
    answers: dict[str, tuple[AckStatus, ...]], code: ExitCode, nats_url: str, fleet: str
) -> None:
    """The exit code is 1 if all refused, 3 if only some applied, and 4 if none applied or gave a reason in time."""
    async with workers(nats_url, fleet, answers):
        ended = await run_rollbus(nats_url, fleet, "flush-cache", "--timeout-s", "0.1")

    assert ended.code == code, ended
    assert ended.stderr.count("\n") == 1


async def test_without_workers_a_command_exits_with_code_5(nats_url: str, fleet: str) -> None:
    """Without workers, a command exits with code 5 and one line on stderr, and the desired state records nothing."""
    lines = ("pause", "update-weights /x --version 1", "abort r", "drain w0", "resume --json")
    for ended in await run_together(nats_url, fleet, *lines):
        assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (ExitCode.NO_WORKERS, "", 1)
    status = await run_rollbus(nats_url, fleet, "status", "--json")
    assert json.loads(status.stdout)["desired"] == {}


async def test_fewer_workers_than_expected_receive_no_command(nats_url: str, fleet: str) -> None:
    """With fewer live workers than --expect, the command is not sent and exits with code 5.

    With enough, it runs as usual.
    """
    async with workers(nats_url, fleet, {"w0": APPLIES, "w1": APPLIES}) as heard:
        few, others = await run_together(nats_url, fleet, "pause --expect 3", "pause --model other --expect 1")
        assert heard == []
        enough = await run_rollbus(nats_url, fleet, "pause", "--expect", "2")

    assert (few.code, few.stdout, enough.code) == (ExitCode.NO_WORKERS, "", ExitCode.OK)
    assert few.stderr.endswith("only 2 of 3 expected workers are live, so the command was not sent: w0, w1\n")
    assert (others.code, others.stdout) == (ExitCode.NO_WORKERS, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["update-weights", "/x"], "--version N is required"),
        (["update-weights", "no-such-folder", "--version", "1", "--upload"], "not a folder on this machine"),
        (["update-weights", ".", "--check", "--upload"], "--upload"),
        (["update-weights", "/x", "--version", "1", "--expected-canary", "no-such-file"], "no-such-file"),
        (["update-weights", "/x", "--version", "1", "--expected-canary", "README.md"], "JSON is malformed"),
        (["load-lora", "math", "no-such-folder", "--upload"], "not a folder on this machine"),
        (
            ["load-lora", "math", "/proc/self/fd", "--upload"],
            "no *.safetensors; expected a folder of save_pretrained()",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_connecting(args: list[str], message: str) -> None:
    """An invalid argument is a usage error of one line. The command detects it before it connects to NATS."""
    done = rollbus(*args)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (ExitCode.USAGE, "", 1)
    assert message in done.stderr


async def test_reset_clears_the_desired_state(nats_url: str, fleet: str) -> None:
    """`reset` clears the desired state and reports if it was empty. The epoch continues to increase."""
    async with workers(nats_url, fleet, {"w0": APPLIES}):
        first = await run_rollbus(nats_url, fleet, "reset", "--json")
        await run_rollbus(nats_url, fleet, "pause")
        before = json.loads((await run_rollbus(nats_url, fleet, "status", "--json")).stdout)["desired"]["m"]
        second = await run_rollbus(nats_url, fleet, "reset")
        after = json.loads((await run_rollbus(nats_url, fleet, "status", "--json")).stdout)["desired"]["m"]

    assert (first.code, json.loads(first.stdout)) == (ExitCode.OK, {"models": []})
    assert (second.code, second.stdout) == (ExitCode.OK, "cleared the desired state of m\n")
    assert list(before["registers"]) == ["pause"]
    assert after == {"epoch": before["epoch"] + 1, "registers": {}, "workers": {}}

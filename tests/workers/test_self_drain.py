"""A worker drains itself over its own socket or at a signal: nothing is recorded, and nothing is lost."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
from asyncio.subprocess import PIPE
from pathlib import Path

import numpy as np
import pytest

import rollbus
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RollbusError
from rollbus.schemas.presence import WorkerState
from rollbus.workers import lifecycle
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.local_socket import listen_locally
from tests.chaos.workload import undisturbed
from tests.cli.support import Ended, run_rollbus, started
from tests.support.fleet import synthetic_worker, until_state, until_worker
from tests.support.hand_client import hand_client
from tests.support.hand_worker import GatedEngine, running
from tests.support.invariants import check_stream
from tests.support.nats_server import require_binary
from tests.support.processes import LASTING, worker_process
from tests.support.requests import endless, greedy, start_stream
from tests.support.waits import HANGS_AFTER_S, SOON_S
from tests.workers.support import SLOW, StartControlled, StartHeard

OVER_SOCKET = "the worker was drained over its own socket"

pytestmark = pytest.mark.slow


async def post(path: Path, target: str, method: str = "POST") -> tuple[int, bytes]:
    """Return status and body of the answer of a worker's socket."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: w\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def run_drain(path: Path) -> Ended:
    """Run `rollbus drain --socket` without a server, and with credentials that cannot be read."""
    with started(["drain", "--socket", str(path)], {**os.environ, "ROLLBUS_CREDS": "/nowhere"}) as run:
        return await asyncio.to_thread(run)


async def test_a_drain_over_the_socket_hands_requests_over_and_records_nothing(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A drained worker's request goes on elsewhere, its state names the reason, and a restart under its id serves."""
    path = tmp_path / "run" / "w"
    slow, fast = {"step_s": 0.2}, {"step_s": 0.0}
    async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.TaskGroup() as tasks:
        options = ("--worker-id", "w", "--socket", str(path), *LASTING)
        async with worker_process(nats_url, fleet, *options, engine_args=slow) as process:
            await until_worker(rb, "w", WorkerState.SERVING)
            running = tasks.create_task(rb.complete(greedy(1, 1000)))
            await until_state(rb, lambda state: state.workers[0].in_flight)
            async with worker_process(nats_url, fleet, "--worker-id", "other", *LASTING, engine_args=fast):
                await until_worker(rb, "other", WorkerState.SERVING)
                assert (await post(path, "/drain", "GET"))[0] == 405
                assert (await post(path, "/drain?timeout_s=0"))[0] == 400
                assert (await post(path, "/drain?limit=1"))[0] == 400
                ended = await run_drain(path)
                assert (ended.code, "its state is drained" in ended.stderr) == (0, True), ended
                # A second drain has nothing to do, and no resume ends the first.
                assert await post(path, "/drain?timeout_s=1h") == (200, b'{"state": "drained", "in_flight": 0}\n')
                await rb.fleet.resume()
                state = await rb.fleet.state()
                generation = await running
                assert (len(generation.token_ids), generation.attempts) == (1000, 2)
                assert [w.last_error for w in state.workers if w.state is WorkerState.DRAINED] == [OVER_SOCKET]
                assert not [w for desired in state.desired.values() for w in desired.workers]
                assert (await post(path, "/health", "GET"))[0] == 200
                assert (await post(path, "/ready", "GET"))[0] == 503
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                assert not path.exists()
                async with worker_process(nats_url, fleet, *options):
                    await until_worker(rb, "w", WorkerState.SERVING)


async def test_a_client_that_never_acknowledges_ends_a_drain_at_its_limit(nats_url: str, fleet: str) -> None:
    """The drain is not done while a client has not acknowledged, and `stop_now` does not wait for it."""
    async with (
        hand_client(nats_url, fleet, answers=False) as client,
        running(nats_url, fleet, GatedEngine(config=SLOW), drain_s=3600.0) as (worker, task),
    ):
        await client.until_serving("w")
        await client.begin(endless("r"))
        worker.drain("a test")
        assert not await worker.wait_drained(0.2)
        await client.until_state("w", WorkerState.DRAINED)
        await client.until_ended("r")
        assert client.error_of("r") == ErrorCode.WORKER_STOPPED
        worker.stop()
        await asyncio.sleep(0.1)
        assert not task.done()
        worker.stop_now()
        async with asyncio.timeout(SOON_S):
            await task


@pytest.mark.parametrize("command", ["pause", "sleep", "drain"])
async def test_a_stopped_worker_drains_itself_too(controlled_worker: StartControlled, command: str) -> None:
    """A worker that is paused, asleep or drained by an admin drains itself at once, and shows both."""
    async with controlled_worker() as (client, boss, worker, _):
        await client.begin(endless("r"))
        await boss.applied(command, **({"workers": ["w"]} if command == "drain" else {}))
        worker.drain("a test")
        assert await worker.wait_drained(SOON_S)
        await client.until_state("w", WorkerState.DRAINED)
        await client.until(lambda: client.presences["w"].last_error == "a test")
        await client.until_ended("r")


async def test_a_drain_before_the_start_never_serves(nats_url: str, fleet: str) -> None:
    """A worker that was drained before its engine has loaded is done at once, and becomes drained, not serving."""
    engine = GatedEngine("start")
    async with hand_client(nats_url, fleet) as client, running(nats_url, fleet, engine) as (worker, task):
        worker.drain("a test")
        assert await worker.wait_drained(0)
        await client.until_state("w", WorkerState.STARTING)
        assert await worker.wait_drained(SOON_S)
        engine.gates["start"].set()
        await client.until_state("w", WorkerState.DRAINED)
        worker.stop()
        await task


async def test_without_its_server_a_stopped_worker_ends_with_its_lease(fleet: str) -> None:
    """If NATS is away, a stop waits until other workers may have the requests: until the lease has expired."""
    require_binary()
    async with (
        EmbeddedServer() as server,
        asyncio.timeout(HANGS_AFTER_S),
        rollbus.connect(server.url, fleet=fleet, worker_grace_s=60) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        fields = {"config": SLOW, "worker_id": "w", "lease_s": 2.0, "drain_s": 3600.0}
        async with synthetic_worker(server.url, fleet, **fields) as (worker, _):  # type: ignore[arg-type]
            await until_worker(rb, "w", WorkerState.SERVING)
            running = tasks.create_task(rb.complete(endless()))
            await until_state(rb, lambda state: state.workers[0].in_flight)
            await server.kill()
            worker.stop()
        assert worker.stats().times_fenced >= 1
        running.cancel()


async def test_a_fenced_worker_is_drained(heard_worker: StartHeard) -> None:
    """A drain of a fenced worker is done at once; its next incarnation does not serve."""
    async with heard_worker() as (client, worker, _):
        await client.begin(endless("r"))
        worker._lifecycle.fence("a test")
        worker.drain("a test")
        assert await worker.wait_drained(SOON_S)
        await client.until_state("w", WorkerState.DRAINED)


@pytest.mark.proves("P70")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_hands_requests_over(nats_url: str, fleet: str, number: signal.Signals) -> None:
    """After a signal the worker exits with 0, and another worker goes on with the next token of its request."""
    slow, fast = {"step_s": 0.2}, {"step_s": 0.0}
    wanted = greedy(1, 1000, request_id="r")
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        asyncio.TaskGroup() as tasks,
        worker_process(nats_url, fleet, "--worker-id", "w", engine_args=slow) as process,
    ):
        await until_worker(rb, "w", WorkerState.SERVING)
        stream = await start_stream(tasks, rb, wanted)
        async with worker_process(nats_url, fleet, "--worker-id", "other", engine_args=fast):
            await until_worker(rb, "other", WorkerState.SERVING)
            process.send_signal(number)
            assert await process.wait() == 0
            await stream.reading

    check_stream(stream.chunks, wanted)
    assert {chunk.attempt for chunk in stream.chunks} == {0, 1}
    tokens = np.concatenate([chunk.token_ids for chunk in stream.chunks])
    expected = await undisturbed([wanted], SyntheticConfig())
    np.testing.assert_array_equal(tokens, expected["r"].token_ids)


async def test_a_worker_waits_for_its_id(nats_url: str, fleet: str) -> None:
    """With `--on-duplicate wait` a second worker stays alive, and serves when the first one has ended."""
    options = ("--worker-id", "w", "--lease-s", "2", "--listen-s", "2", "--on-duplicate", "wait")
    async with (
        asyncio.timeout(HANGS_AFTER_S),
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--worker-id", "w", "--lease-s", "2") as first,
    ):
        await until_worker(rb, "w", WorkerState.SERVING)
        async with worker_process(nats_url, fleet, *options, stderr=PIPE) as second:
            while b"worker.id_awaited" not in await second.stderr.readline():
                pass
            first.terminate()
            assert await first.wait() == 0
            while b"worker.serving" not in await second.stderr.readline():
                pass
            second.terminate()
            assert await second.wait() == 0


async def test_an_id_is_free_after_a_silent_lease(nats_url: str, fleet: str) -> None:
    """The wait for an id ends only after the last worker with it has been silent for its lease."""
    config = WorkerConfig(nats_url=nats_url, fleet=fleet, worker_id="w", model="synthetic", lease_s=2.0)
    async with asyncio.timeout(HANGS_AFTER_S):
        async with synthetic_worker(nats_url, fleet, worker_id="w"):
            waiting = asyncio.timeout(3.5)
            with contextlib.suppress(TimeoutError):
                async with waiting:
                    await lifecycle.wait_until_free(config)
            assert waiting.expired()


def test_only_the_user_of_the_worker_may_use_its_socket(tmp_path: Path) -> None:
    """Socket and directory are the user's alone; a dead worker's file is replaced, every other file stays."""
    path = tmp_path / "run" / "w"
    with listen_locally(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with pytest.raises(RollbusError, match="another process uses it"), listen_locally(path):
            pass
        # A process that does not know of the lock listens.
        (tmp_path / "run" / "w.lock").unlink()
        with pytest.raises(RollbusError, match="another process uses it"), listen_locally(path):
            pass
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen_locally(path):
        pass
    path.write_text("mine")
    with pytest.raises(InvalidRequest, match="is a file but not a socket"), listen_locally(path):
        pass
    assert path.read_text() == "mine"
    path.parent.chmod(0o770)
    with pytest.raises(InvalidRequest, match="may be written by other users: its mode is 0770"), listen_locally(path):
        pass
    with pytest.raises(InvalidRequest, match="allowed: at most 107 bytes"), listen_locally(tmp_path / ("x" * 120)):
        pass
    (tmp_path / "link").symlink_to(path.parent)
    with pytest.raises(InvalidRequest, match="is not a directory"), listen_locally(tmp_path / "link" / "w"):
        pass
    if os.geteuid() == 0:
        path.parent.chmod(0o700)
        os.chown(path.parent, 12345, -1)
        with pytest.raises(InvalidRequest, match="belongs to the user 12345"), listen_locally(path):
            pass


async def test_a_drain_without_a_worker_fails(fleet: str, tmp_path: Path) -> None:
    """`rollbus drain --socket` states what is missing, and asks for either a worker or a socket."""
    ended = await run_rollbus("nats://127.0.0.1:1", fleet, "drain", "--socket", str(tmp_path / "none"))
    assert (ended.code, "No such file" in ended.stderr) == (1, True)
    assert (await run_rollbus("nats://127.0.0.1:1", fleet, "drain")).code == 2
    ended = await run_rollbus("nats://127.0.0.1:1", fleet, "drain", "w", "--socket", str(tmp_path / "none"))
    assert (ended.code, "either the ids of workers or --socket" in ended.stderr) == (2, True)
    ended = await run_rollbus("nats://127.0.0.1:1", fleet, "drain", "--all", "--socket", str(tmp_path / "none"))
    assert (ended.code, "--all has no effect with --socket" in ended.stderr) == (2, True)


@pytest.mark.parametrize("answer", [b"{" * 60_000, b"[" * 60_000, b"[]", b'{"error": "\x1b"}', b'{"error": "\\u001b"}'])
async def test_an_answer_that_is_no_workers_fails_the_drain(tmp_path: Path, answer: bytes) -> None:
    """What another process answers at the socket is an error, and does not control the terminal."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 x\r\n\r\n" + answer)
        writer.close()

    async with await asyncio.start_unix_server(respond, tmp_path / "s"):
        ended = await run_drain(tmp_path / "s")
    assert (ended.code, "\x1b" in ended.stderr, "internal error" in ended.stderr) == (1, False, False)


async def test_the_second_signal_ends_a_worker_whose_client_never_acknowledges(nats_url: str, fleet: str) -> None:
    """The first signal waits for a live client that acknowledges nothing, the second one does not; both exit with 0."""
    engine = {"step_s": 0.05, "max_model_len": 100_000}
    options = ("--worker-id", "w", "--drain-s", "1h")
    async with (
        hand_client(nats_url, fleet, answers=False) as client,
        worker_process(nats_url, fleet, *options, engine_args=engine) as process,
        asyncio.timeout(HANGS_AFTER_S),
    ):
        await client.until_serving("w")
        await client.begin(endless("r"))
        process.send_signal(signal.SIGTERM)
        await client.until_ended("r")
        assert client.error_of("r") == ErrorCode.WORKER_STOPPED
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0

"""Time limits of tests are long and scalable, and one module defines them."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollbus.bus.protocol.fleet.desired import record
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.control import Command, DesiredState, Pause, Resume, UpdateWeights
from rollbus.schemas.messages import Frame, encode, encode_json
from rollbus.schemas.weights import WeightSource
from tests.support import waits
from tests.support.invariants import ControlHistory
from tests.support.processes import KEPT, ROOT, RUN
from tests.support.tcp_proxy import Direction, TcpProxy, tcp_proxy
from tests.support.waits import SOON_S


@pytest.mark.parametrize(("slow", "ends"), [(1.0, True), (4.0, False)])
async def test_a_limit_in_progress_grows_while_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, slow: float, ends: bool
) -> None:
    """A timeout that has begun counts only the share of the time in which the test had a core."""
    monkeypatch.setattr(waits, "slowness", lambda: slow)
    monkeypatch.setattr(waits, "LOOK_AGAIN_S", 0.01)
    timed_out, over = False, asyncio.Event()
    asyncio.get_running_loop().call_later(0.4, over.set)
    try:
        async with waits.busy_timeout(0.2):
            await over.wait()
    except TimeoutError:
        timed_out = True

    assert timed_out is ends


def test_the_run_ends_a_hanging_test_after_its_own_limit() -> None:
    """The longest limit of a test is shorter than `faulthandler_timeout`, in pytest's settings and in `.ci/test`."""
    longest_s = waits.ENGINE_HANGS_AFTER_S / waits.FACTOR * waits.MAX_SLOWNESS
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]

    assert longest_s < settings["faulthandler_timeout"]
    assert f"print {settings['faulthandler_timeout']} * factor" in (ROOT / ".ci/test").read_text()


# A run of tests uses its own cache directory, removes it, and fails if it has left files in the user's directory.


CLEAN = """
from pathlib import Path

from rollbus.workers.config import default_cache_dir

def test_worker(fleet):
    path = Path(default_cache_dir()) / fleet
    path.mkdir(parents=True)
    print(path)
"""
LEAKY = """
from pathlib import Path

def test_worker(fleet):
    (Path({user!r}) / "rollbus" / fleet).mkdir(parents=True)
"""


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a test file, as a user whose cache directory is `folder / "user"`."""
    file = folder / "test_one.py"
    file.write_text(source.format(user=str(folder / "user")))
    environment = {name: value for name, value in os.environ.items() if name not in (RUN, *KEPT)}
    environment |= {"XDG_CACHE_HOME": str(folder / "user"), "TMPDIR": str(folder)}
    options = ("-s", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *options, str(file)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_tests_cache_is_removed_at_the_end(tmp_path: Path) -> None:
    """The default cache directory of workers lies in that of the run, and nothing of it stays."""
    done = run(tmp_path, CLEAN)

    assert done.returncode == 0, done.stdout
    assert "rollbus-test-cache-" in done.stdout
    assert not (tmp_path / "user").exists()
    assert list(tmp_path.glob("rollbus-test-cache-*")) == []


@pytest.mark.slow
def test_files_in_the_cache_directory_of_the_user_fail_the_run(tmp_path: Path) -> None:
    """If a test passes and leaves the directory of a fleet in the user's cache, the run fails and names it."""
    done = run(tmp_path, LEAKY)

    assert done.returncode == 1, done.stdout
    assert f"tests left in the user's cache directory: {tmp_path}/user/rollbus/test-" in done.stderr


# The proxy behaves like a real network, so that fault tests are valid.


@contextlib.asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[TcpProxy]:
    """Run an echo server and a proxy in front of it."""
    async with asyncio.TaskGroup() as tasks:

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def serve() -> None:
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            async with server:
                port.set_result(server.sockets[0].getsockname()[1])
                await server.serve_forever()

        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = tasks.create_task(serve())
        async with asyncio.timeout(SOON_S), tcp_proxy(f"nats://127.0.0.1:{await port}") as proxy:
            yield proxy
        serving.cancel()


@contextlib.asynccontextmanager
async def connected(proxy: TcpProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect through `proxy`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_a_cut_closes_connections_and_refuses_new_connections() -> None:
    """A cut closes all connections and refuses new ones; after the repair, connections work on the same port."""
    async with echo_behind_proxy() as proxy:
        async with connected(proxy) as (reader, writer):
            writer.write(b"x")
            await reader.readexactly(1)
            url = proxy.url
            proxy.cut()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            async with connected(proxy):
                pass
        await proxy.restore()

        assert proxy.url == url
        async with connected(proxy) as (reader, writer):
            writer.write(b"y")
            assert await reader.readexactly(1) == b"y"


@pytest.mark.parametrize("direction", [Direction.TO_SERVER, Direction.TO_CLIENT, Direction.BOTH])
async def test_a_partition_holds_bytes_and_closes_no_connection(direction: Direction) -> None:
    """While a direction is frozen, no bytes arrive and no connection closes.

    After the thaw all bytes arrive, also those of new connections.
    """
    async with echo_behind_proxy() as proxy, connected(proxy) as (reader, writer):
        writer.write(b"before ")
        assert await reader.readexactly(7) == b"before "
        proxy.freeze(direction)
        writer.write(b"meanwhile")
        async with connected(proxy) as (newer, say):
            say.write(b"new")
            for silent in (reader, newer):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(silent.read(1), 0.02)
            proxy.thaw()

            assert await newer.readexactly(3) == b"new"
        assert await reader.readexactly(9) == b"meanwhile"


# The command history reports each violation of I4 and I5 and no correct behavior.

SUBJECTS = Subjects("f")
PAUSE = Pause(id="p")
UPDATE = UpdateWeights(id="u", version=2, source=WeightSource(path="/a"))


class Fleet:
    """A fleet whose messages the test writes."""

    def __init__(self) -> None:
        self.history = ControlHistory()
        self.state = DesiredState(model="m")

    def command(self, command: Command) -> None:
        """Publish a command as a controller."""
        self.history.take(SUBJECTS.control("c"), encode_json(command))

    def records(self, command: Pause | Resume | UpdateWeights) -> None:
        """Record a command in the desired state."""
        self.state, _ = record(self.state, command)
        self.history.take("$KV.rollbus.f.m", encode_json(self.state))

    def ack(self, command: Command, status: AckStatus, incarnation: str = "i", **fields: object) -> None:
        """Publish a worker's ack."""
        ack = Ack(
            id=command.id, command=command.command, worker="w", incarnation=incarnation, model="m", status=status,
            **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.history.take(SUBJECTS.ack("c", "w"), encode_json(ack))

    def frame(self, number: int, *, version: int = 1, tokens: int = 1, incarnation: str = "i") -> None:
        """Publish a frame of a worker with one chunk."""
        ids = np.arange(tokens, dtype="<i4").tobytes()
        chunk = Chunk(
            request_id="r", attempt=0, child=0, chunk_index=number, weight_version=version, token_ids_data=ids
        )
        self.history.take(SUBJECTS.frame("me", "w"), encode(Frame(1, incarnation, number, [], [chunk], 0, "life")))

    @property
    def problems(self) -> list[str]:
        """The violations in the history."""
        return self.history.problems


def test_tokens_of_a_paused_worker_are_a_violation() -> None:
    """A token in a new frame after the applied pause is a violation; earlier and empty frames are not."""
    fleet = Fleet()
    fleet.frame(0)
    fleet.ack(PAUSE, AckStatus.ACCEPTED)
    fleet.frame(1)
    fleet.ack(PAUSE, AckStatus.APPLIED, frames={"me/life": 2})
    fleet.frame(1)
    fleet.frame(2, tokens=0)
    fleet.frame(0, incarnation="another life")
    assert fleet.problems == []
    fleet.frame(2)
    assert fleet.problems == ["w published tokens in frame 2 while paused (I4)"]


@pytest.mark.parametrize("how", ["command", "records"])
def test_a_resume_ends_a_pause(how: str) -> None:
    """Tokens are allowed after a resume is published or recorded. A repeated pause command does not change this."""
    fleet = Fleet()
    fleet.records(PAUSE)
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.command(PAUSE)
    fleet.command(Resume(id="r", workers=("other",)))
    fleet.command(Resume(id="r", model="other"))
    fleet.frame(0)
    assert len(fleet.problems) == 1
    getattr(fleet, how)(Resume(id="r2"))
    fleet.frame(1)
    assert len(fleet.problems) == 1


def test_a_pause_with_a_resume_before_its_ack_does_not_bind_the_worker() -> None:
    """A pause does not bind a worker if a resume was recorded before its ack: the worker may have resumed."""
    fleet = Fleet()
    fleet.records(PAUSE)
    fleet.records(Resume(id="r"))
    fleet.ack(PAUSE, AckStatus.APPLIED, epoch=1)
    fleet.frame(0)
    assert fleet.problems == []
    fleet.records(Pause(id="p2"))
    fleet.ack(Pause(id="p2"), AckStatus.APPLIED, epoch=3)
    fleet.frame(1)
    assert len(fleet.problems) == 1


def test_tokens_of_older_weights_are_a_violation() -> None:
    """After an applied update each token has the new version, until another update is published."""
    fleet = Fleet()
    fleet.ack(UPDATE, AckStatus.APPLIED, weight_version=2, frames={"me/life": 1})
    fleet.frame(0, version=1)
    fleet.frame(1, version=2)
    assert fleet.problems == []
    fleet.frame(2, version=1)
    assert fleet.problems == ["w published tokens of versions [1] in frame 2 after its update to 2 (I4)"]
    fleet.command(UpdateWeights(id="u3", version=3, source=WeightSource(path="/b")))
    fleet.frame(3, version=3)
    assert len(fleet.problems) == 1


def test_a_failed_command_does_not_bind_the_worker() -> None:
    """A failed or stale command does not bind a worker."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.FAILED)
    fleet.ack(UPDATE, AckStatus.STALE)
    fleet.frame(0)
    assert fleet.problems == []


def test_after_the_desired_state_is_deleted_no_command_binds_a_worker() -> None:
    """After the desired state is deleted, no earlier command binds a worker."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.history.take("$KV.rollbus.f.m", b"")
    fleet.frame(0)
    assert fleet.problems == []


def test_a_different_second_final_ack_is_a_violation() -> None:
    """An incarnation may repeat its final ack. A different final ack or a later progress ack is a violation."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.ACCEPTED)
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.ack(PAUSE, AckStatus.ACCEPTED, incarnation="next")
    fleet.ack(PAUSE, AckStatus.STALE, incarnation="next")
    assert fleet.problems == []
    fleet.ack(PAUSE, AckStatus.FAILED)
    fleet.ack(PAUSE, AckStatus.PROGRESS, stage="pausing")
    fleet.ack(PAUSE, AckStatus.APPLIED, in_flight=3)
    assert len(fleet.problems) == 3


def test_a_command_without_a_final_ack_is_unanswered() -> None:
    """An accepted command is unanswered until its final ack, as long as that incarnation exists."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.ACCEPTED)
    assert fleet.history.unanswered({"i"}) == ["w pause"]
    assert fleet.history.unanswered({"another"}) == []
    fleet.ack(PAUSE, AckStatus.APPLIED)
    assert fleet.history.unanswered({"i"}) == []


def test_messages_that_cannot_be_decoded_are_ignored() -> None:
    """The history ignores messages that it cannot decode."""
    fleet = Fleet()
    for subject in (
        SUBJECTS.control("c"),
        SUBJECTS.ack("c", "w"),
        SUBJECTS.frame("me", "w"),
        SUBJECTS.plain("x") + "1",
    ):
        for data in (b"", b"\xff", msgspec.json.encode({"command": "dance"})):
            fleet.history.take(subject, data)
    assert fleet.problems == []

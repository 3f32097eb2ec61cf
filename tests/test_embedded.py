"""The embedded nats-server: start, failures, crashes and cleanup."""

import asyncio
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import uvloop

from rollbus.bus.nats.connection import open_connection
from rollbus.bus.nats.embedded import BINARY_VARIABLE, EmbeddedServer, find_binary
from rollbus.schemas.errors import BusBroken, BusClosed
from rollbus.schemas.options import pip_install
from tests.support.nats_server import require_binary, running_server
from tests.support.processes import becomes_true, is_alive, parent_of, python_program, read_line

EMBED = """
    import asyncio, os
    from rollbus.bus.nats.embedded import EmbeddedServer

    async def main():
        async with EmbeddedServer() as server:
            print(server.pid, server._folder, flush=True)
            {body}

    asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _binary() -> None:
    """Require the nats-server binary, because each test here starts servers."""
    require_binary()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which this test creates its temporary folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def contents(folder: Path) -> list[str]:
    """Return the names of all entries of a folder."""
    return sorted(path.name for path in folder.iterdir())


async def echo(url: str) -> int:
    """Make a round trip to the server and return its `max_payload`."""
    connection = await open_connection(url, name="echo")
    await connection.flush()
    await connection.shut()
    return connection.max_payload


async def test_a_server_serves_clients_and_leaves_no_process_or_folder(temporary: Path) -> None:
    """A started server accepts connections and 8 MiB messages; after its end, process and folder are gone."""
    async with EmbeddedServer() as server:
        pid = server.pid
        max_payload = await echo(server.url)

    assert (max_payload, server.is_running, is_alive(pid)) == (8 * 1024 * 1024, False, False)
    assert contents(temporary) == []


def test_a_server_runs_on_uvloop_in_a_thread(temporary: Path) -> None:
    """A server also runs on uvloop and outside the main thread."""
    answers: list[int] = []

    async def main() -> None:
        async with EmbeddedServer() as server:
            answers.append(await echo(server.url))
            await server.restart()
            answers.append(await echo(server.url))

    thread = threading.Thread(target=uvloop.run, args=[main()])
    thread.start()
    thread.join()

    assert len(answers) == 2
    assert contents(temporary) == []


async def test_two_servers_run_side_by_side() -> None:
    """Two servers use different ports and have separate streams."""
    async with EmbeddedServer() as one, EmbeddedServer() as two:
        first = await open_connection(one.url, name="one")
        second = await open_connection(two.url, name="two")
        await first.jetstream().add_stream(name="s", subjects=["s"])
        streams = [len(await connection.jetstream().streams_info()) for connection in (first, second)]
        await first.shut()
        await second.shut()

    assert one.url != two.url
    assert streams == [1, 0]


async def test_clients_receive_the_max_payload_of_the_server() -> None:
    """Clients receive `max_payload_bytes` as the server's limit."""
    async with EmbeddedServer(max_payload_bytes=64 * 1024) as server:
        assert await echo(server.url) == 64 * 1024


async def test_a_restart_keeps_port_and_streams() -> None:
    """A restart keeps the URL and the stored messages, whether the server was stopped, killed or running."""
    async with EmbeddedServer() as server:
        url, pids = server.url, {server.pid}
        connection = await open_connection(url, name="writer")
        await connection.jetstream().add_stream(name="s", subjects=["s"])
        await connection.jetstream().publish("s", b"kept")
        await connection.shut()
        for prepare in (server.stop, server.kill, None):
            if prepare is not None:
                await prepare()
            await server.restart()
            pids.add(server.pid)
            connection = await open_connection(server.url, name="reader")
            message = await connection.jetstream().get_msg("s", 1)
            await connection.shut()
            assert (server.url, message.data) == (url, b"kept")

    assert len(pids) == 4


async def test_a_given_store_outlives_the_server(tmp_path: Path) -> None:
    """Streams in a given folder with any name remain for the next server."""
    store = tmp_path / 'a "store" of $HOME \\ é'
    for expected in (1, 2):
        async with EmbeddedServer(store_dir=store) as server:
            connection = await open_connection(server.url, name="writer")
            await connection.jetstream().add_stream(name="s", subjects=["s"])
            acknowledgement = await connection.jetstream().publish("s", b"x")
            await connection.shut()
            assert acknowledgement.seq == expected

    assert store.is_dir()


async def test_a_failed_start_shows_the_log(temporary: Path) -> None:
    """If the server exits immediately, the error contains the server's log, and no folder remains."""
    async with EmbeddedServer() as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(BusBroken, match=r"exited immediately.*\n(.*\n)*.*address already in use"):
            async with EmbeddedServer(port=port):
                pytest.fail("two servers on one port")

    assert contents(temporary) == []


@pytest.mark.slow
async def test_a_server_that_is_never_ready_is_killed(tmp_path: Path, temporary: Path) -> None:
    """A server that is not ready in time is killed, and the error names the time and contains the log."""
    binary = tmp_path / "mute"
    binary.write_text("#!/bin/sh\necho pid $$ waits >&2\nexec sleep 600\n")
    binary.chmod(0o755)
    server = EmbeddedServer(binary=binary, start_timeout_s=1.0)
    with pytest.raises(BusBroken, match=r"not ready within 1\.0 s.*\npid \d+ waits"):
        await server.__aenter__()

    assert not is_alive(int(server.log_tail().split()[1]))
    assert contents(temporary) == ["mute"]


async def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    """A binary that cannot run raises an error with its path and the system's reason."""
    binary = tmp_path / "text"
    binary.write_text("not a program")
    binary.chmod(0o755)
    with pytest.raises(BusBroken, match=r"cannot run .*text: .*Exec format error"):
        await EmbeddedServer(binary=binary).__aenter__()


async def test_a_cancelled_start_leaves_no_process_or_folder(tmp_path: Path, temporary: Path) -> None:
    """A cancelled start leaves neither process nor folder."""
    pid_file = tmp_path / "pid"
    binary = tmp_path / "mute"
    binary.write_text(f"#!/bin/sh\necho $$ >{pid_file}.part\nmv {pid_file}.part {pid_file}\nexec sleep 600\n")
    binary.chmod(0o755)
    async with asyncio.TaskGroup() as tasks:
        start = tasks.create_task(EmbeddedServer(binary=binary).__aenter__())
        await asyncio.sleep(0)
        assert becomes_true(pid_file.exists)
        start.cancel()

    assert start.cancelled()
    assert not is_alive(int(pid_file.read_text()))
    assert contents(temporary) == ["mute", "pid"]


async def test_a_cancelled_stop_kills_the_server(temporary: Path) -> None:
    """A cancelled stop kills the server."""
    async with EmbeddedServer() as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await server.stop()

        assert not is_alive(pid)

    assert contents(temporary) == []


async def test_stopping_and_killing_can_be_repeated() -> None:
    """Stopping or killing a stopped server does nothing, and a closed server cannot be restarted."""
    async with EmbeddedServer() as server:
        await server.stop()
        await server.stop()
        await server.kill()
        await server.wait()
        with pytest.raises(BusClosed):
            _ = server.pid
    await server.stop()
    with pytest.raises(BusClosed):
        await server.restart()


async def test_wait_returns_when_the_server_dies() -> None:
    """`wait` returns when the server dies."""
    async with EmbeddedServer() as server:
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()

        assert not server.is_running


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["raise SystemExit", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_server_and_folder_are_removed_when_python_ends(ending: str, tmp_path: Path) -> None:
    """When the Python process exits in any way or is killed, its server and temporary folder are removed."""
    with python_program(EMBED.format(body=ending), tmp_path) as program:
        pid, folder = read_line(program).split()
        program.wait()

        assert becomes_true(lambda: not is_alive(int(pid)))
        assert becomes_true(lambda: not Path(folder).exists())


@pytest.mark.slow
def test_a_forked_child_does_not_keep_the_server(tmp_path: Path) -> None:
    """When the Python process is killed, its server ends even if a forked child still runs."""
    body = """
            if (child := os.fork()) == 0:
                os.read(0, 1)  # until the test ends
                os._exit(0)
            print(child, flush=True)
            await asyncio.Event().wait()
    """
    with python_program(EMBED.format(body=body), tmp_path) as program:
        pid, child = read_line(program).split()[0], int(read_line(program))
        program.kill()

        assert becomes_true(lambda: not is_alive(int(pid)))
        assert is_alive(child)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent was killed")
def test_the_server_ends_when_python_and_the_guard_are_killed(tmp_path: Path) -> None:
    """When the Python process and the guard process are killed, as `pkill python` does, the server ends."""
    with python_program(EMBED.format(body="await asyncio.Event().wait()"), tmp_path) as program:
        pid = int(read_line(program).split()[0])
        guard = parent_of(pid)
        os.kill(program.pid, signal.SIGSTOP)
        os.kill(guard, signal.SIGKILL)
        program.kill()

        assert guard != program.pid
        assert becomes_true(lambda: not is_alive(pid))


@pytest.mark.slow
def test_ctrl_c_does_not_reach_the_server(tmp_path: Path) -> None:
    """The server still serves after SIGINT to its process group, so that clients can close normally."""
    body = """
            from rollbus.bus.nats.connection import open_connection
            interrupted = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(2, interrupted.set)
            connection = await open_connection(server.url, name="test")
            print("ready", flush=True)
            await interrupted.wait()
            await connection.flush()
            print("served", server.is_running, connection.counters().disconnects, flush=True)
            await connection.shut()
    """
    with python_program(EMBED.format(body=body), tmp_path) as program:
        pid = int(read_line(program).split()[0])
        assert read_line(program) == "ready"
        os.killpg(program.pid, signal.SIGINT)

        assert read_line(program) == "served True 0"
        assert program.wait() == 0
        assert not is_alive(pid)


def test_the_binary_is_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binary is searched in this order: argument, environment variable, Python's folder, PATH."""
    places = [tmp_path / name / "nats-server" for name in ("argument", "variable", "python", "path")]
    for place in places:
        place.parent.mkdir()
        place.touch(0o755)
    monkeypatch.setattr("sys.executable", str(places[2].with_name("python")))
    monkeypatch.setenv(BINARY_VARIABLE, str(places[1]))
    monkeypatch.setenv("PATH", str(places[3].parent))

    assert find_binary(places[0]) == places[0]
    assert find_binary() == places[1]
    monkeypatch.delenv(BINARY_VARIABLE)
    assert find_binary() == places[2]
    places[2].unlink()
    assert find_binary() == places[3]
    places[3].unlink()
    with pytest.raises(BusBroken, match=rf"{re.escape(pip_install('embedded'))}.*PATH.*\$ROLLBUS_NATS_SERVER"):
        find_binary()
    with pytest.raises(BusBroken, match=r"the binary argument names .*path.*not an executable file"):
        find_binary(places[3])


def test_tests_use_the_server_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests use `$ROLLBUS_TEST_NATS` instead of any server that they could start."""
    monkeypatch.setenv("ROLLBUS_TEST_NATS", "nats://elsewhere:1")
    with running_server() as url:
        assert url == "nats://elsewhere:1"


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_tests_without_a_server_are_skipped_with_the_reason(
    ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a server, tests are skipped with the reason, and on CI they fail."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ROLLBUS_TEST_NATS", raising=False)
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(outcome, match="no nats-server binary found"), running_server():
        pytest.fail("there is no server")

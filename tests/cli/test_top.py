"""`rollbus top` on a separate terminal, with a real NATS server. The engines are synthetic."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import pytest

import rollbus
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.presence import WorkerCounters, WorkerPresence
from tests.browser import announcer
from tests.cli.support import Terminal, on_terminal, run_rollbus, run_together
from tests.support.fleet import presence, synthetic_worker
from tests.support.nats_server import require_binary
from tests.support.processes import becomes_true, state_of

pytestmark = pytest.mark.slow

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"
FAILING = """
import asyncio, time
from rich.text import Text
from rollbus.frontend.cli.watch.terminal import open_screen

async def main():
    with open_screen() as screen:
        await screen.show(lambda width, height: Text("drawn"), lambda key: True, time.monotonic())
        raise RuntimeError("in the middle")

asyncio.run(main())
"""


async def until(terminal: Terminal, pattern: str) -> None:
    """Wait for a new match on the terminal. In the pattern, ` +` matches blanks and changes of colour."""
    terminal.text = ""
    await asyncio.to_thread(terminal.read_to_match, pattern.replace(" +", r"(?:\s|\x1b\[[\d;]*m)+"))


def announced(nats_url: str, fleet: str, *workers: str) -> AbstractAsyncContextManager[None]:
    """Publish presence of workers without engines that report a hundred tokens per second."""

    def say(seconds: int) -> Iterator[WorkerPresence]:
        made = WorkerCounters(generated_tokens=100 * seconds)
        for name in workers:
            yield presence(worker=name, counters=made, uptime_s=float(seconds), lease_s=60.0)

    return announcer.announced(nats_url, fleet, say)


async def test_states_and_commands_appear(nats_url: str, fleet: str) -> None:
    """`top` shows a pause and the start and end of a worker without a key press, and q exits with 0."""
    args = ("top", "--nats", nats_url, "--fleet", fleet)
    async with synthetic_worker(nats_url, fleet, worker_id="a"), rollbus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        with on_terminal(*args, size=(100, 30)) as terminal:
            await until(terminal, r"1 worker: 1 serving(?s:.)*model +workers(?s:.)*serving +a")
            await rb.fleet.pause()
            await until(terminal, r"1 paused(?s:.)*pause keep +synthetic +1 +all +1 of 1(?s:.)*paused \(keep\) +a")
            async with synthetic_worker(nats_url, fleet, worker_id="b"):
                await until(terminal, r"2 workers(?s:.)*paused \(keep\) +b")
            await until(terminal, r"1 worker:")
            terminal.press(b"q")
            assert await asyncio.to_thread(terminal.read_to_end) == ExitCode.OK


async def test_keys_apply_immediately_and_a_resize_redraws_the_screen(nats_url: str, fleet: str) -> None:
    """Keys sort, filter and scroll immediately, and a resized terminal is redrawn completely."""
    names = [f"w{number:02}" for number in range(60)]
    async with announced(nats_url, fleet, *names):
        with on_terminal("top", "--nats", nats_url, "--fleet", fleet, "--interval", "60", size=(80, 24)) as terminal:
            await until(terminal, r"page: lines 1 to \d+ of 60")
            terminal.press(b"s")
            await until(terminal, "s sort: worker")
            terminal.press(b"p")
            await until(terminal, "p model: m ")
            terminal.press(b"\x1b[B\x1b[B")
            await until(terminal, "page: lines 3 to ")
            terminal.resize(120, 60)
            await until(terminal, r"page: lines 3 to 5\d")
            terminal.press_ctrl_c()
            assert await asyncio.to_thread(terminal.read_to_end) == ExitCode.OK


async def test_top_keeps_the_last_state_while_nats_is_down(fleet: str) -> None:
    """While NATS is down, `top` reports that and keeps the last state. After the restart it shows new data."""
    require_binary()
    async with EmbeddedServer() as server, announced(server.url, fleet, "a"):
        with on_terminal("top", "--nats", server.url, "--fleet", fleet, size=(80, 24)) as terminal:
            await until(terminal, r"serving +a")
            await server.kill()
            await until(terminal, r"the connection to NATS is down; this is what was known \d+ s ago(?s:.)*serving +a")
            # This test needs an outage of that length.
            await asyncio.sleep(3)
            await server.restart()
            await until(terminal, r"tokens/s[^\n]*\r?\n[^\n]*model +workers")
            terminal.press(b"q")
            assert await asyncio.to_thread(terminal.read_to_end) == ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_leaves_the_terminal_as_before(nats_url: str, fleet: str, number: signal.Signals) -> None:
    """After a signal, `top` has left the alternate screen, shown the cursor and restored the terminal's settings.

    Ctrl-Z does so too, and `fg` continues the full screen.
    """
    async with announced(nats_url, fleet, "a"):
        with on_terminal("top", "--nats", nats_url, "--fleet", fleet, size=(80, 24)) as terminal:
            before = terminal.settings()
            await until(terminal, r"serving +a")
            assert terminal.settings() != before
            terminal.signal(signal.SIGTSTP)
            await until(terminal, re.escape(LEAVE))
            # It stops itself after it has restored everything. A SIGCONT before that would not continue it.
            assert await asyncio.to_thread(becomes_true, lambda: state_of(terminal.pid) == "T")
            assert terminal.settings() == before
            terminal.signal(signal.SIGCONT)
            await until(terminal, r"serving +a")
            terminal.signal(number)
            assert await asyncio.to_thread(terminal.read_to_end) == ExitCode.OK
            assert terminal.settings() == before
            assert SHOW_CURSOR in terminal.text
            assert LEAVE in terminal.text


def test_an_error_leaves_the_terminal_as_before() -> None:
    """After an error, the terminal is restored, and the traceback is on the normal screen."""
    with on_terminal(size=(80, 24), program=(sys.executable, "-P", "-c", FAILING)) as terminal:
        before = terminal.settings()
        assert terminal.read_to_end() == 1
        assert terminal.settings() == before
    _, drawn, after = re.split(f"{re.escape(ENTER)}|{re.escape(LEAVE)}", terminal.text)
    assert "drawn" in drawn
    assert "RuntimeError: in the middle" in after


async def test_top_prints_the_tables_once_into_a_pipe(nats_url: str, fleet: str) -> None:
    """If stdout is not a terminal, `top` prints the tables once. With --json, it prints the rates by name."""
    async with announced(nats_url, fleet, "a"):
        table = await run_rollbus(nats_url, fleet, "top")
        tokens_per_s = 0.0
        # A busy machine may miss the second presence of the worker.
        while not tokens_per_s:
            written = await run_rollbus(nats_url, fleet, "top", "--json")
            rates = json.loads(written.stdout)["rates"]
            tokens_per_s = rates["fleet"]["tokens_per_s"]

    assert (table.code, table.stderr) == (ExitCode.OK, "")
    assert re.search(r"^serving +a +m ", table.stdout, re.MULTILINE)
    assert "\x1b" not in table.stdout
    assert rates["workers"]["a"]["tokens_per_s"] == rates["models"]["m"]["tokens_per_s"] == tokens_per_s


async def test_without_workers_top_exits_with_code_5(nats_url: str, fleet: str) -> None:
    """Without workers, the exit code is 5, as with `status`. An invalid interval is a usage error."""
    done, wrong = await run_together(nats_url, fleet, "top --once", "top --interval 0")

    assert (done.code, done.stdout) == (ExitCode.NO_WORKERS, "")
    assert f"rollbus: fleet {fleet} has no workers at {nats_url}; " in done.stderr
    assert wrong.code == ExitCode.USAGE


async def test_top_waits_for_a_stopped_terminal(nats_url: str, fleet: str) -> None:
    """If the terminal is stopped, as by Ctrl-S, `top` waits and continues later without losing output."""
    async with announced(nats_url, fleet, *(f"w{number:02}" for number in range(60))):
        args = ("top", "--nats", nats_url, "--fleet", fleet, "--interval", "0.1")
        with on_terminal(*args, size=(400, 150)) as terminal:
            await until(terminal, "q quit")
            # The screens of that time exceed the buffer of the terminal.
            await asyncio.sleep(3)
            await until(terminal, "of 60")
            terminal.press(b"q")
            assert await asyncio.to_thread(terminal.read_to_end) == ExitCode.OK

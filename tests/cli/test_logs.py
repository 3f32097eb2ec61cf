"""With `--log-format json`, all stderr output of a command is lines of JSON."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import rollbus, running_up

pytestmark = pytest.mark.slow

KEYS = {"time", "level", "logger", "event", "fields"}


def lines_of(text: str) -> list[dict[str, Any]]:
    """Return the events on stderr, and check that each line is an event."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert [line for line in lines if not set(line) >= KEYS] == []
    return lines


def test_the_whole_fleet_logs_json(tmp_path: Path) -> None:
    """With `--log-format json`, each log line of a fleet is a JSON object. Lines of a worker name the worker."""
    log = tmp_path / "log"
    options = ("--engine", "synthetic", "--http", "127.0.0.1:0", "--log-format", "json", "-v")
    with running_up(*options, log=log) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0

    lines = lines_of(log.read_text())
    assert ("worker.serving", "local-0") in {(line["event"], line.get("process")) for line in lines}
    assert {"nats_server.started", "message"} <= {line["event"] for line in lines}
    assert {"uvicorn.error", "rollbus"} <= {line["logger"] for line in lines}
    assert [type(line["fields"]["pid"]) for line in lines if line["event"] == "nats_server.started"] == [int]


@pytest.mark.parametrize(
    ("argv", "event"), [(["status", "-v"], "command.failed"), (["worker", "--engine", "synthetic"], "worker.failed")]
)
def test_a_failure_is_logged_as_one_event(argv: list[str], event: str) -> None:
    """A failure of a command or a worker is one event. With -v, it has the traceback."""
    done = rollbus(*argv, "--log-format", "json", "--fleet", "f", nats="nats://user:geheim@host:port")

    last = lines_of(done.stderr)[-1]
    assert (done.returncode, last["level"], last["event"]) == (1, "error", event)
    assert last["fields"]["error"].startswith("'nats://***@host:port' is not a URL")
    assert ("traceback" in last) == ("-v" in argv)
    assert "geheim" not in done.stderr

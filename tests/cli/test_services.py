"""`rollbus frontend` and `rollbus up --http` as separate processes, with synthetic workers."""

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.local.http import bind_address
from tests.cli.support import ENV, Running, descendants_of, rollbus, running, running_up
from tests.support.processes import becomes_true
from tests.support.waits import Shared

pytestmark = pytest.mark.slow


ANY = "127.0.0.1:0"


@pytest.fixture
def fleet_url(ups: Shared[tuple[Any, dict[str, Any]]]) -> tuple[str, str]:
    """Return the addresses of NATS and HTTP."""
    _, info = ups.get()
    return info["nats"], info["http"]


def running_frontend(nats: str, log: Path, *args: str, **env: str) -> Running:
    """Run `rollbus frontend --json`."""
    return running("frontend", *args, log=log, env={**ENV, "ROLLBUS_NATS": nats, **env})


def test_up_serves_http(fleet_url: tuple[str, str]) -> None:
    """After `up` reports that it is up, the HTTP service answers requests with tokens of its worker."""
    _, http = fleet_url
    assert httpx.get(f"{http}/health").status_code == 200
    assert [model["id"] for model in httpx.get(f"{http}/v1/models").json()["data"]] == ["synthetic"]
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    answer = httpx.post(f"{http}/inference/v1/generate", json=body)
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["token_ids"]) == 4


def test_frontend_starts_and_stops(fleet_url: tuple[str, str], tmp_path: Path) -> None:
    """`frontend` prints its address and serves. After Ctrl-C, it exits with 0 and leaves no process or listener.

    It accepts its own host and each --allowed-host, and refuses any other Host header.
    """
    names = ("--http", "localhost:0", "--allowed-host", "fleet.example.com", "--allowed-host", "Other")
    with running_frontend(fleet_url[0], tmp_path / "log", *names) as (process, info):
        http = info["http"]
        for name, status in (("fleet.example.com", 200), ("other:80", 200), ("localhost", 200), ("example.com", 403)):
            assert httpx.get(f"{http}/health", headers={"Host": name}).status_code == status
        assert becomes_true(lambda: len(httpx.get(f"{http}/v1/models").json()["data"]) == 1)
        assert descendants_of(process.pid) == []
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0

    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{http}/health")
    assert (tmp_path / "log").read_text() == f"HTTP: {http}\nPage: {http}/\nstopped\n"


def test_tokens_come_from_the_environment(fleet_url: tuple[str, str], tmp_path: Path) -> None:
    """With tokens in the environment, a data route without a token gives 401. Admin routes refuse the data token."""
    tokens = {"ROLLBUS_HTTP_TOKEN": "data", "ROLLBUS_ADMIN_TOKEN": "admin"}
    with running_frontend(fleet_url[0], tmp_path / "log", "--http", ANY, **tokens) as (_, info):

        def status(method: str, path: str, token: str | None) -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            return httpx.request(method, f"{info['http']}{path}", headers=headers).status_code

        assert [status("GET", "/v1/models", token) for token in (None, "data", "admin")] == [401, 200, 200]
        assert [status("POST", "/v1/rl/resume", token) for token in (None, "data")] == [401, 401]
        assert status("GET", "/health", None) == 200


@pytest.mark.parametrize("subcommand", [("frontend",), ("up", "--engine", "synthetic", "--nats", "nats://127.0.0.1:0")])
def test_an_unusable_address_is_reported_in_one_line(subcommand: tuple[str, ...], fleet_url: tuple[str, str]) -> None:
    """If the address is in use or belongs to another machine, the command fails with code 1 before it starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("192.0.2.1", 8080)):
            ended = rollbus(*subcommand, "--http", f"{host}:{port}", nats=fleet_url[0])
            lines = [line for line in ended.stderr.splitlines() if not line.startswith(("listening", "warning"))]
            assert (ended.returncode, ended.stdout, len(lines)) == (ExitCode.FAILED, "", 1)
            assert lines[0].startswith(f"rollbus: --http {host}:{port}: ")


def test_a_service_that_other_machines_reach_warns_of_missing_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If other machines can reach the service, it logs a warning for each token that is not set."""
    monkeypatch.setenv("ROLLBUS_HTTP_TOKEN", "data")
    monkeypatch.delenv("ROLLBUS_ADMIN_TOKEN", raising=False)
    bind_address("0.0.0.0", 0).close()
    assert capsys.readouterr().err.splitlines() == [
        "listening on 0.0.0.0: other machines can reach this service",
        "warning: ROLLBUS_ADMIN_TOKEN is not set: the service accepts requests without this token",
    ]


def test_frontend_without_nats_reports_one_line() -> None:
    """Without a NATS server, `frontend` exits with code 1 and one line that names the address."""
    ended = rollbus("frontend", "--http", ANY, nats="nats://127.0.0.1:9")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (ExitCode.FAILED, "", 1)
    assert "127.0.0.1:9" in ended.stderr


# `rollbus up --secure`: a fleet on this machine that accepts only connections with credentials.


def test_up_accepts_only_connections_with_credentials(tmp_path: Path) -> None:
    """The parts of the fleet have credentials. A viewer reads, a trainer generates, an admin pauses.

    A connection without credentials is refused.
    """
    auth, log = tmp_path / "auth", tmp_path / "log"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}) + "\n")
    options = ("--secure", "--auth-dir", str(auth), "--engine", "synthetic", "--workers", "2", "--http", "127.0.0.1:0")
    with running_up(*options, log=log) as (process, told):
        url = told["nats"]
        creds = {path.stem.partition("-")[0]: str(path) for path in (auth / "default").glob("*.creds")}
        seeds = [json.loads(path.read_bytes())["seed"] for path in (auth / "default").glob("*.creds")]
        seeds.append((auth / "default" / "root.seed").read_text().strip())
        nobody = rollbus("status", nats=url)
        seen = rollbus("status", "--json", "--creds", creds["viewer"], nats=url)
        output = ("--output", str(tmp_path / "out.jsonl"), "--json", "--creds", creds["trainer"])
        generated = rollbus("generate", "--input", str(prompts), *output, nats=url)
        paused = rollbus("pause", "--creds", creds["admin"], nats=url)
        refused = rollbus("resume", "--creds", creds["trainer"], nats=url)
        listing = "".join(_arguments(pid) for pid in [process.pid, *descendants_of(process.pid)])

    assert (nobody.returncode, "Authorization Violation" in nobody.stderr) == (1, True)
    assert [worker["state"] for worker in json.loads(seen.stdout)["workers"]] == ["serving", "serving"]
    assert json.loads(generated.stdout)["done"] == 1
    assert (paused.returncode, refused.returncode) == (0, 1)
    assert "user trainer (role trainer) may not record commands; roles that may: frontend, admin" in refused.stderr
    assert len(seeds) == 7
    for text in (listing, log.read_text(), json.dumps(told)):
        assert [seed for seed in seeds if seed in text] == []
    assert "Violation" not in log.read_text()


def _arguments(pid: int) -> str:
    """Return the command line of a process."""
    return subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout


def test_auth_dir_without_secure_is_a_usage_error(tmp_path: Path) -> None:
    """--auth-dir without --secure is a usage error, because it would secure nothing."""
    done = rollbus("up", "--auth-dir", str(tmp_path))

    assert (done.returncode, "--auth-dir requires --secure" in done.stderr) == (2, True)


# With `--log-format json`, all stderr output of a command is lines of JSON.


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

"""The worker process reports invalid arguments, and exits when its parent exits."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

import rollbus
from rollbus.bus.auth.credentials import Role
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.worker_metrics import exposition
from rollbus.schemas.presence import EngineStats, WorkerCounters, WorkerPresence, WorkerState
from rollbus.schemas.weights import PublishedVersion
from rollbus.workers import __main__ as main
from rollbus.workers import probe as probe_module
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.probe import MAX_CONNECTIONS, MAX_HEAD_BYTES, ProbeServer, listen
from rollbus.workers.sources.threads import Job, run_quietly
from rollbus.workers.worker import Worker
from tests.support.fleet import presence, until_worker
from tests.support.nats_server import require_binary
from tests.support.processes import worker_process
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import HANGS_AFTER_S, SOON_S

pytestmark = pytest.mark.slow

BAD_COMMAND_LINES = {
    "no model": (["--engine", "vllm"], "--model is required"),
    "engine": (["--engine", "other"], "invalid choice: 'other'"),
    "worker id": (["--engine", "synthetic", "--worker-id", "a.b"], "worker_id is 'a.b'; allowed: 1 to"),
    "fleet": (["--engine", "synthetic", "--fleet", "a b"], "fleet is 'a b'; allowed: 1 to"),
    "weight version": (
        ["--engine", "synthetic", "--weight-version", "-1"],
        "'-1' is not an integer of at least 0",
    ),
    "lease": (["--engine", "synthetic", "--lease-s", "1"], "lease_s is 1.0; allowed: a number from 2"),
    "engine timeout": (
        ["--engine", "synthetic", "--engine-timeout-s", "0"],
        "'0' is not a duration above 0",
    ),
    "engine args json": (["--engine", "synthetic", "--engine-args", "{"], "--engine-args: not JSON: "),
    "engine args list": (["--engine", "synthetic", "--engine-args", "[]"], "--engine-args: not a JSON object"),
    "engine args name": (["--engine", "synthetic", "--engine-args", '{"foo": 1}'], "unknown field `foo`"),
}


@pytest.mark.parametrize("name", BAD_COMMAND_LINES)
def test_a_bad_argument_ends_the_worker_with_exit_code_2(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad argument ends the process with exit code 2 and one line with the argument and the allowed values."""
    arguments, message = BAD_COMMAND_LINES[name]
    monkeypatch.setattr(main, "set_up", lambda *_: None)
    try:
        exit_code: object = main.main(arguments)
    except SystemExit as exc:
        exit_code = exc.code

    assert exit_code == 2
    assert message in capsys.readouterr().err


def stderr_of(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    """Return the process's stderr."""
    if process.stderr is None:
        raise RuntimeError("its stderr is not read")
    return process.stderr


async def test_without_a_server_a_worker_waits_for_the_server(nats_url: str, fleet: str) -> None:
    """Without a server, a worker logs one line and waits, alive and not ready. It serves as soon as the server runs."""
    port = free_port()
    async with tcp_proxy(nats_url) as proxy, asyncio.timeout(HANGS_AFTER_S):
        proxy.cut()
        async with worker_process(proxy.url, fleet, "--probe", f"127.0.0.1:{port}", stderr=PIPE) as process:
            line = await stderr_of(process).readline()
            if b"probe.started" in line:
                line = await stderr_of(process).readline()
            health, ready = await get(port, "/health"), await get(port, "/ready")
            await proxy.restore()
            async with rollbus.connect(nats_url, fleet=fleet) as rb:
                await rb.fleet.wait_for_workers(timeout_s=SOON_S)
            process.terminate()
            rest = await stderr_of(process).read()
            assert await process.wait() == 0

    assert f"worker.server_awaited error=no NATS server at {proxy.url}" in line.decode()
    assert b"server_awaited" not in rest
    assert (health[0], ready[0]) == (200, 503)
    assert json.loads(ready[2]) == {"state": "connecting"}


async def test_a_worker_tries_again_until_it_has_connected(nats_url: str, fleet: str) -> None:
    """If no server answers at the first attempt, the worker tries again and serves without a restart."""
    async with tcp_proxy(nats_url) as proxy, asyncio.timeout(HANGS_AFTER_S), asyncio.TaskGroup() as tasks:
        proxy.cut()
        config = WorkerConfig(nats_url=proxy.url, fleet=fleet, worker_id="w", model="m", listen_s=0)
        workers: list[Worker] = []

        def make(config: WorkerConfig) -> Worker:
            workers.append(Worker(config, SyntheticEngine(SyntheticConfig())))
            if len(workers) == 2:  # the first attempt has failed
                tasks.create_task(proxy.restore())
            return workers[-1]

        tasks.create_task(main.serve(config, make))
        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers(timeout_s=SOON_S)
        workers[-1].stop()

    assert len(workers) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_a_worker_that_waits_for_a_server(number: signal.Signals) -> None:
    """A signal ends a waiting worker with exit code 0, as it ends a serving worker."""
    async with worker_process("nats://127.0.0.1:1", "f", stderr=PIPE) as process, asyncio.timeout(HANGS_AFTER_S):
        await stderr_of(process).readline()
        process.send_signal(number)
        assert await process.wait() == 0


async def test_a_worker_with_rejected_credentials_exits_without_a_wait(tmp_path: Path) -> None:
    """If the server rejects its credentials, a worker does not wait: it prints the remedy and exits with 1."""
    require_binary()
    [entry] = ensure_users(tmp_path, [("f", Role.WORKER, "w")])
    async with (
        EmbeddedServer(users=[entry.user]) as server,
        worker_process(server.url, "f", stderr=PIPE) as process,
        asyncio.timeout(HANGS_AFTER_S),
    ):
        stderr = await process.stderr.read()

    assert process.returncode == 1
    [line] = stderr.decode().splitlines()
    assert "it received no credentials: set --creds FILE" in line


async def test_a_worker_stops_with_its_parent(nats_url: str, fleet: str) -> None:
    """A worker stops in order when the pipe of its parent closes, as it does at the parent's death."""
    read_end, write_end = os.pipe()
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollbus.workers", "--nats", nats_url, "--fleet", fleet),
            *("--engine", "synthetic", "--parent-pipe", str(read_end)),
            pass_fds=[read_end],
        )
        os.close(read_end)
        try:
            await rb.fleet.wait_for_workers()
        finally:
            os.close(write_end)
        async with asyncio.timeout(SOON_S):
            assert await process.wait() == 0


# The probe of a worker for supervisors: liveness, readiness and metrics, which no request can harm.


Answer = tuple[int, dict[str, str], bytes]


async def send(port: int, data: bytes) -> bytes:
    """Return the whole answer to these bytes."""
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        answer = await reader.read()
    writer.close()
    return answer


async def get(port: int, path: str) -> Answer:
    """Return the status, headers and body of the answer to a GET."""
    data = await send(port, f"GET {path} HTTP/1.1\r\nHost: worker\r\n\r\n".encode())
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, body


@contextlib.asynccontextmanager
async def probed(described: WorkerPresence | None) -> AsyncIterator[int]:
    """Yield the port of the probe of a worker with this presence."""
    async with ProbeServer(listen("127.0.0.1:0"), lambda: described) as probe:
        yield probe.port


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.UNKNOWN])
async def test_only_a_dead_engine_fails_liveness_and_only_a_serving_worker_is_ready(state: WorkerState) -> None:
    """A paused, updating, fenced or loading worker is alive, so that no supervisor ends it.

    The body contains the state.
    """
    async with probed(presence(state=state)) as port:
        health, ready = await get(port, "/health"), await get(port, "/ready")

    assert health[0] == (503 if state is WorkerState.FAILED else 200)
    assert ready[0] == (200 if state is WorkerState.SERVING else 503)
    assert json.loads(health[2]) == json.loads(ready[2]) == {"state": str(state)}


async def test_a_worker_without_a_connection_is_alive_and_not_ready() -> None:
    """A worker that waits for NATS is alive, because a restart would not help. It has no metrics yet."""
    async with probed(None) as port:
        assert (await get(port, "/health"))[::2] == (200, b'{"state": "connecting"}\n')
        assert (await get(port, "/ready"))[0] == 503
        assert (await get(port, "/metrics"))[::2] == (200, b"")


def test_metrics_are_prometheus_text() -> None:
    """Each metric has its type, counters end in _total, and unknown values have no series."""
    described = presence(
        worker="w-1",
        model='a\\"b',
        counters=WorkerCounters(requests=3, first_tokens=2, first_tokens_s=0.5),
        engine_stats=EngineStats(running=2, kv_cache_use=0.25, prefix_cache_hits=64),
    )
    families = {family.name: family for family in text_string_to_metric_families(exposition([described]))}
    found: dict[str, Any] = {
        sample.name: (sample.labels, sample.value) for family in families.values() for sample in family.samples
    }
    own, vllm = {"worker": "w-1", "model": 'a\\"b'}, {"model_name": 'a\\"b', "engine": "w-1", "worker": "w-1"}

    assert found["rollbus_worker_requests_total"] == (own, 3)
    assert found["rollbus_worker_time_to_first_token_seconds_sum"] == (own, 0.5)
    assert found["rollbus_worker_state"] == ({**own, "state": "serving"}, 1)
    assert found["vllm:num_requests_running"] == (vllm, 2)
    assert found["vllm:kv_cache_usage_perc"] == (vllm, 0.25)
    assert found["vllm:prefix_cache_hits_total"] == (vllm, 64)
    assert not {"vllm:num_requests_waiting", "vllm:prefix_cache_queries_total"} & found.keys()
    assert families["vllm:prefix_cache_hits"].type == "counter"
    assert families["rollbus_worker_time_to_first_token_seconds"].type == "summary"


def test_metrics_have_the_fields_of_the_published_version() -> None:
    """The metrics have the fields of `PublishedVersion`. A store without a limit has no series for the limit."""
    known = PublishedVersion(version=8, stored_bytes=1, model_bytes=2, chain_length=3, used_bytes=4, limit_bytes=5)
    described = [
        presence(worker="w-1", published=known),
        presence(worker="w-2", published=replace(known, limit_bytes=0)),
    ]
    found = {
        (sample.name.removeprefix("rollbus_weights_"), sample.labels["worker"]): sample.value
        for family in text_string_to_metric_families(exposition([*described, presence(worker="w-3")]))
        for sample in family.samples
        if family.name.startswith("rollbus_weights_")
    }

    limited = {"stored_bytes": 1, "model_bytes": 2, "chain_length": 3, "store_used_bytes": 4, "store_limit_bytes": 5}
    assert found == {
        (name, worker): value
        for name, value in limited.items()
        for worker in ("w-1", "w-2")
        if (name, worker) != ("store_limit_bytes", "w-2")
    }


@pytest.mark.parametrize(
    ("stats", "ratio"),
    [
        ({"prefix_cache_queries": 200, "prefix_cache_hits": 50}, 0.25),
        ({"prefix_cache_queries": 200, "prefix_cache_hits": 0}, 0),
        ({"prefix_cache_queries": 0, "prefix_cache_hits": 0}, None),
        ({"prefix_cache_hits": 50}, None),
        ({}, None),
    ],
)
def test_the_hit_ratio_has_no_series_before_the_first_lookup(stats: dict[str, int], ratio: float | None) -> None:
    """Before the first lookup, and for an engine without counts, the hit ratio has no series."""
    described = presence(engine_stats=EngineStats(**stats))
    families = {family.name: family for family in text_string_to_metric_families(exposition([described]))}

    found = [sample.value for sample in families["rollbus_worker_prefix_cache_hit_ratio"].samples]

    assert found == ([] if ratio is None else [ratio])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /health HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /health HTTP/2\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /../health HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n", b"431"),
    ],
)
async def test_the_answer_to_an_invalid_request_has_the_allowed_requests(data: bytes, status: bytes) -> None:
    """Each invalid request gets an answer with the allowed requests, and its connection is closed."""
    async with probed(presence()) as port:
        answer = await send(port, data)
        assert (await get(port, "/health?x=1"))[0] == 200

    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"allowed: " in answer


async def test_a_connection_with_an_incomplete_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection with an incomplete request is closed after the timeout."""
    monkeypatch.setattr(probe_module, "TIMEOUT_S", 0.05)
    async with probed(presence()) as port:
        assert await send(port, b"GET /health HT") == b""


async def test_idle_connections_do_not_block_a_health_check() -> None:
    """One connection above the maximum is answered, and the oldest is closed without an answer.

    The other connections are answered.
    """
    async with probed(presence()) as port:
        (oldest, first), *opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        assert (await get(port, "/ready"))[0] == 200
        async with asyncio.timeout(SOON_S):
            with contextlib.suppress(ConnectionResetError):
                assert await oldest.read() == b""
        first.close()
        for reader, writer in opened:
            writer.write(b"GET /ready HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(SOON_S):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        assert (await get(port, "/ready"))[0] == 200


async def test_the_end_of_the_probe_closes_its_connections_and_its_port() -> None:
    """At the end of the probe, open connections are closed and the port is free."""
    before = asyncio.all_tasks()
    async with probed(presence()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await get(port, "/health"))[0] == 200
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("address", ["", "8081", ":8081", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536"])
def test_the_error_names_a_malformed_address(address: str) -> None:
    """The error names the option, the value and the allowed format."""
    with pytest.raises(rollbus.InvalidRequest, match=r"--probe is .*; allowed: HOST:PORT"):
        listen(address)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def test_a_paused_worker_is_alive_and_not_ready(nats_url: str, fleet: str) -> None:
    """With `--probe`, a worker process is ready while it serves, and alive also during a pause."""
    port = free_port()
    async with (
        worker_process(nats_url, fleet, "--worker-id", "w", "--probe", f"127.0.0.1:{port}"),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await until_worker(rb, "w", WorkerState.SERVING)
        assert (await get(port, "/ready"))[0] == 200
        metrics = (await get(port, "/metrics"))[2].decode()
        await rb.fleet.pause()
        assert (await get(port, "/health"))[::2] == (200, b'{"state": "paused"}\n')
        assert (await get(port, "/ready"))[0] == 503
    assert 'rollbus_worker_state{worker="w",model="synthetic",state="serving"} 1.0' in metrics
    assert 'vllm:num_requests_running{model_name="synthetic",engine="w",worker="w"} 0.0' in metrics


async def test_a_worker_exits_with_one_line_if_the_address_is_in_use(nats_url: str, fleet: str) -> None:
    """If the address is in use, the worker exits with 1 before it does anything, with one line that names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with worker_process(nats_url, fleet, "--probe", address, stderr=PIPE) as process:
            stderr = await process.stderr.read()

    assert process.returncode == 1
    [line] = stderr.decode().splitlines()
    assert line == f"rollbus worker: cannot listen at --probe {address}: Address already in use"


# Work beside an engine runs on separate threads, and is prepared there too.


async def test_jobs_are_created_outside_of_the_event_loop() -> None:
    """Jobs are created outside of the event loop, so that requests do not wait for them.

    There may be a job for each of thousands of tensors, and some jobs read a file.
    """
    made_on: list[int] = []
    done: list[int] = []

    def jobs() -> Iterator[Job]:
        for _ in range(3):
            made_on.append(threading.get_ident())
            yield lambda _scratch: done.append(threading.get_ident())

    await run_quietly(jobs())

    assert len(made_on) == len(done) == 3
    assert threading.get_ident() not in {*made_on, *done}


async def test_jobs_of_a_caller_that_is_cancelled_twice_do_not_block_the_event_loop() -> None:
    """A caller that is cancelled again while it waits for a running job goes on waiting beside the event loop."""
    began, may_end = threading.Event(), threading.Event()

    def job(_scratch: object) -> None:
        began.set()
        may_end.wait(SOON_S)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(run_quietly([job]))
        await asyncio.to_thread(began.wait)
        for _ in range(10):
            running.cancel()
            await asyncio.sleep(0)
        assert not running.done()
        may_end.set()
    assert running.cancelled()

"""Two `rollbus frontend` processes behind a balancer: one is killed or stops, and the other has all that it began."""

import asyncio
import itertools
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollbus
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.cli.support import CLI
from tests.cli.test_services import ANY
from tests.control.support import write_checkpoint
from tests.support.fleet import synthetic_worker, until_state
from tests.support.forks import Fork
from tests.support.processes import forked
from tests.support.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.waits import SOON_S, until, until_true

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"
LONG = {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 60_000, "ignore_eos": True}}
SHORT = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}


@asynccontextmanager
async def service(nats_url: str, fleet: str, log: Path, *options: str) -> AsyncIterator[tuple[Fork, str]]:
    """Run `rollbus frontend`. Yield the process and its address."""
    args = ("frontend", "--json", "--http", ANY, "--fleet", fleet, *options)
    with log.open("w") as stderr:
        env = {**os.environ, "ROLLBUS_NATS": nats_url}
        async with forked(CLI, args, streams=(None, PIPE, stderr.fileno()), env=env) as process:
            line = await process.stdout.readline()
            assert line, f"the service ended, see {log}"
            yield process, json.loads(line)["http"]


class Services:
    """The services, by name `a` and `b`, and the balancer in front, which takes turns and leaves out a dead one."""

    def __init__(self, nats_url: str, fleet: str, folder: Path, proxy: TcpProxy) -> None:
        self._start = nats_url, fleet, folder
        self._proxy = proxy
        self._turns: Iterator[str] = iter(())
        self.processes: dict[str, Fork] = {}
        self.urls: dict[str, str] = {}

    @asynccontextmanager
    async def running(self, name: str, *options: str) -> AsyncIterator[None]:
        """Run one service while the block lasts."""
        nats_url, fleet, folder = self._start
        async with service(nats_url, fleet, folder / f"{name}.log", *options) as (process, url):
            self.processes[name], self.urls[name] = process, url
            self._turns = itertools.cycle(self.urls)
            yield

    @property
    def url(self) -> str:
        """URL of the balancer. Its next connection goes to the next service."""
        running = [name for name, process in self.processes.items() if process.returncode is None]
        name = next(name for name in self._turns if name in running)
        self._proxy.lead_to(self.urls[name])
        return self._proxy.url.replace("nats:", "http:")

    async def kill(self, name: str) -> None:
        """End a service with SIGKILL."""
        self.processes[name].kill()
        await self.processes[name].wait()


@asynccontextmanager
async def two_services(
    nats_url: str, fleet: str, tmp_path: Path, *options: str, max_num_seqs: int = 64
) -> AsyncIterator[tuple[Services, httpx.AsyncClient, rollbus.Client]]:
    """Run two services of a fleet with one synthetic worker."""
    checkpoint = str(write_checkpoint(tmp_path / "root" / "one", seed=1))
    write_checkpoint(tmp_path / "root" / "two", seed=2)
    fields: dict[str, Any] = {
        "model_path": checkpoint,
        "weight_roots": (str(tmp_path / "root"),),
        "weight_version": 1,
        "cache_dir": str(tmp_path / "cache"),
    }
    async with AsyncExitStack() as stack:
        config = SyntheticConfig(step_s=0.02, max_num_seqs=max_num_seqs)
        await stack.enter_async_context(synthetic_worker(nats_url, fleet, config=config, worker_id="w0", **fields))
        proxy = await stack.enter_async_context(tcp_proxy("http://127.0.0.1:9"))
        services = Services(nats_url, fleet, tmp_path, proxy)
        for name in ("a", "b"):
            await stack.enter_async_context(services.running(name, *options))
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet))
        await rb.fleet.wait_for_workers()
        # A connection for each request: the balancer chooses by connection.
        limits = httpx.Limits(max_keepalive_connections=0)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=SOON_S, limits=limits))
        for url in services.urls.values():
            # Not /ready, which loads the tokenizer.
            while not (await client.get(f"{url}/v1/models")).json()["data"]:
                pass
        yield services, client, rb


class Stream:
    """A streamed request, read in the background."""

    def __init__(self, client: httpx.AsyncClient, url: str, request_id: str, body: dict[str, Any] = LONG) -> None:
        self._request = client.build_request("POST", url + GENERATE, json=body, headers={"X-Request-Id": request_id})
        self._client = client
        self.tokens: list[int] = []
        self.problem: Exception | None = None
        self.finish_reason: str | None = None

    async def read(self) -> None:
        """Read to the end. A broken connection ends the stream with a problem."""
        try:
            answer = await self._client.send(self._request, stream=True)
            async with aclosing(answer):
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, event
                        [choice] = event["choices"]
                        self.tokens += choice["token_ids"]
                        self.finish_reason = choice["finish_reason"]
        except httpx.TransportError as error:
            self.problem = error


async def test_a_killed_service_leaves_the_streams_of_the_other(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """SIGKILL of one of two services breaks its streams only. The other lists, traces and aborts all requests.

    The worker ends the requests of the dead service. The balancer's next requests succeed.
    """
    async with two_services(nats_url, fleet, tmp_path) as (services, client, rb), asyncio.TaskGroup() as tasks:
        streams = {name: Stream(client, services.urls[name], f"of-{name}") for name in ("a", "b")}
        reading = {name: tasks.create_task(stream.read()) for name, stream in streams.items()}
        await until_true(lambda: all(stream.tokens for stream in streams.values()))
        both = [(await client.get(f"{services.url}/v1/rl/request_list")).json()["timelines"] for _ in range(2)]
        traces = [(await client.get(f"{services.url}/v1/rl/requests/of-a")).json()["timelines"] for _ in range(2)]

        await services.kill("a")
        await reading["a"]
        had = len(streams["b"].tokens)
        await until_true(lambda: len(streams["b"].tokens) > had)
        after = [await client.post(services.url + GENERATE, json=SHORT) for _ in range(3)]
        trace = (await client.get(f"{services.url}/v1/rl/requests/of-a")).json()["timelines"]
        await until_state(rb, lambda state: state.workers[0].in_flight == 1)
        had = len(streams["b"].tokens)
        await until_true(lambda: len(streams["b"].tokens) > had)
        aborted = await client.post(f"{services.url}/v1/rl/abort", json={"request_ids": ["of-b"]})
        await reading["b"]

    ids = [{each["request_id"] for each in lines} for lines in both]
    assert (len(ids[0]), ids[0]) == (2, ids[1])
    assert [len(lines) for lines in traces] == [1, 1]
    assert streams["a"].problem is not None
    assert (streams["b"].problem, streams["b"].finish_reason) == (None, "abort")
    assert [answer.status_code for answer in after] == [200] * 3
    assert [line["number"] for line in trace] == [1]
    assert aborted.json()["aborted"] == 1


async def test_what_waits_at_a_killed_service_is_unknown_at_the_other(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A request that waits for its turn at one process is aborted at the other; after SIGKILL of the first it is 404.

    Until its lease has ended, the other service names it as silent.
    """
    async with (
        two_services(nats_url, fleet, tmp_path, max_num_seqs=1) as (services, client, _),
        asyncio.TaskGroup() as tasks,
    ):
        first, second = services.urls["a"], services.urls["b"]
        # One runs, nine are in the queue, and the others wait at the service.
        streams = {str(number): Stream(client, first, f"of-{number}") for number in range(14)}
        reading = {name: tasks.create_task(stream.read()) for name, stream in streams.items()}
        stages: dict[str, str] = {}
        while list(stages.values()).count("turn") < 2:
            listed = (await client.get(f"{second}/v1/rl/request_list")).json()["waiting"]["requests"]
            stages = {each["request_id"].removeprefix("of-"): each["stage"] for each in listed}
        one, other = [name for name, stage in stages.items() if stage == "turn"][:2]
        aborted = await client.post(f"{second}/v1/rl/abort", json={"request_ids": [f"of-{one}"]})
        await reading[one]

        await services.kill("a")
        unknown = await client.post(f"{second}/v1/rl/abort", json={"request_ids": [f"of-{other}"]})
        shown = await client.get(f"{second}/v1/rl/requests/of-{other}")

    assert (aborted.json()["aborted"], streams[one].finish_reason) == (1, "abort")
    assert streams[other].problem is not None
    for answer in (unknown, shown):
        assert answer.status_code == 404, answer.text
    assert "No answer from HTTP services" in unknown.json()["error"]["message"]


async def test_an_operation_of_a_killed_service_is_found_and_repeated_at_the_other(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A command is recorded once for each key. Its operation is found under the key, and a repeat gets its result.

    The key of a recorded command with other fields is 422, and a key with other characters 400.
    """
    key, body = {"Idempotency-Key": "step-7"}, {"mode": "wait"}
    async with two_services(nats_url, fleet, tmp_path) as (services, client, rb), asyncio.TaskGroup() as tasks:
        stream = Stream(client, services.urls["b"], "long")
        reading = tasks.create_task(stream.read())
        await until_true(lambda: bool(stream.tokens))

        async def pause_at(url: str) -> httpx.Response | httpx.TransportError:
            try:
                return await client.post(f"{url}/v1/rl/pause", json=body, headers=key)
            except httpx.TransportError as error:
                return error

        first = tasks.create_task(pause_at(services.urls["a"]))
        while "pause" not in getattr((await rb.fleet.state()).desired.get("synthetic"), "registers", ()):
            assert not first.done(), getattr(first.result(), "text", first.result())
        found = [(await client.get(f"{services.url}/v1/rl/operations/step-7")).json() for _ in range(2)]
        await services.kill("a")
        lost = await first
        repeated = tasks.create_task(pause_at(services.url))
        other = await client.post(f"{services.url}/v1/rl/pause", json={"mode": "keep"}, headers=key)
        wrong = await client.post(f"{services.url}/v1/rl/pause", json=body, headers={"Idempotency-Key": "a b"})
        # The pause waits for this request.
        reading.cancel()
        answer = await repeated
        done = (await client.get(f"{services.url}/v1/rl/operations/step-7")).json()
        epochs = {state.epoch for state in (await rb.fleet.state()).desired.values()}

        await client.post(f"{services.url}/v1/rl/resume")
        update = {"path": str(tmp_path / "root" / "two"), "version": 2}
        updates = [
            await client.post(f"{services.url}/v1/rl/update_weights", json=update, headers={"Idempotency-Key": "v2"})
            for _ in range(2)
        ]
        updated = (await client.get(f"{services.url}/v1/rl/operations/v2")).json()

    assert [(each["operation"], each["status"], each["mode"]) for each in found] == [("pause", "running", "wait")] * 2
    assert isinstance(lost, httpx.TransportError)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "key_reused")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert isinstance(answer, httpx.Response)
    assert (answer.status_code, answer.json()["status"], epochs) == (200, "paused", {1})
    assert done["status"] == "succeeded"
    assert [each.status_code for each in updates] == [200, 200]
    assert updates[0].json()["id"] == updates[1].json()["id"]
    assert updates[0].json()["epochs"] == updates[1].json()["epochs"]
    assert (updated["operation"], updated["status"], updated["version"]) == ("update_weights", "succeeded", 2)


async def test_a_transfer_of_a_killed_service_goes_on_at_the_other(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The transfer belongs to the user: after SIGKILL of the service that began it, the other one finishes it."""
    async with two_services(nats_url, fleet, tmp_path) as (services, client, _):
        begun = await client.post(f"{services.urls['a']}/start_weight_update", json={})
        await services.kill("a")
        transfer = {"transfer": begun.json()["transfer"]}
        chunk = await client.post(f"{services.url}/update_weights", json={"update_info": {"seed": 4}, **transfer})
        finish = await client.post(f"{services.url}/finish_weight_update", json={**transfer, "weight_version": "2"})

    assert [each.status_code for each in (begun, chunk, finish)] == [200, 200, 200]


async def test_a_rolling_restart_of_the_services_ends_no_stream(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """After SIGTERM a service accepts no connection, finishes its streams within --stop-timeout, and exits with 0.

    A second SIGTERM ends the streams at once, without an error in the log.
    """
    options = ("--stop-timeout", f"{SOON_S:g}")
    body = {**LONG, "sampling_params": {"max_tokens": 300, "ignore_eos": True}}
    async with two_services(nats_url, fleet, tmp_path, *options) as (services, client, _), asyncio.TaskGroup() as tasks:
        stream = Stream(client, services.urls["a"], "of-a", body)
        reading = tasks.create_task(stream.read())
        await until_true(lambda: bool(stream.tokens))
        services.processes["a"].send_signal(signal.SIGTERM)

        async def is_closed() -> bool:
            try:
                await client.get(f"{services.urls['a']}/ready")
            except httpx.ConnectError:
                return True
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # The connection was opened just before the stop, and had no request yet.
                return False
            return False

        await until(is_closed, expected=True)
        has_ended = reading.done()
        url = services.urls["b"]
        meanwhile = await client.post(url + GENERATE, json=SHORT)
        await reading
        code = await services.processes["a"].wait()

        cut = Stream(client, services.urls["b"], "of-b")
        reading = tasks.create_task(cut.read())
        await until_true(lambda: bool(cut.tokens))
        services.processes["b"].send_signal(signal.SIGTERM)
        had = len(cut.tokens)
        await until_true(lambda: len(cut.tokens) > had)
        services.processes["b"].send_signal(signal.SIGTERM)
        await reading
        cut_code = await services.processes["b"].wait()
        log = (tmp_path / "b.log").read_text()

    assert not has_ended
    assert meanwhile.status_code == 200
    assert (stream.problem, len(stream.tokens), stream.finish_reason, code) == (None, 300, "length", 0)
    assert (cut.problem is not None, cut_code) == (True, 0)
    assert "Traceback" not in log


async def test_a_service_without_nats_is_not_ready(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Without NATS, /ready is 503 and tells why, /health is 200. After the reconnect, /ready is 200."""
    async with (
        synthetic_worker(nats_url, fleet),
        tcp_proxy(nats_url) as proxy,
        service(proxy.url, fleet, tmp_path / "log") as (_, url),
        httpx.AsyncClient(base_url=url, timeout=SOON_S) as client,
    ):

        async def is_ready() -> bool:
            return (await client.get("/ready")).status_code == 200

        await until(is_ready, expected=True)
        proxy.cut()
        await until(is_ready, expected=False)
        health, ready = await client.get("/health"), await client.get("/ready")
        await proxy.restore()
        await until(is_ready, expected=True)

    assert (health.status_code, ready.status_code) == (200, 503)
    assert ready.json() == {"ready": False, "problem": "the connection to NATS is down"}

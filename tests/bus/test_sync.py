"""The client without asyncio has the same names, arguments, results and errors, from any thread."""

import asyncio
import contextlib
import inspect
import json
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus import GroupStep, SamplingParams
from rollbus.bus.client.groups import GroupSampler
from rollbus.bus.client.sync import BlockingClient, BlockingFleet, BlockingGroups
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import BusClosed, InvalidRequest, NoWorkers, RequestError, RequestRejected
from rollbus.schemas.messages import decode_client_presence
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.bus.test_groups import prompts
from tests.support.fleet import StartServed, check_generation, until_idle
from tests.support.nats_server import opened
from tests.support.processes import becomes_true
from tests.support.requests import endless, greedy, short, sized
from tests.support.waits import SOON_S

REQUESTS = [greedy(index, 1 + index % 7, request_id=f"r{index}") for index in range(40)]


async def in_thread(program: Callable[[], None]) -> None:
    """Run a program without asyncio to its end, beside the workers of this loop."""
    async with asyncio.timeout(SOON_S):
        await asyncio.to_thread(program)


async def use_client(nats_url: str, fleet: str, program: Callable[[BlockingClient], None]) -> None:
    """Run a program with a client that knows a worker, as `in_thread` does."""

    def connect_and_run() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
            program(rb)

    await in_thread(connect_and_run)


def names_of(kind: type) -> set[str]:
    """Return the public names of a class, with those that it inherits."""
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    """Return names, kinds and defaults of a function's arguments."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [(BlockingClient, rollbus.Client), (BlockingFleet, rollbus.Fleet), (BlockingGroups, GroupSampler)],
)
def test_both_clients_have_the_same_names_and_arguments(blocking: type, awaited: type) -> None:
    """Both clients have the same names and arguments.

    No method of the blocking client is awaitable, and each has a docstring.
    """
    shared = names_of(awaited)
    assert names_of(blocking) - {"with_asyncio", "open", "close"} == shared
    for name in shared:
        ours, theirs = getattr(blocking, name), getattr(awaited, name)
        assert isinstance(ours, property) == isinstance(theirs, property), name
        assert ours.__doc__, name
        if not isinstance(ours, property):
            assert parameters_of(ours) == parameters_of(theirs), name
            assert not inspect.iscoroutinefunction(ours), name
            assert not inspect.isasyncgenfunction(ours), name


def test_sync_connect_has_the_arguments_of_connect() -> None:
    """`sync.connect` has the arguments of `connect`, and needs no separate import."""
    assert parameters_of(rollbus.sync.connect) == parameters_of(rollbus.connect)
    assert "`async with`" not in (rollbus.sync.connect.__doc__ or "")
    assert "sync" in dir(rollbus)


async def test_results_are_those_of_the_client_with_asyncio(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Whole and streamed results, batches and commands return the same values as the client with asyncio."""
    async with one_worker() as (rb, *_):
        expected = {each.request_id: each async for each in rb.complete_many(REQUESTS)}

        def program() -> None:
            with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
                rb.fleet.wait_for_workers()
                results = {each.request_id: each for each in rb.complete_many(REQUESTS, max_in_flight=5)}
                for request in REQUESTS:
                    result = results[request.request_id]
                    check_generation(result, request)
                    assert result.request is request
                    np.testing.assert_array_equal(result.token_ids, expected[request.request_id].token_ids)
                    np.testing.assert_array_equal(result.routed_experts, expected[request.request_id].routed_experts)
                chunks = list(rb.generate(sized(request_id="same")))
                whole = rb.complete(sized(request_id="same"))
                np.testing.assert_array_equal(np.concatenate([c.token_ids for c in chunks]), whole.token_ids)
                [worker] = rb.fleet.workers
                assert [each.worker for each in rb.fleet.state().workers] == [worker.worker]
                assert rb.fleet.pause().applied.keys() == {worker.worker}
                assert rb.fleet.state().workers[0].state == "paused"
                rb.fleet.resume(workers=[worker.worker])
                assert rb.stats().requests == 42
            for call in (lambda: rb.complete(short("late")), lambda: rb.fleet, rb.stats, lambda: rb.with_asyncio):
                with pytest.raises(BusClosed, match="this client was closed; `open` connects it again"):
                    call()

        await in_thread(program)


async def test_several_threads_share_a_client(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Each thread gets its own results, and reads its requests on the thread that reads the results."""
    results: dict[int, list[str]] = {}
    drawn_on: dict[int, set[int]] = {}

    def use(rb: BlockingClient, number: int) -> None:
        def requests() -> Iterator[rollbus.GenerateRequest]:
            for index in range(20):
                drawn_on.setdefault(number, set()).add(threading.get_ident())
                yield short(f"{number}-{index}")

        results[number] = sorted(each.request_id for each in rb.complete_many(requests(), max_in_flight=3))
        assert drawn_on[number] == {threading.get_ident()}
        results[number].append(rb.complete(short(f"{number}-last")).request_id)

    def program(rb: BlockingClient) -> None:
        threads = [threading.Thread(target=use, args=(rb, number)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    async with one_worker():
        await use_client(nats_url, fleet, program)
    assert results == {
        number: [*sorted(f"{number}-{index}" for index in range(20)), f"{number}-last"] for number in range(6)
    }


async def test_errors_are_those_of_the_client_with_asyncio(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Requests, commands, arguments and the state of the client raise the same errors."""

    def program(rb: BlockingClient) -> None:
        with pytest.raises(InvalidRequest, match="model is 'other'"):
            rb.complete(short("other", model="other"))
        with pytest.raises(RequestRejected, match="lora 'x' is not loaded"):
            list(rb.generate(short("lora", lora="x")))
        [failed] = rb.complete_many([short("lora", lora="x")])
        assert failed.finish_reason == "error"
        with pytest.raises(InvalidRequest, match="max_in_flight is 0; allowed: an integer from 1"):
            list(rb.complete_many([], max_in_flight=0))
        with pytest.raises(InvalidRequest, match="max_in_flight is '8', not an integer"):
            list(rb.complete_many([], max_in_flight="8"))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="requests has None"):
            list(rb.complete_many([None]))
        with pytest.raises(InvalidRequest, match="requests is an async iterable; allowed: an iterable"):
            list(rb.complete_many(_nothing()))
        with pytest.raises(InvalidRequest, match="workers"):
            rb.fleet.pause(workers=["nobody"])
        with pytest.raises(TypeError):
            rb.fleet.update_weights("folder")  # type: ignore[call-arg]
        with pytest.raises(NoWorkers):
            rb.fleet.wait_for_workers(2, timeout_s=0.01)

    async with one_worker():
        await use_client(nats_url, fleet, program)


async def _nothing() -> Any:
    """Yield once, as an async iterable."""
    yield


async def test_a_caller_that_leaves_a_loop_aborts_its_requests(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A caller that leaves a stream or a batch aborts its requests.

    Their ids and slots are free for the next requests.
    """

    def program(rb: BlockingClient) -> None:
        with contextlib.closing(rb.generate(endless("stream"))) as stream:
            next(stream)
        with contextlib.closing(rb.complete_many([short("first"), endless("many")])) as results:
            assert next(results).request_id == "first"
        assert [rb.complete(short(name)).finish_reason for name in ("stream", "many")] == ["length"] * 2

    async with one_worker():
        await use_client(nats_url, fleet, program)


async def test_closing_ends_the_calls_of_other_threads(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """If the client closes, calls of other threads end with `client_closed` or `BusClosed`, and none hangs."""
    errors: dict[str, BusClosed | RequestError] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (BusClosed, RequestError) as exc:
            errors[name] = exc

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
            stream = rb.generate(endless("stream"))
            next(stream)
            calls: dict[str, Callable[[], object]] = {
                "complete": lambda: rb.complete(endless("complete")),
                "stream": lambda: [None for _ in stream],
                "wait_for_workers": lambda: rb.fleet.wait_for_workers(1000),
            }
            threads = [threading.Thread(target=note, args=item) for item in calls.items()]
            for thread in threads:
                thread.start()
            while rb._connected.num_calls < 2:
                threading.Event().wait(0.001)
        for thread in threads:
            thread.join()

    async with one_worker():
        await in_thread(program)
    assert errors.keys() == {"complete", "stream", "wait_for_workers"}
    assert all(isinstance(each, BusClosed) or each.code == "client_closed" for each in errors.values())


async def test_callbacks_may_not_call_the_client(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """A call of the client in its own callback would deadlock, so it raises an error immediately."""
    caught: list[str] = []

    def program(rb: BlockingClient) -> None:
        def call(*_: object) -> None:
            with pytest.raises(RuntimeError, match="would wait for itself") as error:
                rb.complete(short("callback"))
            caught.append(str(error.value))

        list(rb.generate(short("a"), on_end=call))
        rb.fleet.flush_cache(on_ack=call)

    async with one_worker():
        await use_client(nats_url, fleet, program)
    assert len(caught) >= 2


async def test_an_error_of_a_callback_ends_nothing(
    nats_url: str, fleet: str, one_worker: StartServed, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of a callback is logged, and the client goes on."""

    def fail() -> None:
        raise RuntimeError("the callback failed")

    def program(rb: BlockingClient) -> None:
        for name in ("a", "b"):
            assert list(rb.generate(short(name), on_end=fail))[-1].end is not None

    async with one_worker():
        await use_client(nats_url, fleet, program)
    assert "the callback failed" in caplog.text


async def test_the_blocking_client_works_inside_a_running_loop(nats_url: str, fleet: str) -> None:
    """The blocking client works inside a running loop, as in a notebook, and blocks that loop."""
    with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
        assert rb.fleet.state().workers == ()


def test_a_publisher_shares_a_blocking_client(nats_url: str, fleet: str) -> None:
    """A `WeightPublisher` with `with` shares a blocking client. `async with` has no loop there and raises an error."""
    with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
        tensors = {"weight": np.ones(8, np.float32)}
        with rollbus.WeightPublisher(rb, model="policy") as publisher:
            assert publisher.publish_blocking(tensors.items(), version=1, update=False).is_anchor
        with pytest.raises(InvalidRequest, match=r"client is of `rollbus\.sync`"):
            asyncio.run(rollbus.WeightPublisher(rb, model="policy").__aenter__())
        assert rb.fleet.state().workers == ()


# `rb.groups` without asyncio: the same steps from any thread. The thread that waits for a step reads the prompts.


SLOW = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
ENDLESS = 1_000_000


def keys(*steps: GroupStep) -> list[object]:
    """Return the keys of the groups in these steps."""
    return [group.key for step in steps for group in step.groups]


def tokens_of(steps: list[GroupStep]) -> dict[object, list[list[int]]]:
    """Return the tokens of each answer, by the key of its group."""
    return {
        group.key: [answer.token_ids.tolist() for answer in group.generations]
        for step in steps
        for group in step.groups
    }


async def test_steps_are_those_of_the_client_with_asyncio(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Each prompt completes once, interrupted groups continue from their tokens, and all equal undisturbed ones."""
    lengths = [5, 700, 3, 4, 900, 6, 2, 500]
    steps: list[GroupStep] = []

    def program(rb: BlockingClient) -> None:
        with rb.groups(prompts(*lengths), n=2, need=2, over=2) as groups:
            steps.extend(groups)
        for key, answers in tokens_of(steps).items():
            number = int(str(key))
            expected = rb.complete(greedy(10 + number, lengths[number])).token_ids.tolist()
            assert answers == [expected, expected]

    async with one_worker(config=SLOW) as (rb, _, engine):
        await use_client(nats_url, fleet, program)
        await until_idle(engine, rb)
    assert [group.error for step in steps for group in (*step.failed, *step.dropped)] == []
    assert sorted(map(str, keys(*steps))) == sorted(map(str, range(len(lengths))))
    assert max(group.steps for step in steps for group in step.groups) > 1


async def test_prompts_are_read_on_the_thread_that_waits_for_the_step(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """`step` reads prompts one at a time on its own thread, and the source may use the client.

    An error of the source is raised by `step`. The next step contains the prompts from before the error.
    """
    drawn_on: list[int] = []

    def program(rb: BlockingClient) -> None:
        class Source:
            """A source that yields answers of the fleet and raises one error."""

            def __iter__(self) -> Iterator[list[int]]:
                return self

            def __next__(self) -> list[int]:
                drawn_on.append(threading.get_ident())
                if len(drawn_on) == 2:
                    raise OSError("the data set is gone")
                answer: list[int] = rb.complete(short(f"r{len(drawn_on)}")).token_ids.tolist()
                return answer

        sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        with rb.groups(Source(), n=1, need=2, over=1, sampling=sampling) as groups:
            with pytest.raises(OSError, match="the data set is gone"):
                groups.step()
            assert len(groups.step().groups) == 2
        assert drawn_on == [threading.get_ident()] * 3

    async with one_worker():
        await use_client(nats_url, fleet, program)


@pytest.mark.parametrize("left", ["groups", "client"])
async def test_leaving_the_groups_ends_a_step_of_another_thread(
    nats_url: str, fleet: str, one_worker: StartServed, left: str
) -> None:
    """If the groups or the client are left, a step of another thread ends with `BusClosed`, and the engines are idle.

    A second step beside it raises an error.
    """
    errors: list[BaseException] = []

    def program() -> None:
        rb = rollbus.sync.connect(nats_url, fleet=fleet).__enter__()
        rb.fleet.wait_for_workers()
        groups = rb.groups(prompts(ENDLESS, ENDLESS), n=2, need=2, over=1).__enter__()

        def take() -> None:
            try:
                groups.step()
            except (BusClosed, RuntimeError) as exc:
                errors.append(exc)

        taking = threading.Thread(target=take)
        taking.start()
        assert becomes_true(lambda: rb.stats().requests >= 2)
        take()
        (groups if left == "groups" else rb).__exit__(None, None, None)
        taking.join()
        groups.__exit__(None, None, None)
        if left == "groups":
            rb.__exit__(None, None, None)

    async with one_worker(config=SLOW) as (rb, _, engine):
        await in_thread(program)
        await until_idle(engine, rb)
    assert [type(error) for error in errors] == [RuntimeError, BusClosed]
    assert "a step of these groups is still running" in str(errors[0])


# The client without asyncio in processes that are interrupted, that fork, and that exit without leaving the client.


async def run(program: str, url: str, fleet: str) -> list[Any]:
    """Run a program of `tests/bus/sync_program.py` and return its output by line.

    The program must exit with 0 in time, without stderr output.
    """
    command = sys.executable, "-m", "tests.bus.sync_program", program, url, fleet
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(SOON_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, err.decode()) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


async def test_workers_learn_immediately_that_a_program_exits(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """If a program exits without leaving its client, the workers learn immediately that its requests are abandoned."""
    async with one_worker() as (rb, _, engine), opened(nats_url) as connection:
        heard = await connection.subscribe(Subjects(fleet).client("program"))
        assert await run("leave_open", nats_url, fleet) == [1]
        states = [decode_client_presence((await heard.next_msg(SOON_S)).data).state]
        while states[-1] != "closed":
            states.append(decode_client_presence((await heard.next_msg(SOON_S)).data).state)
        await until_idle(engine, rb)


async def test_ctrl_c_ends_only_the_call(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Ctrl-C raises `KeyboardInterrupt` in each kind of call and ends its request. The client can use the ids again."""
    async with one_worker() as (rb, _, engine):
        [[interrupted, answers]] = await run("be_interrupted", nats_url, fleet)
        await until_idle(engine, rb)
    assert interrupted == ["complete", "complete_many", "generate", "groups", "stream_many", "wait_for_workers"]
    assert answers == ["length"] * 6


async def test_a_forked_process_cannot_use_the_client_of_its_parent(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A forked child gets typed errors, has no connection, and can use its own client. The parent continues."""
    async with one_worker():
        child, parent = await run("fork", nats_url, fleet)
    assert child == {"errors": ["BusClosed"] * 9, "connections": 0, "own": 3}
    assert parent == {"code": 7, "tokens": [200, [20] * 60 + [3]], "missing": 0}


async def test_a_forked_process_cannot_use_a_client_with_asyncio(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A fork has the same effect on a client with asyncio. A stream that the child reads ends with `client_closed`."""
    async with one_worker():
        child, parent = await run("fork_with_asyncio", nats_url, fleet)
    assert child == {"errors": ["BusClosed", "BusClosed", "RequestFailed"], "connections": 0}
    assert parent == {"code": 7, "tokens": [200, 3], "missing": 0}


async def test_forked_data_loader_processes_supply_prompts(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Two processes of a torch DataLoader supply prompts during requests, and cannot use the parent's client."""
    async with one_worker():
        [said] = await run("load_data", nats_url, fleet)
    assert said == {"errors": ["BusClosed"], "processes": 2, "results": 64}

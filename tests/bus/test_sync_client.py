"""The client without asyncio has the same names, arguments, results and errors, from any thread."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.bus.client.groups import GroupSampler
from rollbus.bus.client.sync import BlockingClient, BlockingFleet, BlockingGroups
from rollbus.schemas.errors import BusClosed, InvalidRequest, NoWorkers, RequestError, RequestRejected
from tests.support.fleet import StartServed, check_generation
from tests.support.patience import SOON_S
from tests.support.requests import endless, greedy, short, sized

REQUESTS = [greedy(index, 1 + index % 7, request_id=f"r{index}") for index in range(40)]


async def in_thread(program: Callable[[], None]) -> None:
    """Run a program without asyncio to its end, beside the workers of this loop."""
    async with asyncio.timeout(SOON_S):
        await asyncio.to_thread(program)


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

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
            threads = [threading.Thread(target=use, args=(rb, number)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    async with one_worker():
        await in_thread(program)
    assert results == {
        number: [*sorted(f"{number}-{index}" for index in range(20)), f"{number}-last"] for number in range(6)
    }


async def test_errors_are_those_of_the_client_with_asyncio(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Requests, commands, arguments and the state of the client raise the same errors."""

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
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
        await in_thread(program)


async def _nothing() -> Any:
    """Yield once, as an async iterable."""
    yield


def test_without_workers_every_request_method_raises_no_workers(nats_url: str, fleet: str) -> None:
    """Without workers, every request method raises `NoWorkers`."""
    with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
        for call in (
            lambda: rb.complete(short("a")), lambda: list(rb.generate(short("a"))),
            lambda: list(rb.complete_many([short("a")])),
        ):  # fmt: skip
            with pytest.raises(NoWorkers):
                call()


async def test_a_caller_that_leaves_a_loop_aborts_its_requests(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A caller that leaves a stream or a batch aborts its requests.

    Their ids and slots are free for the next requests.
    """

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
            with contextlib.closing(rb.generate(endless("stream"))) as stream:
                next(stream)
            with contextlib.closing(rb.complete_many([short("first"), endless("many")])) as results:
                assert next(results).request_id == "first"
            assert [rb.complete(short(name)).finish_reason for name in ("stream", "many")] == ["length"] * 2

    async with one_worker():
        await in_thread(program)


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

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()

            def call(*_: object) -> None:
                with pytest.raises(RuntimeError, match="would wait for itself") as error:
                    rb.complete(short("callback"))
                caught.append(str(error.value))

            list(rb.generate(short("a"), on_end=call))
            rb.fleet.flush_cache(on_ack=call)

    async with one_worker():
        await in_thread(program)
    assert len(caught) >= 2


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

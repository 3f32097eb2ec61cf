"""The model of requests that name none: fixed by the first of them, and known from the stored desired states."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import connected
from rollbus.bus.nats.jetstream import ApiError, ask
from rollbus.bus.nats.server import Server
from rollbus.bus.queue.streams import stream_name
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import InvalidRequest, NoWorkers
from rollbus.schemas.presence import WorkerState
from tests.support.fleet import synthetic_worker
from tests.support.hand_worker import worker_by_hand
from tests.support.patience import SOON_S
from tests.support.requests import greedy
from tests.support.waits import until, until_true


def asked(**fields: object) -> GenerateRequest:
    """Return a request for three tokens."""
    return greedy(1, 3, **fields)


@contextlib.asynccontextmanager
async def client(nats_url: str, fleet: str) -> AsyncIterator[rollbus.Client]:
    """Connect a client."""
    async with asyncio.timeout(SOON_S), rollbus.connect(nats_url, fleet=fleet) as rb:
        yield rb


async def test_a_lost_model_is_not_replaced_by_another(nats_url: str, fleet: str) -> None:
    """A client fixes its model at the first request without one. If its workers are gone, it gets an error.

    It gets no tokens of the other model, and continues with its own model when a worker is back.
    """
    async with client(nats_url, fleet) as rb:
        async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"):
            await rb.fleet.wait_for_workers(model="a")
            assert (await rb.complete(asked())).model == "a"
            async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
                await rb.fleet.wait_for_workers(model="b")
                assert (await rb.complete(asked())).model == "a"
                await rb.fleet.drain(["wa"])
                with pytest.raises(NoWorkers, match="no live worker serves a"):
                    await rb.complete(asked())
                await rb.fleet.resume(workers=["wa"])
                await rb.fleet.wait_for_workers(model="a")
                assert (await rb.complete(asked())).model == "a"
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await rb.fleet.wait_for_workers(model="b")
            with pytest.raises(NoWorkers, match="no live worker serves a"):
                await rb.complete(asked())
            async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"):
                await rb.fleet.wait_for_workers(model="a")
                assert (await rb.complete(asked())).model == "a"


async def test_a_new_client_gets_the_list_of_all_known_models(nats_url: str, fleet: str) -> None:
    """A client that names no model gets the list if several models are known, also if one of them has no workers.

    The error names the command that forgets a model. A request that names its model is not affected.
    """
    async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"), client(nats_url, fleet) as rb:
        await until(rb.fleet.known_models, ("a",))
    async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="b")
        with pytest.raises(InvalidRequest) as caught:
            await rb.complete(asked())
        assert (caught.value.field, caught.value.problem) == ("model", "is missing")
        assert caught.value.allowed == "one of a, b (without workers: a; `rollbus forget-model a` forgets a model)"
        with pytest.raises(NoWorkers, match="no live worker serves a"):
            await rb.complete(asked(model="a"))
        with pytest.raises(InvalidRequest, match="model is 'c'; allowed: one of a, b"):
            await rb.complete(asked(model="c"))
        assert (await rb.complete(asked(model="b"))).model == "b"


async def test_without_a_known_model_nothing_is_fixed(nats_url: str, fleet: str) -> None:
    """A client of an empty fleet gets `no_workers` and takes the first model that comes."""
    async with client(nats_url, fleet) as rb:
        with pytest.raises(NoWorkers):
            await rb.complete(asked())
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await rb.fleet.wait_for_workers()
            assert (await rb.complete(asked())).model == "b"


async def test_a_queue_makes_its_model_known(nats_url: str, fleet: str) -> None:
    """`make-queue` makes a model known, so a client without a model does not take another one that starts earlier."""
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="b")
        with pytest.raises(InvalidRequest, match="one of a, b"):
            await rb.complete(asked())
        assert (await rb.fleet.state()).desired == {}


async def test_models_in_every_state_of_their_workers_count(nats_url: str, fleet: str) -> None:
    """A model counts although its only worker starts, and although no state of it is stored."""
    async with (
        worker_by_hand(nats_url, fleet, pulls=False) as worker,
        synthetic_worker(nats_url, fleet, worker_id="wb", model="b"),
        client(nats_url, fleet) as rb,
    ):
        await worker.announce(WorkerState.STARTING)
        await rb.fleet.wait_for_workers(model="b")
        await until_true(lambda: len(rb.fleet.workers) == 2)
        with pytest.raises(InvalidRequest, match="one of b, m"):
            await rb.complete(asked())


async def test_a_forgotten_model_needs_no_name_any_more(nats_url: str, fleet: str) -> None:
    """`forget_model` deletes the queue and the state of a model without workers. Then the other model is the only one.

    A model with a worker, or with requests in its queue, is not forgotten.
    """
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="b")
        with pytest.raises(InvalidRequest, match="model 'b' has workers: wb"):
            await rb.fleet.forget_model("b")
        async with connected(nats_url, name="test") as nats:
            subjects = Subjects(fleet)
            await nats.request(subjects.request("x", "a", "low"), b"?")
            with pytest.raises(InvalidRequest, match="model 'a' has 1 requests in its queue"):
                await rb.fleet.forget_model("a")
            await ask(nats, f"STREAM.PURGE.{stream_name(subjects, 'a', 'low')}")
            assert await rb.fleet.forget_model("a")
            assert not await rb.fleet.forget_model("a")
            for lane in ("low", "resume"):
                with pytest.raises(ApiError, match="stream not found"):
                    await ask(nats, f"STREAM.INFO.{stream_name(subjects, 'a', lane)}")
        assert await rb.fleet.known_models() == ("b",)
        assert (await rb.complete(asked())).model == "b"


async def test_weights_without_a_model_go_to_no_other_model(nats_url: str, fleet: str) -> None:
    """An update that names no model is rejected if another model is known, although that model has no workers."""
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="b")
        with pytest.raises(InvalidRequest, match="model is missing; allowed: one of a, b"):
            await rb.fleet.update_weights("/weights", version=2)
        await rb.fleet.pause()


async def test_a_result_names_its_model_and_its_continuation_keeps_it(nats_url: str, fleet: str) -> None:
    """Each sample of a result names the model, and so does the request that continues it."""
    async with synthetic_worker(nats_url, fleet, model="a"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers()
        request = replace(asked(), sampling=SamplingParams(max_tokens=3, n=2))
        result = await rb.complete(request)
        assert [(sample.model, sample.lora) for sample in (result, *result.siblings)] == [("a", None)] * 2
        [failed] = [one async for one in rb.complete_many([asked(model="a", lora="none", timeout_s=0.01)])]
        assert (failed.model, failed.lora) == ("a", "none")
        assert failed.request.continuing(failed).model == "a"

"""Workers on the synthetic engine inside the test process, and checks of their state and results."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import rollbus
from rollbus import ExpertAnswers, FleetState, GenerateRequest, Generation
from rollbus.bus.client.client import runtime_of
from rollbus.bus.protocol.telemetry.experts import ExpertWindow
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.presence import Capabilities, WorkerPresence, WorkerState
from rollbus.schemas.rows import Rows, expected_rows
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.waits import SOON_S, UNHURRIED_LEASE_S, until_true


@contextlib.asynccontextmanager
async def synthetic_worker(
    nats_url: str, fleet: str, *, config: SyntheticConfig | None = None, model: str = "synthetic", **fields: object
) -> AsyncIterator[tuple[Worker, SyntheticEngine]]:
    """Run a worker until the block ends, then assert that its engine has no request (I7).

    By default no test outlasts the worker's lease. By default the worker also does not listen for another worker with
    its id, because that wait lasts a whole lease.

    Args:
        fields: fields of the worker's configuration. With `model_path` the engine has the weights of that checkpoint.
    """
    folder = fields.get("model_path")
    engine = SyntheticEngine(config, None if folder is None else Path(str(folder)))
    fields = {"lease_s": UNHURRIED_LEASE_S, "listen_s": 0.0, "drain_s": 2.0, **fields}
    worker = Worker(WorkerConfig(nats_url=nats_url, fleet=fleet, model=model, **fields), engine)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run(), name="worker")
        try:
            yield worker, engine
        finally:
            worker.stop()
            await running
    assert is_idle(engine)
    if worker.is_assembled:
        # Each request has also ended in the timelines.
        assert "in_flight=0" in repr(worker._links.requests.timelines)


class Served(NamedTuple):
    """A client which knows that the only worker of its fleet serves."""

    rb: rollbus.Client
    worker: Worker
    engine: SyntheticEngine


StartServed = Callable[..., contextlib.AbstractAsyncContextManager[Served]]
"""Has the parameters of `served` after the fleet."""


@contextlib.asynccontextmanager
async def served(
    nats_url: str,
    fleet: str,
    *,
    config: SyntheticConfig | None = None,
    options: Mapping[str, Any] | None = None,
    **fields: object,
) -> AsyncIterator[Served]:
    """Run a worker and a client with these options; `fields` are fields of the worker's configuration."""
    async with (
        synthetic_worker(nats_url, fleet, config=config, **fields) as (worker, engine),  # type: ignore[arg-type]
        rollbus.connect(nats_url, fleet=fleet, **(options or {})) as rb,
    ):
        await rb.fleet.wait_for_workers()
        yield Served(rb, worker, engine)


def is_idle(engine: SyntheticEngine) -> bool:
    """Return True if the engine has no request."""
    return "running=0 waiting=0" in repr(engine)


async def until_idle(engine: SyntheticEngine, rb: rollbus.Client) -> None:
    """Wait until the engine has no request; each probe request takes at least one step of the engine."""
    while not is_idle(engine):
        await rb.complete(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1)))


def check_generation(generation: Generation, request: GenerateRequest, *, routing: bool = True) -> None:
    """Assert that all arrays have the right length and the rows obey the row rule (I2, I3)."""
    num_tokens = len(generation.token_ids)
    assert generation.error is None
    assert len(generation.weight_versions) == num_tokens
    if request.sampling.logprobs is not None:
        assert len(generation.logprobs) == num_tokens
        assert not np.isnan(generation.logprobs).any()
    if generation.sampling_mask is not None:
        assert len(generation.sampling_mask) == num_tokens
    if routing:
        assert generation.routed_experts is not None
        start = request.routed_experts_prompt_start
        assert generation.start == start
        assert len(generation.routed_experts) == expected_rows(request.prompt_len, start, num_tokens)
    else:
        assert generation.routed_experts is None


# Waits for fleet states that a client sees.

LOOK_AGAIN_S = 0.02
"""Seconds between two reads of the state, each of which asks every process of the fleet."""


async def until_state(rb: rollbus.Client, is_met: Callable[[FleetState], object]) -> FleetState:
    """Return the first fleet state that meets the condition; the test's own time limit ends the wait."""
    while not is_met(state := await rb.fleet.state()):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(LOOK_AGAIN_S)
    return state


async def until_worker(
    rb: rollbus.Client, name: str, is_met: WorkerState | Callable[[WorkerPresence], object]
) -> WorkerPresence:
    """Return the presence of a worker that has this state or meets the condition.

    A worker that was killed or disconnected keeps its last presence until its lease expires.
    """

    def is_as_expected(worker: WorkerPresence) -> object:
        return worker.state is is_met if isinstance(is_met, WorkerState) else is_met(worker)

    state = await until_state(
        rb, lambda state: any(one.worker == name and is_as_expected(one) for one in state.workers)
    )
    return worker_of(state, name)


def worker_of(state: FleetState, name: str) -> WorkerPresence:
    """Return the presence of one worker."""
    [worker] = [worker for worker in state.workers if worker.worker == name]
    return worker


def all_serve(state: FleetState) -> bool:
    """Return True if all known workers serve."""
    return all(worker.state is WorkerState.SERVING for worker in state.workers)


async def until_known(rb: rollbus.Client, *workers: Worker) -> None:
    """Wait until the client knows that all these workers serve in their current incarnations."""

    def are_known() -> bool:
        heard = {(one.worker, one.incarnation) for one in rb.fleet.workers if one.state is WorkerState.SERVING}
        return all((one.worker, one.incarnation) in heard for one in (worker.presence() for worker in workers))

    await until_true(are_known)


def client_state(rb: rollbus.Client) -> dict[str, int]:
    """Return the counts of what a connected client holds."""
    return runtime_of(rb).debug_state()


def requests_at(rb: rollbus.Client, worker: str) -> set[str]:
    """Return the ids of the open requests that this worker has, as far as the client knows."""
    calls = list(runtime_of(rb).coordinator._calls.values())
    return {call.request_id for call in calls for child in call.children if child.is_open and child.worker == worker}


def is_placing(rb: rollbus.Client) -> bool:
    """Return True if the client knows of a request that it placed or that follows another one."""
    state = client_state(rb)
    return bool(state["placed"] or state["followers"])


# Presence and acks of workers, for tests without real workers.


def presence(**fields: Any) -> WorkerPresence:
    """Return the presence of an idle worker in the state `serving`; `fields` replace its values."""
    idle: dict[str, Any] = {
        "worker": "w",
        "incarnation": "1",
        "model": "m",
        "state": WorkerState.SERVING,
        "weight_version": 0,
        "in_flight": 0,
        "free_slots": 1,
        "uptime_s": 1.0,
        "lease_s": 10.0,
    }
    return WorkerPresence(**{**idle, **fields})


def ack(**fields: Any) -> Ack:
    """Return the ack of a worker that has applied a command; `fields` replace its values."""
    applied: dict[str, Any] = {
        "id": "c",
        "command": "pause",
        "worker": "w",
        "incarnation": "1",
        "model": "m",
        "status": AckStatus.APPLIED,
    }
    return Ack(**{**applied, **fields})


def capabilities(**fields: Any) -> Capabilities:
    """Return the capabilities of a small dense model; `fields` replace their values."""
    small: dict[str, Any] = {
        "engine": "e",
        "engine_version": "1",
        "max_model_len": 64,
        "vocab_size": 100,
        "max_num_seqs": 4,
        "max_logprobs": 5,
        "dtype": "float32",
    }
    return Capabilities(**{**small, **fields})


# The expert counts that workers should report, computed from the rows of a client, and a wait for these reports.

ASK_AGAIN_S = 0.3
"""Seconds between two reads; workers answer 20 reads per second."""


def counted(rows: Iterable[Rows], num_experts: int) -> npt.NDArray[np.int64]:
    """Return how often each expert occurs in each layer."""
    whole = np.concatenate(list(rows))
    return np.array([np.bincount(whole[:, i].ravel(), minlength=num_experts) for i in range(whole.shape[1])])


def planes_of(results: Iterable[Generation], num_experts: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the expert counts of uncached prompt tokens and of generated tokens; each `start` must be 0."""
    prompts, generated = [], []
    for result in results:
        assert result.start == 0
        prompts.append(result.routed_experts[result.cached_tokens or 0 : result.prompt_len])
        generated.append(result.routed_experts[result.prompt_len :])
    return {"prompt": counted(prompts, num_experts), "generated": counted(generated, num_experts)}


async def asked_until(rb: rollbus.Client, is_met: Callable[[ExpertWindow], object], **question: Any) -> ExpertAnswers:
    """Read all counts until the answer meets the condition: a read covers only intervals that have ended."""
    answers: ExpertAnswers | None = None
    try:
        async with asyncio.timeout(SOON_S):
            while True:
                answers = await rb.fleet.experts(**{"last_s": None, **question})
                if answers.window is not None and is_met(answers.window):
                    return answers
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        raise AssertionError(f"the workers' answers stay {answers}") from None

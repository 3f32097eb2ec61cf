"""Requests without a token restart under new weights, so their clients get results of the new weights only."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.control import FinishWeightUpdate, StartWeightUpdate, UpdateWeightChunk
from rollbus.schemas.errors import ControlError, EngineDead, ErrorCode, InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import Rows
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.workers.control_support import Rig, load_lora, rig, update
from tests.workers.links_support import NOW, Ear, capabilities, make_links, request_of

PROMPT = list(range(200))
PART = 20
"""The number of prompt tokens after which a prompt counts as begun, although most of it remains."""
SLOW = SyntheticConfig(prefill_step_tokens=1)
"""The prompt takes 200 steps."""
ONE_AT_A_TIME = SyntheticConfig(prefill_step_tokens=1, max_num_seqs=1)


class PrefillNotifyingEngine(SyntheticEngine):
    """An engine that sets an event when it has computed a part of a prompt."""

    def __init__(self, config: SyntheticConfig | None = None, model: Path | None = None) -> None:
        super().__init__(config, model)
        self.is_prefilling = asyncio.Event()

    def _step(self) -> list[RequestStep | TokenBatch]:
        steps = super()._step()
        if any(one.num_prefilled > PART for one in self._prefilling):
            self.is_prefilling.set()
        return steps


class Gated(PrefillNotifyingEngine):
    """An engine that waits for permission to add, load or restart, and sets an event when it waits."""

    def __init__(self, config: SyntheticConfig | None = None, model: Path | None = None) -> None:
        super().__init__(config, model)
        self.may = {name: asyncio.Event() for name in ("add", "load", "restart")}
        self.waits = {name: asyncio.Event() for name in self.may}
        self.may["add"].set()
        self.may["load"].set()

    async def _pass(self, name: str) -> None:
        self.waits[name].set()
        await self.may[name].wait()

    async def add(self, key: str, request: GenerateRequest, kv: object = None) -> None:
        """Create the request for the current weights, wait, and queue it, as vLLM creates the salt first."""
        running = self._make_running(key, request)
        await self._pass("add")
        self._enqueue(running)

    async def load_weights(self, path: Path) -> None:
        """Wait, then load."""
        await self._pass("load")
        await super().load_weights(path)

    async def restart(self, key: str) -> None:
        """Wait, then restart."""
        await self._pass("restart")
        await super().restart(key)


class Refusing(PrefillNotifyingEngine):
    """An engine that rejects a restarted request."""

    async def restart(self, key: str) -> None:
        """Abort the request, and raise an error."""
        self._abort(key)
        raise InvalidRequest(field="lora", problem="is gone", allowed="none")


async def begin(worker: Rig, *request_ids: str, num_tokens: int = 4, **fields: object) -> None:
    """Start requests, and pause the engine when it has computed a part of the first prompt."""
    for request_id in request_ids:
        await worker.start(request_id, num_tokens, prompt=PROMPT, **fields)
    assert isinstance(worker.engine, PrefillNotifyingEngine)
    worker.engine.is_prefilling.clear()
    await worker.engine.is_prefilling.wait()
    await worker.flow.stop("keep", 10.0)
    assert PART < worker.engine._prefilling[0].num_prefilled < len(PROMPT)


def rows_of(worker: Rig, request_id: str) -> Rows:
    """Return the rows that the client has received."""
    parts = [chunk.routed_experts for chunk in worker._ear.chunks(request_id)]
    rows: Rows = np.concatenate([part.numpy() for part in parts if part is not None])
    return rows


async def fresh(root: Path, *, fill: int = 2) -> tuple[list[int], Rows]:
    """Return the result of an engine that was started on the checkpoint `fill`."""
    async with rig(root, SLOW, fill=fill, engine=PrefillNotifyingEngine) as worker:
        await begin(worker, "r")
        await worker.flow.resume()
        await worker.until_end("r")
        return [token.token_id for token in worker.tokens("r")], rows_of(worker, "r")


@pytest.mark.proves("P17")
async def test_a_partly_computed_prompt_is_recomputed_with_new_weights(tmp_path: Path) -> None:
    """The tokens and all rows of a partly computed prompt are those of the new weights."""
    async with rig(tmp_path / "a", SLOW, engine=PrefillNotifyingEngine) as worker:
        await begin(worker, "r")
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        await worker.flow.resume()
        tokens = await worker.until_end("r")

        expected_ids, expected_rows = await fresh(tmp_path / "b")
        assert {token.weight_version for token in tokens} == {2}
        assert [token.token_id for token in tokens] == expected_ids
        np.testing.assert_array_equal(rows_of(worker, "r"), expected_rows)
        assert worker.runner.num_inside == 0


async def test_waiting_requests_keep_their_order_after_an_update(tmp_path: Path) -> None:
    """Waiting requests enter the engine in the order of their arrival, also after an update."""
    async with rig(tmp_path, ONE_AT_A_TIME, engine=PrefillNotifyingEngine) as worker:
        names = [f"r{number}" for number in range(5)]
        await begin(worker, *names)
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        await worker.flow.resume()
        for name in names:
            await worker.until_end(name)

        ended = [chunk.request_id for frame in worker._ear.frames for chunk in frame.chunks if chunk.is_terminal]
        assert ended == names


async def test_a_request_that_reaches_the_engine_after_the_load_restarts_too(tmp_path: Path) -> None:
    """A request that was created for the old weights but reaches the engine after the load restarts too."""
    async with rig(tmp_path, SLOW, engine=Gated) as worker, asyncio.TaskGroup() as tasks:
        engine = worker.engine
        assert isinstance(engine, Gated)
        engine.may["restart"].set()
        engine.may["add"].clear()
        engine.waits["add"].clear()
        engine.waits["load"].clear()
        tasks.create_task(worker.start("r", prompt=PROMPT))
        await engine.waits["add"].wait()
        updating = tasks.create_task(worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report))
        await engine.waits["load"].wait()
        engine.may["add"].set()
        await updating
        assert [one.salt for one in [*engine._waiting, *engine._prefilling]] == ["2.0."]
        await worker.flow.resume()
        assert {token.weight_version for token in await worker.until_end("r")} == {2}


async def test_the_abort_of_a_restarting_request_is_applied_after_its_restart(tmp_path: Path) -> None:
    """The abort of a restarting request takes effect after its restart.

    Other requests continue, and nothing of the aborted request remains.
    """
    async with rig(tmp_path, SLOW, engine=Gated) as worker, asyncio.TaskGroup() as tasks:
        engine = worker.engine
        assert isinstance(engine, Gated)
        await begin(worker, "r", "s")
        updating = tasks.create_task(worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report))
        await engine.waits["restart"].wait()
        [name] = [name for name in worker.links.requests.names if "/r/" in name]
        worker.flow.abort([name])
        end = worker.end("r")
        engine.may["restart"].set()
        await updating
        await worker.flow.resume()

        assert end.finish_reason is FinishReason.ABORT
        assert {token.weight_version for token in await worker.until_end("s")} == {2}
        assert worker.tokens("r") == []
        assert worker.runner.num_inside == 0


async def test_requests_end_as_worker_fenced_if_the_engine_dies_during_a_restart(tmp_path: Path) -> None:
    """If the engine dies during a restart, its requests end as `worker_fenced`, so that other workers resume them.

    The worker reports the death.
    """
    ends = []

    async def dies() -> None:
        async with rig(tmp_path, SLOW, engine=Gated) as worker, asyncio.TaskGroup() as tasks:
            engine = worker.engine
            assert isinstance(engine, Gated)
            await begin(worker, "r")
            updating = tasks.create_task(worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report))
            updating.add_done_callback(lambda _: ends.append(worker.end("r")))
            await engine.waits["restart"].wait()
            engine.kill()
            engine.may["restart"].set()

    with pytest.raises(ExceptionGroup) as caught:
        await dies()

    assert caught.group_contains(EngineDead)
    [end] = ends
    assert end.error.code is ErrorCode.WORKER_FENCED


async def test_a_restarted_request_that_the_engine_rejects_ends_alone(tmp_path: Path) -> None:
    """If the engine rejects a restarted request, the request ends with that error, and the update is applied."""
    async with rig(tmp_path, SLOW, engine=Refusing) as worker:
        await begin(worker, "r")
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        end = worker.end("r")

        assert end.error.code is ErrorCode.INVALID_REQUEST
        assert worker.standing == (2, False)
        assert worker.runner.num_inside == 0


@pytest.mark.parametrize("fault", ["half_written", "wrong_experts"])
async def test_failed_weights_end_requests_without_a_token_as_worker_fenced(tmp_path: Path, fault: str) -> None:
    """If the new weights fail, a request without a token ends as `worker_fenced`, before or after its restart."""
    async with rig(tmp_path, SLOW, engine=PrefillNotifyingEngine) as worker:
        first = await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        await worker.flow.resume()
        await begin(worker, "r")
        worker.engine.faults = SyntheticFaults(load=fault)  # type: ignore[arg-type]
        command = update(worker.root / "2", 3, expected_canary=first)
        with pytest.raises(ControlError):
            await worker.weights.update(command, worker.report)
        end = worker.end("r")

        assert end.error.code is ErrorCode.WORKER_FENCED
        assert worker.tokens("r") == []


async def test_a_load_that_changed_nothing_keeps_a_partly_computed_prompt(tmp_path: Path) -> None:
    """A load that changed nothing leaves a partly computed prompt unchanged, with the old version."""
    async with rig(tmp_path / "a", SLOW, engine=PrefillNotifyingEngine) as worker:
        await begin(worker, "r")
        worker.engine.faults = SyntheticFaults(load="refused")
        with pytest.raises(ControlError):
            await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        await worker.flow.resume()
        tokens = await worker.until_end("r")

        expected_ids, expected_rows = await fresh(tmp_path / "b", fill=1)
        assert {token.weight_version for token in tokens} == {1}
        assert [token.token_id for token in tokens] == expected_ids
        np.testing.assert_array_equal(rows_of(worker, "r"), expected_rows)


async def test_a_partly_computed_prompt_is_recomputed_after_a_transfer(tmp_path: Path) -> None:
    """A prompt that was partly computed before a transfer has only rows of the new weights."""
    async with rig(tmp_path, SLOW, engine=PrefillNotifyingEngine) as worker:
        await begin(worker, "r")
        await worker.transfer.start(StartWeightUpdate(mode="keep"), "c")
        await worker.transfer.add_chunk(UpdateWeightChunk(info={"seed": 7}), "c")
        await worker.transfer.finish(FinishWeightUpdate(version=2), worker.report)
        await worker.flow.resume()
        await worker.until_end("r")
        await begin(worker, "later")
        await worker.flow.resume()
        await worker.until_end("later")

        np.testing.assert_array_equal(rows_of(worker, "r"), rows_of(worker, "later"))
        assert [token.token_id for token in worker.tokens("r")] == [token.token_id for token in worker.tokens("later")]


async def test_a_new_adapter_restarts_only_the_prompts_that_use_the_adapter(tmp_path: Path) -> None:
    """A new adapter restarts only the partly computed prompts that use it. Other prompts continue."""
    async with rig(tmp_path, SLOW, engine=PrefillNotifyingEngine) as worker:
        await worker.loras.load(load_lora("a", worker.adapter("one", 1), 1), worker.report)
        await worker.flow.resume()
        await begin(worker, "with", lora="a")
        await worker.start("without", prompt=PROMPT)
        await worker.loras.load(load_lora("a", worker.adapter("two", 2), 2), worker.report)
        queued = [(one.key.split("/")[1], one.salt) for one in worker.engine._waiting]
        await worker.flow.resume()
        tokens = await worker.until_end("with")
        await begin(worker, "later", lora="a")
        await worker.flow.resume()
        await worker.until_end("later")

        assert queued == [("without", "1.0."), ("with", "1.2.")]
        assert {token.lora_version for token in tokens} == {2}
        assert [token.token_id for token in tokens] == [token.token_id for token in worker.tokens("later")]
        np.testing.assert_array_equal(rows_of(worker, "with"), rows_of(worker, "later"))


def test_the_rows_of_a_prompt_are_sent_once_with_its_first_token() -> None:
    """A client gets no row without its token: the prompt's rows are sent once, from the last computation."""
    held = make_links()
    ear = Ear(held)
    name = held.offer(ear.origin("r"), request_of(3, request_id="r"), capabilities(routing=True), NOW)
    shape = capabilities(routing=True).routed_experts

    def step(fill: int, rows: int, start: int, *tokens: int, end: FinishReason | None = None) -> RequestStep:
        array = np.full((rows, shape.num_layers, shape.top_k), fill, np.uint8)
        ids = np.array(tokens, np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        return RequestStep(
            key=name,
            token_ids=ids,
            logprobs=logprobs,
            routed_experts=array,
            routed_experts_start=start,
            finish_reason=end,
        )

    held.add_steps([step(1, 2, 0)], NOW)
    ear.hear()
    assert ear.chunks("r") == []
    assert held.requests.restart_unbegun(None) == [name]
    held.add_steps([step(2, 1, 0)], NOW)
    held.add_steps([step(3, 2, 1, 7, end=FinishReason.LENGTH)], NOW)
    ear.hear()

    rows = np.concatenate(
        [chunk.routed_experts.numpy() for chunk in ear.chunks("r") if chunk.routed_experts is not None]
    )
    assert rows[:, 0, 0].tolist() == [2, 3, 3]
    assert [chunk.is_terminal for chunk in ear.chunks("r")][-1]
    assert held.requests.restart_unbegun(None) == []


async def test_after_a_forced_flush_the_next_chunk_marks_all_kv_as_new(tmp_path: Path) -> None:
    """A request with tokens keeps its old KV. After a forced flush, its next chunk states that all KV is new."""
    for clear_cache in (False, True):
        async with rig(tmp_path / str(clear_cache)) as worker:
            worker.links.reports_kv = worker.engine.reports_recomputed_kv
            await worker.start("r", 60_000)
            await worker.until_tokens("r", 5)
            await worker.flow.stop("keep", 10.0)
            worker.hear()
            command = update(worker.checkpoint("2", 2), 2, clear_cache=clear_cache)
            await worker.weights.update(command, worker.report)
            await worker.flow.resume()
            await worker.until_tokens("r", len(worker.tokens("r")) + 1)
            chunks = [chunk for chunk in worker._ear.chunks("r") if chunk.num_tokens]

            [first_new, *_] = [chunk for chunk in chunks if chunk.weight_version == 2]
            assert first_new.kv_recomputed is clear_cache
            assert [chunk.kv_recomputed for chunk in chunks if chunk is not first_new] == [False] * (len(chunks) - 1)


@pytest.mark.parametrize("reports", [False, True])
async def test_recomputed_kv_is_marked_if_the_engine_reports_preemptions(tmp_path: Path, reports: bool) -> None:
    """With a preemption every five tokens, each fifth token is marked as having recomputed KV.

    With an engine that does not report it, the field is empty.
    """
    config = SyntheticConfig(reports_recomputed_kv=reports, faults=SyntheticFaults(preempt_every=5))
    async with rig(tmp_path, config) as worker:
        worker.links.reports_kv = worker.engine.reports_recomputed_kv
        await worker.start("r", 20)
        await worker.until_end("r")
        chunks = [chunk for chunk in worker._ear.chunks("r") if chunk.num_tokens]

    told = [i for i, chunk in enumerate(chunks) for _ in range(chunk.num_tokens) if chunk.kv_recomputed]
    assert {chunk.kv_recomputed for chunk in chunks} == ({True, False} if reports else {None})
    if reports:
        firsts = np.cumsum([0, *[chunk.num_tokens for chunk in chunks]])
        assert [int(firsts[i]) for i in sorted(set(told))] == [5, 10, 15]

"""Adapters are replaced with an exact cut, and survive new weights or are removed.

The worker reports them correctly.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rollbus
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.control import UnloadLora
from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode, RequestRejected, RequestTimeout
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.requests import admission
from tests.control.support import write_adapter, write_checkpoint
from tests.support.fleet import StartServed, synthetic_worker, until_state, worker_of
from tests.support.hand_worker import request
from tests.support.invariants import observing
from tests.support.waits import SOON_S
from tests.workers.control_support import PROMPT, Rig, load_lora, rig, update

LONG = 60_000
"""The tokens of a request that does not end by itself in a test."""


async def load(worker: Rig, name: str, path: Path, version: int) -> None:
    """Load an adapter, and resume the worker."""
    await worker.loras.load(load_lora(name, path, version), worker.report)
    await worker.flow.resume()


async def test_tokens_of_a_request_with_an_adapter_have_the_adapters_version(tmp_path: Path) -> None:
    """Tokens of a request with an adapter have the adapter's version, and tokens of the base model have none."""
    async with rig(tmp_path) as worker:
        await load(worker, "a", worker.adapter("a"), 7)
        with_adapter, without = await worker.generate("r", lora="a"), await worker.generate("s")
        assert with_adapter != without
        assert {token.lora_version for token in worker.tokens("r")} == {7}
        assert {token.lora_version for token in worker.tokens("s")} == {None}
        assert worker.links.versions.loras == {"a": 7}
        assert worker.stages == ["checking", "reading", "pausing", "loading"]


async def test_a_replaced_adapter_makes_an_exact_cut_in_its_streams(tmp_path: Path) -> None:
    """Before the cut, tokens are from the old adapter and have its version.

    Afterwards they are from the new adapter.
    """
    async with rig(tmp_path / "w") as worker, rig(tmp_path / "o") as old, rig(tmp_path / "n") as new:
        await load(old, "a", old.adapter("1", 1), 1)
        await load(new, "a", new.adapter("2", 2), 2)
        await load(worker, "a", worker.adapter("1", 1), 1)
        await worker.begin("r", LONG, lora="a")
        await load(worker, "a", worker.adapter("2", 2), 2)
        await worker.until_tokens("r", len(worker.tokens("r")) + 20)
        worker.stop()
        tokens = await worker.until_end("r")

        versions = [token.lora_version for token in tokens]
        token_ids = [token.token_id for token in tokens]
        cut = versions.index(2)
        assert versions == [1] * cut + [2] * (len(tokens) - cut)
        assert token_ids[:cut] == await old.generate("r", num_tokens=cut, lora="a")
        rest = PROMPT + token_ids[:cut]
        assert token_ids[cut:] == await new.generate("r", num_tokens=len(tokens) - cut, prompt=rest, lora="a")


@pytest.mark.proves("P80")
async def test_a_replaced_adapter_finds_no_cached_prefix_of_the_old_adapter(tmp_path: Path) -> None:
    """A replaced adapter finds no cached prefix of the old adapter with the same name.

    The same holds for an adapter that was unloaded and loaded again.
    """
    async with rig(tmp_path, SyntheticConfig(prefix_cache=True)) as worker:
        for number in range(3):
            await load(worker, "a", worker.adapter(f"{number}", number), number)
            await worker.generate(f"first-{number}", lora="a")
            await worker.generate(f"second-{number}", lora="a")
        await worker.loras.unload(UnloadLora(name="a"))
        await load(worker, "a", worker.adapter("2", 2), 2)
        await worker.generate("again", lora="a")
        ids = [f"{which}-{number}" for number in range(3) for which in ("first", "second")]
        assert [cached_tokens(worker, request_id) for request_id in [*ids, "again"]] == [0, 32, 0, 32, 0, 32, 0]


def cached_tokens(worker: Rig, request_id: str) -> int | None:
    """Return the number of cached tokens in the terminal chunk of a request."""
    chunk = worker.end(request_id)
    return chunk.end.cached_tokens


async def test_an_adapter_is_current_only_with_the_same_version_and_source(tmp_path: Path) -> None:
    """An adapter is current only with the same version and the same source."""
    async with rig(tmp_path) as worker:
        path = worker.adapter("a")
        await load(worker, "a", path, 1)
        assert worker.loras.is_current(load_lora("a", path, 1))
        assert not worker.loras.is_current(load_lora("a", path, 2))
        assert not worker.loras.is_current(load_lora("a", worker.adapter("b"), 1))
        assert not worker.loras.is_current(load_lora("b", path, 1))


async def test_an_unload_first_ends_the_requests_of_the_adapter(tmp_path: Path) -> None:
    """An unload ends the adapter's requests with ABORT and their tokens, and other requests continue.

    The unload of an adapter that is not loaded succeeds.
    """
    async with rig(tmp_path) as worker:
        await load(worker, "a", worker.adapter("a"), 1)
        await worker.start("r", LONG, lora="a")
        await worker.start("s", LONG)
        await worker.until_tokens("r", 5)
        await worker.loras.unload(UnloadLora(name="a"))
        await worker.loras.unload(UnloadLora(name="a"))
        await worker.loras.unload(UnloadLora(name="never there"))
        end = worker.end("r")
        assert end.finish_reason is FinishReason.ABORT
        assert worker.links.versions.loras == {}
        assert worker.engine.loras == {}
        await worker.until_tokens("s", len(worker.tokens("s")) + 5)


async def test_an_adapter_is_unloaded_during_a_pause(tmp_path: Path) -> None:
    """During a pause, the engine ends the requests of an unloaded adapter.

    The client receives tokens of other requests only after the resume.
    """
    async with rig(tmp_path) as worker:
        await load(worker, "a", worker.adapter("a"), 1)
        await worker.start("r", LONG, lora="a")
        await worker.start("s", LONG)
        await worker.until_tokens("s", 5)
        await worker.flow.stop("keep", 10.0)
        heard = len(worker.tokens("s"))
        await worker.loras.unload(UnloadLora(name="a"))
        assert len(worker.tokens("s")) == heard
        assert worker.runner.is_engine_paused
        await worker.flow.resume()
        tokens = await worker.until_end("r")
        assert {token.lora_version for token in tokens} == {1}
        assert worker.end("r").finish_reason is FinishReason.ABORT
        await worker.until_tokens("s", heard + 5)


async def test_an_adapter_that_the_engine_rejects_changes_nothing(tmp_path: Path) -> None:
    """If the engine rejects an adapter, the loaded adapter of the same name continues to serve."""
    async with rig(tmp_path) as worker:
        await load(worker, "a", worker.adapter("1", 1), 1)
        await worker.begin("r", LONG, lora="a")
        worker.engine.faults = SyntheticFaults(load_lora=True)
        for name in ("a", "b"):
            with pytest.raises(ControlError) as caught:
                await load(worker, name, worker.adapter("2", 2), 2)
            assert caught.value.code is ControlCode.ENGINE_ERROR
        assert worker.links.versions.loras == {"a": 1}
        await worker.flow.resume()
        await worker.until_tokens("r", len(worker.tokens("r")) + 5)
        assert {token.lora_version for token in worker.tokens("r")} == {1}


class AdapterLosingEngine(SyntheticEngine):
    """Loses the adapter that it should replace, or never returns."""

    fails: bool | None = None

    async def load_lora(self, name: str, path: Path, version: int) -> None:
        """Fail as `fails` is set."""
        if self.fails is None:
            await super().load_lora(name, path, version)
            return
        await self.unload_lora(name)
        if self.fails:
            raise ControlError(ControlCode.ENGINE_ERROR, "it is lost")
        await asyncio.Event().wait()


@pytest.mark.parametrize("fails", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_an_adapter_that_is_lost_in_a_replacement_cannot_be_named(tmp_path: Path, fails: bool) -> None:
    """An adapter that is lost in a replacement cannot be named, whether the engine reports the loss or hangs.

    Its requests end as retryable.
    """
    # With steps without a pause, the threads of low priority that read the files may take longer than the command has.
    async with rig(tmp_path, SyntheticConfig(step_s=0.005), engine=AdapterLosingEngine) as worker:
        await load(worker, "a", worker.adapter("1", 1), 1)
        await worker.begin("r", LONG, lora="a")
        assert isinstance(worker.engine, AdapterLosingEngine)
        worker.engine.fails = fails
        # Only a hanging engine needs the limit: on a busy machine it may end before the engine is asked.
        command = load_lora("a", worker.adapter("2", 2), 2, timeout_s=SOON_S if fails else 1.0)
        with pytest.raises(ControlError):
            await worker.loras.load(command, worker.report)
        assert worker.links.versions.loras == {}
        end = worker.end("r")
        assert end.error.code is ErrorCode.WORKER_FENCED
        assert {token.lora_version for token in worker.tokens("r")} == {1}


async def test_an_adapter_that_the_engine_does_not_unload_stays_announced(tmp_path: Path) -> None:
    """If the engine does not unload an adapter, the command fails and the worker still announces the adapter."""
    async with rig(tmp_path) as worker:
        await load(worker, "a", worker.adapter("a"), 1)
        worker.engine.faults = SyntheticFaults(unload_lora=True)
        with pytest.raises(ControlError, match="did not unload the adapter"):
            await worker.loras.unload(UnloadLora(name="a"))
        assert worker.links.versions.loras == {"a": 1}


async def test_an_adapter_above_the_maximum_number_is_rejected(tmp_path: Path) -> None:
    """One adapter more than the engine can hold is rejected. A replacement does not count as one more."""
    async with rig(tmp_path, SyntheticConfig(max_loras=1)) as worker:
        await load(worker, "a", worker.adapter("a"), 1)
        with pytest.raises(ControlError, match="can hold 1 adapters and has a"):
            await load(worker, "b", worker.adapter("a"), 1)
        await load(worker, "a", worker.adapter("a"), 2)
    async with rig(tmp_path, SyntheticConfig(max_loras=0)) as worker:
        with pytest.raises(ControlError) as caught:
            await load(worker, "a", worker.adapter("a"), 1)
        assert caught.value.code is ControlCode.UNSUPPORTED


@pytest.mark.parametrize("loses_loras", [True, False])
async def test_adapters_survive_new_weights(tmp_path: Path, loses_loras: bool) -> None:
    """Adapters survive new weights, also in an engine that loses them.

    Requests in flight continue with the adapter on the new weights.
    """
    async with rig(tmp_path / "w") as worker, rig(tmp_path / "o", fill=2) as other:
        await load(worker, "a", worker.adapter("a"), 5)
        await load(other, "a", other.adapter("a"), 5)
        await worker.begin("r", LONG, lora="a")
        worker.engine.faults = SyntheticFaults(loses_loras=loses_loras)
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        await worker.flow.resume()
        await worker.until_tokens("r", len(worker.tokens("r")) + 20)
        worker.stop()
        tokens = await worker.until_end("r")

        cut = [token.weight_version for token in tokens].index(2)
        token_ids = [token.token_id for token in tokens]
        rest = PROMPT + token_ids[:cut]
        assert {token.lora_version for token in tokens} == {5}
        assert token_ids[cut:] == await other.generate("r", num_tokens=len(tokens) - cut, prompt=rest, lora="a")


async def test_an_adapter_that_cannot_be_reloaded_after_new_weights_is_removed(tmp_path: Path) -> None:
    """An adapter that cannot be loaded again after new weights is removed with the reason.

    Its requests end as retryable, and other requests continue with the new weights.
    """
    async with rig(tmp_path) as worker:
        await load(worker, "a", worker.adapter("a"), 1)
        await load(worker, "b", worker.adapter("b"), 1)
        await worker.start("r", LONG, lora="a")
        await worker.start("s", LONG, lora="b")
        await worker.until_tokens("s", 5)
        (tmp_path / "a" / "adapter_config.json").unlink()
        worker.engine.faults = SyntheticFaults(loses_loras=True)
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        assert worker.standing == (2, False)
        assert worker.links.versions.loras == {"b": 1}
        assert "adapter_config.json" in worker.loras.lost["a"]
        assert "adapter a was lost with older weights" in (worker.loras.problem or "")
        end = worker.end("r")
        assert end.error.code is ErrorCode.WORKER_FENCED
        await worker.flow.resume()
        await worker.until_tokens("s", len(worker.tokens("s")) + 20)
        await load(worker, "a", worker.adapter("a"), 2)
        assert worker.loras.problem is None


# The choice of a worker for a request with an adapter, if not all workers have the adapter.


FAILS = SyntheticConfig.from_args({"faults": {"load_lora": True}})


async def test_a_worker_without_the_adapter_leaves_its_requests_to_other_workers(
    nats_url: str, fleet: str, one_worker: StartServed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of two workers failed to load an adapter, the other worker serves all its requests.

    This holds for requests from the queue and of sessions. Repeated deliveries do not make a request a poison request,
    and a request with an unknown adapter is rejected.
    """
    monkeypatch.setattr(admission, "ADAPTER_S", 0.002)
    one = write_checkpoint(tmp_path / "one", seed=1)
    adapter = write_adapter(tmp_path / "adapter")
    fields: dict[str, Any] = {"weight_roots": (str(tmp_path),), "model_path": str(one), "model": "m"}
    async with (
        observing(nats_url, fleet) as observer,
        one_worker(worker_id="lacks", config=FAILS, **fields) as (rb, lacks, _),
    ):
        async with synthetic_worker(nats_url, fleet, worker_id="has", **fields):
            await rb.fleet.wait_for_workers(2)
            with pytest.raises(rollbus.CommandIncomplete) as partial:
                await rb.fleet.load_lora("math", adapter)
            wanted = [
                request(request_id=f"r{i}", lora="math", session_id=f"s{i}" if i % 2 else None) for i in range(40)
            ]
            results = [generation async for generation in rb.complete_many(wanted)]
            state = await until_state(rb, lambda state: worker_of(state, "lacks").last_error)
            with pytest.raises(RequestRejected, match="lora 'maths' is not loaded") as unknown:
                await rb.complete(request(lora="maths"))
        with pytest.raises(RequestTimeout, match="the request waits for a worker with the adapter 'math'"):
            await rb.complete(request(lora="math", timeout_s=0.5))
        await observer.check_at_rest()

    assert str(worker_of(state, "lacks").last_error).startswith("adapter math differs from the desired state: ")
    assert list(partial.value.ledger.failed) == ["lacks"]
    assert {result.worker_ids for result in results} == {("has",)}
    assert lacks.stats().intake.too_new > 0
    assert unknown.value.code is ErrorCode.UNSUPPORTED


async def test_a_worker_without_the_adapter_of_the_base_does_not_serve_the_base(
    nats_url: str, fleet: str, one_worker: StartServed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of two workers failed to load an adapter under the model's name, the other worker serves all requests.

    New weights end the adapter, and both workers serve again.
    """
    monkeypatch.setattr(admission, "ADAPTER_S", 0.002)
    one, two = write_checkpoint(tmp_path / "one", seed=1), write_checkpoint(tmp_path / "two", seed=2)
    adapter = write_adapter(tmp_path / "adapter")
    fields: dict[str, Any] = {"weight_roots": (str(tmp_path),), "model_path": str(one), "model": "m"}
    async with (
        one_worker(worker_id="lacks", config=FAILS, **fields) as (rb, _, _),
        synthetic_worker(nats_url, fleet, worker_id="has", **fields),
    ):
        await rb.fleet.wait_for_workers(2)
        with pytest.raises(rollbus.CommandIncomplete) as partial:
            await rb.fleet.load_lora("m", adapter, version=2, for_base=True)
        wanted = [request(request_id=f"r{i}", session_id=f"s{i}" if i % 2 else None) for i in range(40)]
        results = [generation async for generation in rb.complete_many(wanted)]
        await rb.fleet.update_weights(two, version=3)
        wanted = [request(request_id=f"after{i}", session_id=f"s{i}") for i in range(40)]
        after = [generation async for generation in rb.complete_many(wanted)]

    assert list(partial.value.ledger.failed) == ["lacks"]
    assert {result.worker_ids for result in results} == {("has",)}
    assert all(result.lora_versions is not None and set(result.lora_versions) == {2} for result in results)
    assert {result.worker_ids for result in after} == {("has",), ("lacks",)}
    assert all(result.lora_versions is None for result in after)

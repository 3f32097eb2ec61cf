"""Weights are replaced with an exact cut, and serve requests only after their verification."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollbus.schemas.control import PauseMode
from rollbus.schemas.errors import ControlCode, ControlError, EngineDead, ErrorCode
from rollbus.workers.control.staging import StageKey
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from tests.support.checkpoints import write_checkpoint
from tests.support.waits import SOON_S
from tests.workers.control_support import PROMPT, rig, source, update

LONG = 60_000
"""The tokens of a request that does not end by itself in a test."""


@pytest.mark.proves("P16")
async def test_a_kept_stream_changes_to_the_new_weights_at_an_exact_cut(tmp_path: Path) -> None:
    """Before the cut, a kept stream has tokens and version of the old weights, and afterwards of the new weights."""
    config = SyntheticConfig(step_s=0.005)
    async with rig(tmp_path / "a", config) as worker, rig(tmp_path / "b") as old, rig(tmp_path / "c", fill=2) as new:
        path = worker.checkpoint("2", 2)
        await worker.begin("r", LONG)
        await worker.weights.update(update(path, 2), worker.report)
        await worker.flow.resume()
        await worker.until_tokens("r", len(worker.tokens("r")) + 20)
        worker.stop()
        tokens = await worker.until_end("r")

        versions = [token.weight_version for token in tokens]
        token_ids = [token.token_id for token in tokens]
        cut = versions.index(2)
        assert versions == [1] * cut + [2] * (len(tokens) - cut)
        assert token_ids[:cut] == await old.generate("r", num_tokens=cut)
        assert token_ids[cut:] == await new.generate("r", num_tokens=len(tokens) - cut, prompt=PROMPT + token_ids[:cut])
        assert (worker.weights.version, worker.weights.source) == (2, source(path))
        assert worker.stages == ["checking", "reading", "pausing", "loading", "verifying"]


@pytest.mark.proves("P19")
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_an_updated_worker_equals_a_fresh_one(tmp_path: Path, mode: PauseMode) -> None:
    """The canary and output of an updated worker equal those of a worker that started on the checkpoint."""
    async with rig(tmp_path / "a") as updated, rig(tmp_path / "b", fill=2) as fresh:
        before, cache_epoch = updated.weights.canary, updated.runner.cache_epoch
        canary = await updated.weights.update(update(updated.checkpoint("2", 2), 2, mode=mode), updated.report)
        await updated.flow.resume()
        assert before != canary == updated.weights.canary == fresh.weights.canary
        # A new cache epoch voids all knowledge about the cached prefixes.
        assert updated.runner.cache_epoch > cache_epoch
        assert await updated.generate("r") == await fresh.generate("r")


async def test_an_engine_with_sampling_masks_gives_the_same_canary(tmp_path: Path) -> None:
    """An engine with sampling masks rejects greedy requests. The worker's other request gives the same canary."""
    masking = SyntheticConfig(sampling_mask=True)
    async with rig(tmp_path / "a", masking) as masked, rig(tmp_path / "b", fill=2) as fresh:
        path = masked.checkpoint("2", 2)
        canary = await masked.weights.update(update(path, 2, expected_canary=fresh.weights.canary), masked.report)

        assert canary == fresh.weights.canary
        assert len(set(canary.logprobs)) > 1


async def test_tokens_generated_during_the_canary_are_held_until_the_resume(tmp_path: Path) -> None:
    """Tokens that other requests get during the canary are held until the resume, and have the new version."""
    async with rig(tmp_path) as worker:
        await worker.begin("r", LONG)
        await worker.flow.stop("keep", 10.0)
        heard = len(worker.tokens("r"))
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        assert len(worker.tokens("r")) == heard
        assert worker.runner.is_engine_paused
        assert not worker.door.is_open
        await worker.flow.resume()
        await worker.until_tokens("r", heard + 20)
        assert {token.weight_version for token in worker.tokens("r")[heard:]} == {2}


@pytest.mark.proves("P16")
async def test_unsent_tokens_keep_their_version_through_a_second_update(tmp_path: Path) -> None:
    """Unsent tokens of version 2 keep their version when version 3 follows."""
    async with rig(tmp_path) as worker:
        await worker.begin("r", LONG)
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        await worker.weights.update(update(worker.checkpoint("3", 3), 3), worker.report)
        await worker.flow.resume()
        await worker.until_tokens("r", len(worker.tokens("r")) + 1)
        versions = [token.weight_version for token in worker.tokens("r")]
        assert versions == sorted(versions)
        # The canary needs eight steps, in which this request gets at least as many tokens.
        assert versions.count(2) >= 8
        assert versions.count(3) > 0


@pytest.mark.proves("P28")
async def test_a_broken_reload_is_found_at_the_start(tmp_path: Path) -> None:
    """An engine whose routing changes when it reloads its own checkpoint does not start, and reports the reason."""
    config = SyntheticConfig(faults=SyntheticFaults(load="wrong_experts"))
    with pytest.raises(ExceptionGroup) as caught:
        async with rig(tmp_path, config):
            pass
    assert caught.group_contains(EngineDead, match="cannot reload its own checkpoint .* expert choices agree")


async def test_a_checkpoint_with_another_canary_than_before_poisons_the_worker(tmp_path: Path) -> None:
    """A checkpoint with another canary than before poisons the worker, and held tokens are never sent."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        await worker.weights.update(update(path, 2), worker.report)
        await worker.weights.update(update(worker.checkpoint("3", 3), 3), worker.report)
        await worker.flow.resume()
        await worker.begin("r", LONG)
        worker.engine.faults = SyntheticFaults(load="wrong_experts")
        with pytest.raises(ControlError, match="differs from the earlier canary of these weights") as caught:
            await worker.weights.update(update(path, 4), worker.report)

        assert caught.value.code is ControlCode.NOT_VERIFIED
        assert worker.standing == (3, True)
        end = worker.end("r")
        assert end.error.code is ErrorCode.WORKER_FENCED
        assert {token.weight_version for token in worker.tokens("r")} == {3}


async def test_weights_are_used_only_if_their_canary_equals_the_trainers(tmp_path: Path) -> None:
    """Weights whose canary differs from the trainer's canary are not used. Weights with the same canary are."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        good = await worker.weights.update(update(path, 2), worker.report)
        assert good is not None
        wrong = update(worker.checkpoint("3", 3), 3, expected_canary=good)
        with pytest.raises(ControlError, match="differs from the expected one: the tokens differ"):
            await worker.weights.update(wrong, worker.report)
        assert worker.standing == (2, True)
        await worker.weights.update(update(path, 4, expected_canary=good), worker.report)
        assert worker.standing == (4, False)


async def test_an_expected_canary_is_compared_for_weights_that_are_already_loaded(tmp_path: Path) -> None:
    """For weights that are already loaded, the expected canary is compared with their earlier canary."""
    async with rig(tmp_path) as worker:
        first = await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        path = worker.checkpoint("3", 3)
        good = await worker.weights.update(update(path, 3, expected_canary=None), worker.report)
        assert await worker.weights.update(update(path, 3, expected_canary=good), worker.report) == good
        with pytest.raises(ControlError, match="differs from the expected one"):
            await worker.weights.update(update(path, 3, expected_canary=first), worker.report)
        assert worker.standing == (3, False)


async def test_an_expected_canary_needs_no_routing(tmp_path: Path) -> None:
    """An expected canary without routing is compared by tokens and log probabilities. A wrong length is rejected."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        good = await worker.weights.update(update(path, 2), worker.report)
        known = replace(good, routed_experts=None, shape=None)
        await worker.weights.update(update(path, 3, expected_canary=known), worker.report)
        assert worker.standing == (3, False)
        short = replace(known, token_ids=known.token_ids[:4], logprobs=known.logprobs[:4])
        with pytest.raises(ControlError, match="has 4 tokens and 4 logprobs; allowed: 8 of each") as caught:
            await worker.weights.update(update(path, 4, expected_canary=short), worker.report)
        assert caught.value.code is ControlCode.INVALID_COMMAND
        assert worker.standing == (3, False)


async def test_an_overwritten_checkpoint_may_give_another_canary(tmp_path: Path) -> None:
    """The earlier canary of a folder does not count after its files have changed."""
    async with rig(tmp_path) as worker:
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        write_checkpoint(worker.own, fill=9)
        await worker.weights.update(update(worker.own, 3), worker.report)
        assert worker.standing == (3, False)


async def test_a_load_that_the_engine_refuses_changes_nothing(tmp_path: Path) -> None:
    """If the engine refuses to load, the version, the weights and the kept requests do not change."""
    async with rig(tmp_path) as worker, rig(tmp_path / "other") as reference:
        await worker.begin("r", LONG)
        worker.engine.faults = SyntheticFaults(load="refused")
        with pytest.raises(ControlError) as caught:
            await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        assert caught.value.code is ControlCode.ENGINE_ERROR
        assert (*worker.standing, worker.weights.problem) == (1, False, None)
        await worker.flow.resume()
        await worker.until_tokens("r", len(worker.tokens("r")) + 20)
        worker.stop()
        tokens = await worker.until_end("r")
        assert [token.token_id for token in tokens] == await reference.generate("r", num_tokens=len(tokens))
        assert {token.weight_version for token in tokens} == {1}


@pytest.mark.proves("P79")
@pytest.mark.parametrize(
    ("fault", "code"),
    [("half_written", ControlCode.HALF_WRITTEN), pytest.param("hangs", ControlCode.TIMEOUT, marks=pytest.mark.slow)],
)
async def test_a_failed_load_poisons_the_worker(tmp_path: Path, fault: str, code: ControlCode) -> None:
    """A failed load keeps the version and ends requests as retryable. A later update makes the worker serve again."""
    async with rig(tmp_path) as worker:
        await worker.begin("r", LONG)
        worker.engine.faults = SyntheticFaults(load=fault)  # type: ignore[arg-type]
        path = worker.checkpoint("2", 2)
        with pytest.raises(ControlError) as caught:
            await worker.weights.update(update(path, 2, timeout_s=5.0 if fault == "hangs" else SOON_S), worker.report)
        assert caught.value.code is code
        assert (*worker.standing, worker.weights.problem) == (1, True, caught.value.message)
        end = worker.end("r")
        assert end.error.code is ErrorCode.WORKER_FENCED

        worker.engine.faults = SyntheticFaults()
        await worker.weights.update(update(path, 2, mode="wait"), worker.report)
        await worker.flow.resume()
        assert (*worker.standing, worker.weights.problem) == (2, False, None)
        await worker.generate("s")


async def test_an_update_that_is_cancelled_during_its_load_poisons_the_worker(tmp_path: Path) -> None:
    """An update that is cancelled during its load leaves weights in an unknown state, so it poisons the worker."""
    async with rig(tmp_path, SyntheticConfig(faults=SyntheticFaults(load="hangs", good_loads=1))) as worker:

        def give_up(stage: str) -> None:
            if stage == "loading":
                scope.reschedule(0.0)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as scope:
                await worker.weights.update(update(worker.checkpoint("2", 2), 2), give_up)
        assert worker.standing == (1, True)


async def test_a_truncated_checkpoint_is_rejected_before_the_worker_pauses(tmp_path: Path) -> None:
    """A truncated checkpoint is rejected before the worker pauses anything, and the message names the file."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        for attempt in (
            worker.weights.update(update(path, 2), worker.report),
            worker.stager.stage(StageKey(source(path))),
        ):
            with pytest.raises(ControlError, match=r"model\.safetensors") as caught:
                await attempt
            assert caught.value.code is ControlCode.BAD_SOURCE
        assert worker.standing == (1, False)
        assert worker.door.is_open
        assert not worker.runner.is_engine_paused
        await worker.stager.stage(StageKey(source(worker.own)))


async def test_a_source_that_disappears_before_its_load_leaves_the_weights_valid(tmp_path: Path) -> None:
    """If a source disappears before its load, the update fails and the present weights remain valid."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)

        def take_away(stage: str) -> None:
            if stage == "pausing":
                (path / "model.safetensors").unlink()
                (path / "model.safetensors").symlink_to("nothing")

        with pytest.raises(ControlError, match="were changed: stage its source again") as caught:
            await worker.weights.update(update(path, 2), take_away)

        assert type(caught.value) is ControlError
        assert caught.value.code is ControlCode.STORAGE
        assert worker.standing == (1, False)


@pytest.mark.slow
async def test_an_update_with_wait_fails_if_a_request_runs_for_too_long(tmp_path: Path) -> None:
    """With `wait`, an update fails if a request runs for too long, and the request continues."""
    async with rig(tmp_path, SyntheticConfig(step_s=0.01)) as worker:
        path = worker.checkpoint("2", 2)
        # The command's time then is for the request alone, not for the check of the checkpoint on a busy machine.
        await worker.stager.stage(StageKey(source(path)))
        await worker.start("r", LONG)
        with pytest.raises(ControlError, match="1 requests are in flight") as caught:
            await worker.weights.update(update(path, 2, mode="wait", timeout_s=2.0), worker.report)
        assert caught.value.code is ControlCode.TIMEOUT
        assert worker.standing == (1, False)
        await worker.until_tokens("r", len(worker.tokens("r")) + 5)


@pytest.mark.parametrize(
    ("mode", "clear_cache", "is_cleared"),
    [("keep", None, False), ("keep", True, True), ("wait", None, True), ("wait", False, False)],
)
async def test_an_update_flushes_the_cache_unless_requests_are_kept(
    tmp_path: Path, mode: PauseMode, clear_cache: bool | None, is_cleared: bool
) -> None:
    """The cache is flushed by default unless requests are kept. If that fails, the update changes nothing."""
    async with rig(tmp_path) as worker:
        worker.engine.faults = SyntheticFaults(reset_cache=True)
        command = update(worker.checkpoint("2", 2), 2, mode=mode, clear_cache=clear_cache)
        if not is_cleared:
            await worker.weights.update(command, worker.report)
            assert "flushing" not in worker.stages
            return
        with pytest.raises(ControlError) as caught:
            await worker.weights.update(command, worker.report)
        assert caught.value.code is ControlCode.CACHE_IN_USE
        assert "loading" not in worker.stages
        assert worker.standing == (1, False)


@pytest.mark.proves("P80")
async def test_new_requests_never_find_cached_prefixes_of_older_weights(tmp_path: Path) -> None:
    """New requests never find prefixes of older weights, also if the cache was not flushed."""
    async with rig(tmp_path, SyntheticConfig(prefix_cache=True)) as worker:
        for request_id in ("a", "b"):
            await worker.generate(request_id)
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        await worker.flow.resume()
        await worker.generate("c")
        cached = [worker.end(request_id).end.cached_tokens for request_id in ("a", "b", "c")]
        assert cached == [0, 32, 0]


async def test_weights_that_are_already_loaded_are_not_loaded_again(tmp_path: Path) -> None:
    """The start version and the last source are not loaded again. A poisoned worker always loads."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        assert await worker.weights.update(update(path, 1), worker.report) == worker.weights.canary
        assert worker.stages == []
        await worker.weights.update(update(path, 2), worker.report)
        worker.stages.clear()
        assert await worker.weights.update(update(path, 2), worker.report) == worker.weights.canary
        assert worker.stages == []
        await worker.weights.update(update(worker.checkpoint("other", 3), 2), worker.report)
        assert "loading" in worker.stages
        worker.stages.clear()
        worker.weights.mark_invalid("a controller fenced it")
        await worker.weights.update(update(worker.root / "other", 2), worker.report)
        assert "loading" in worker.stages
        assert worker.standing == (2, False)


async def test_the_canaries_of_a_fenced_worker_do_not_count(tmp_path: Path) -> None:
    """The canaries of a fenced worker do not count, so the same checkpoint may give another canary the next time."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        worker.engine.faults = SyntheticFaults(load="wrong_experts")
        wrong = await worker.weights.update(update(path, 2), worker.report)
        worker.weights.mark_invalid("a controller fenced it")
        worker.engine.faults = SyntheticFaults()
        assert await worker.weights.update(update(path, 2), worker.report) != wrong


async def test_weights_that_sleep_level_2_dropped_are_loaded_again(tmp_path: Path) -> None:
    """After sleep level 2, the same weights are loaded again, of the start or of an update, and never others."""
    async with rig(tmp_path) as worker:
        for version in (1, 2):
            before = await worker.generate(f"before-{version}")
            await worker.engine.sleep(2)
            await worker.engine.wake()
            await worker.weights.restore(worker.report, 10.0)
            await worker.flow.resume()
            assert await worker.generate(f"after-{version}") == before
            assert worker.standing == (version, False)
            await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
            await worker.flow.resume()
        worker.checkpoint("2", 3)
        with pytest.raises(ControlError, match=r"version 2 was \w{64}; .* now holds "):
            await worker.weights.restore(worker.report, 10.0)
        assert worker.standing == (2, True)


async def test_check_and_update_fail_if_the_engine_cannot_load_weights(tmp_path: Path) -> None:
    """If the engine cannot load weights, check and update fail without a change."""
    async with rig(tmp_path, SyntheticConfig(weight_updates=False)) as worker:
        for attempt in (
            worker.weights.update(update(worker.own, 2), worker.report),
            worker.stager.stage(StageKey(source(worker.own))),
        ):
            with pytest.raises(ControlError) as caught:
                await attempt
            assert caught.value.code is ControlCode.UNSUPPORTED


async def test_the_verification_of_a_reload_can_be_omitted(tmp_path: Path) -> None:
    """Without the verification of a reload, the engine loads nothing at the start."""
    config = SyntheticConfig(faults=SyntheticFaults(load="refused"))
    async with rig(tmp_path, config, prove_reload=False) as worker:
        assert worker.weights.canary is None
        await worker.generate("r")

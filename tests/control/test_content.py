"""A version is its content: directories that change after an update, on workers with the synthetic engine."""

import shutil
from pathlib import Path

import pytest

import rollbus
from rollbus.schemas.control import UpdateWeights
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.presence import WorkerPresence, WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import ask, assert_same, folders, serving, serving_here, start, write_checkpoint
from tests.support.fleet import all_serve, until_state, until_worker
from tests.support.requests import incomplete


def overwrite(folder: Path, other: Path) -> None:
    """Overwrite all files of a directory in place with those of another directory."""
    for file in other.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def copy(folder: Path, name: str) -> Path:
    """Copy a directory, and return the copy beside it."""
    return Path(shutil.copytree(folder, folder.parent / name))


async def recorded(rb: rollbus.Client) -> UpdateWeights:
    """Return the recorded weights of the model."""
    command = (await rb.fleet.state()).desired["m"].registers["weights"].command
    assert isinstance(command, UpdateWeights)
    return command


async def worker(rb: rollbus.Client, name: str) -> WorkerPresence:
    """Return the present state of a worker."""
    return next(each for each in (await rb.fleet.state()).workers if each.worker == name)


@pytest.mark.proves("P97")
async def test_a_worker_that_restarts_on_an_overwritten_directory_serves_nothing(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """After an overwrite in place, a worker that restarts is outdated with both digests, and the other serves on."""
    one, two = folders(tmp_path)
    latest, three = copy(two, "latest"), write_checkpoint(tmp_path / "three", seed=3)
    async with serving(nats_url, fleet, one, 2) as (rb, [_, victim]):
        await rb.fleet.update_weights(str(latest), version=2)
        before = await rb.complete(ask())
        digest = (await recorded(rb)).digest
        overwrite(latest, three)
        victim.kill()
        await victim.wait()
        async with start(nats_url, fleet, "w1", one):
            outdated = await until_worker(rb, "w1", WorkerState.OUTDATED)
            results = [await rb.complete(ask()) for _ in range(8)]
            shown = await run_rollbus(nats_url, fleet, "status")
        other = await rb.fleet.update_weights(str(latest), version=3)

    assert digest is not None
    assert outdated.last_error.startswith(f"version 2 was {digest}; {latest} now holds ")
    assert outdated.last_error in " ".join(shown.stdout.split())
    for result in results:
        assert_same(result, before)
        assert result.worker_ids == ("w0",)
    assert other.is_complete


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_a_refused_update_does_not_serve_other_content_under_the_old_version(
    nats_url: str, fleet: str, tmp_path: Path, is_recorded: bool
) -> None:
    """If the directory of the old version was overwritten, workers whose weights were replaced become outdated.

    This holds for a recorded version and for the checkpoint of the start. An update to a new version repairs it.
    """
    one, two = folders(tmp_path)
    three = write_checkpoint(tmp_path / "three", seed=3)
    async with serving_here(nats_url, f"{fleet}-other", three, 1) as other:
        canary = (await other.fleet.update_weights(str(three), version=2)).applied["w0"].canary
    source = copy(two, "latest") if is_recorded else one
    async with serving_here(nats_url, fleet, one, 2) as rb:
        if is_recorded:
            await rb.fleet.update_weights(str(source), version=2)
        before = await worker(rb, "w0")
        overwrite(source, two if source == one else one)
        error = await incomplete(rb.fleet.update_weights(str(source), version=3, expected_canary=canary))
        outdated = [await until_worker(rb, name, WorkerState.OUTDATED) for name in ("w0", "w1")]
        await rb.fleet.update_weights(str(three), version=4)
        result = await rb.complete(ask())

    assert "previous desired state was restored" in str(error)
    version = before.weight_version
    for each in outdated:
        assert each.last_error.startswith(f"version {version} was {before.weight_digest}; {source} now holds ")
        assert (each.weight_version, each.target_version) == (version, version)
    assert {*result.weight_versions.tolist()} == {4}


async def test_a_refusal_before_a_replacement_reloads_nothing(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If an update is refused before weights were replaced, workers serve what they hold and read no file again."""
    one, two = folders(tmp_path)
    latest, three = copy(two, "latest"), write_checkpoint(tmp_path / "three", seed=3)
    refusing = {"load": "refused", "good_loads": 2}  # the loads of the start and of version 2
    async with serving_here(nats_url, fleet, one, 2, faults=refusing) as rb:
        await rb.fleet.update_weights(str(latest), version=2)
        before = await rb.complete(ask())
        overwrite(latest, three)
        await incomplete(rb.fleet.update_weights(str(three), version=3))
        state = await until_state(rb, lambda state: all_serve(state) and state.desired["m"].epoch == 3)
        after = await rb.complete(ask())

    assert {each.weight_version for each in state.workers} == {2}
    assert_same(after, before)


async def test_workers_that_find_different_content_change_nothing(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If workers find different content at one path, the update is refused before the record, with both groups."""
    one, _ = folders(tmp_path / "a")
    for place, seed in (("a", 5), ("b", 6)):
        write_checkpoint(tmp_path / place / "ckpt", seed=seed)
    async with (
        start(nats_url, fleet, "w0", one, cwd=tmp_path / "a") as _,
        start(nats_url, fleet, "w1", one, "--weight-root", str(tmp_path), cwd=tmp_path / "b"),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)
        with pytest.raises(ControlError) as raised:
            await rb.fleet.update_weights("/proc/self/cwd/ckpt", version=2)
        state = await rb.fleet.state()

    assert raised.value.code is ControlCode.OTHER_CONTENT
    assert "on w0" in raised.value.message
    assert "on w1" in raised.value.message
    assert not state.desired
    assert {each.weight_version for each in state.workers} == {1}


async def test_a_rollback_records_what_it_finds_and_warns(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A rollback to a number with other content than before succeeds with a warning that has both digests.

    Without `allow_rollback`, the same number with other content is `old_version`.
    """
    one, two = folders(tmp_path)
    latest, three = copy(two, "latest"), write_checkpoint(tmp_path / "three", seed=3)
    async with serving_here(nats_url, fleet, one, 1) as rb:
        await rb.fleet.update_weights(str(latest), version=2)
        first = (await recorded(rb)).digest
        again = await rb.fleet.update_weights(str(latest), version=2)
        overwrite(latest, three)
        with pytest.raises(ControlError) as refused:
            await rb.fleet.update_weights(str(latest), version=2)
        await rb.fleet.update_weights(str(three), version=3)
        rollback = await rb.fleet.update_weights(str(latest), version=2, allow_rollback=True)
        second = (await recorded(rb)).digest
        same = await rb.fleet.update_weights(str(latest), version=2, allow_rollback=True)

    assert again.is_complete
    assert (again.warnings, again.epochs) == ((), {"m": 2})
    assert refused.value.code is ControlCode.OLD_VERSION
    assert str(first) in refused.value.message
    assert first != second
    assert rollback.warnings == (f"version 2 was {first} in an earlier record; {latest} now holds {second}",)
    assert same.is_complete


async def test_a_start_checkpoint_that_differs_from_a_serving_worker_is_outdated(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A worker whose start checkpoint differs from that of a serving worker of its version serves nothing.

    Without a serving worker it serves. An update ends the conflict.
    """
    one, two = folders(tmp_path)
    start_folder = copy(one, "start")
    async with serving_here(nats_url, fleet, start_folder, 1) as rb:
        held = await worker(rb, "w0")
        overwrite(start_folder, two)
        async with start(nats_url, fleet, "w1", start_folder):
            outdated = await until_worker(rb, "w1", WorkerState.OUTDATED)
            result = await rb.complete(ask())
            await rb.fleet.update_weights(str(one), version=2)
            await until_state(rb, lambda state: all_serve(state) and len(state.workers) == 2)
    async with serving_here(nats_url, f"{fleet}-alone", start_folder, 1) as rb:
        assert (await rb.complete(ask())).worker_ids == ("w0",)

    assert outdated.last_error.startswith(f"version 1 is {held.weight_digest} on w0; the start checkpoint")
    assert outdated.weight_digest != held.weight_digest
    assert result.worker_ids == ("w0",)


async def test_a_symlink_is_recorded_as_the_directory_that_it_named(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The directory behind a symlink is recorded, so that a later switch of the link changes nothing."""
    one, two = folders(tmp_path)
    (tmp_path / "latest").symlink_to(two)
    async with serving(nats_url, fleet, one, 1) as (rb, [process]):
        first = await rb.fleet.update_weights(str(tmp_path / "latest"), version=2)
        again = await rb.fleet.update_weights(str(tmp_path / "latest"), version=2)
        source = (await recorded(rb)).source.path
        before = await rb.complete(ask())
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to(one)
        # A worker that is killed before the ack of the request leaves it to a worker that lives for a lease.
        await until_state(rb, lambda state: not any(depth.waiting or depth.in_hand for depth in state.queues))
        process.kill()
        await process.wait()
        async with start(nats_url, fleet, "w0", one):
            await until_worker(rb, "w0", lambda each: each.weight_version == 2 and each.state is WorkerState.SERVING)
            after = await rb.complete(ask())

    assert (first.is_complete, again.is_complete, source) == (True, True, str(two))
    assert_same(after, before)


async def test_a_deep_sleep_ends_in_outdated_if_the_directory_was_overwritten(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A worker that dropped its weights for a sleep compares when it wakes."""
    one, two = folders(tmp_path)
    latest, three = copy(two, "latest"), write_checkpoint(tmp_path / "three", seed=3)
    async with serving_here(nats_url, fleet, one, 1) as rb:
        await rb.fleet.update_weights(str(latest), version=2)
        digest = (await recorded(rb)).digest
        await rb.fleet.sleep(level=2)
        overwrite(latest, three)
        await incomplete(rb.fleet.wake())
        outdated = await until_worker(rb, "w0", WorkerState.OUTDATED)

    assert outdated.last_error.startswith(f"version 2 was {digest}; {latest} now holds ")

"""`publish-weights` stores a folder as an anchor or delta, and `weights` shows the versions and their workers."""

import json
from pathlib import Path

import pytest

import rollbus
from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.weights import COLUMNS, ModelWeights, weights_as_json, weights_rows
from rollbus.schemas.manifest import ChainRecord, Link
from tests.cli.support import run_rollbus, run_together
from tests.control.support import MODEL, folders, serving
from tests.support.fleet import synthetic_worker

pytestmark = pytest.mark.slow


async def test_folders_are_published_and_shown(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The first version is an anchor. With the folder of the previous version, the second is a delta."""
    one, two = folders(tmp_path)
    own = ("--model", MODEL)
    first = await run_rollbus(nats_url, fleet, "publish-weights", str(one), "--version", "1", "--store-only", *own)
    based = ("--base", str(one), "--store-only", "--json")
    second = await run_rollbus(nats_url, fleet, "publish-weights", str(two), "--version", "2", *based, *own)
    shown, told = await run_together(nats_url, fleet, f"weights --model {MODEL}", f"weights --model {MODEL} --json")

    assert (first.code, second.code, shown.code, told.code) == (0, 0, 0, 0), first.stderr + second.stderr + shown.stderr
    assert "published version 1 as an anchor" in first.stdout
    published = json.loads(second.stdout)
    assert (published["version"], published["is_anchor"], published["num_changed"]) == (2, False, 2)
    [model] = json.loads(told.stdout)["models"]
    assert [(link["version"], link["kind"]) for link in model["versions"]] == [(1, "anchor"), (2, "delta")]
    assert model["versions"][1]["objects"] == published["objects"]
    assert (model["publisher"], model["chain_length"]) == (None, 1)
    assert "1 versions after the last anchor" in " ".join(shown.stdout.split())
    assert "no publisher" in shown.stdout


async def test_a_base_folder_with_other_hashes_is_refused(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A base folder is refused unless its hashes equal the committed hashes."""
    one, two = folders(tmp_path)
    own = ("--model", MODEL, "--store-only")
    early = await run_rollbus(nats_url, fleet, "publish-weights", str(two), "--version", "1", "--base", str(one), *own)
    await run_rollbus(nats_url, fleet, "publish-weights", str(one), "--version", "1", *own)
    other = await run_rollbus(nats_url, fleet, "publish-weights", str(one), "--version", "2", "--base", str(two), *own)
    (two / "config.json").write_text("{}")
    files = await run_rollbus(nats_url, fleet, "publish-weights", str(two), "--version", "2", "--base", str(one), *own)
    assert {early.code, other.code, files.code} == {ExitCode.USAGE}
    assert "no version is published" in early.stderr
    assert "version 1 was published with another model.layers.0" in other.stderr
    assert "version 1 was published with another config.json" in files.stderr


async def test_workers_load_the_published_version(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`publish-weights` shows the ledger, and `weights` shows the workers with a version.

    A single model needs no name.
    """
    one, two = folders(tmp_path)
    async with serving(nats_url, fleet, one, 2):
        ended = await run_rollbus(nats_url, fleet, "publish-weights", str(two), "--version", "2", "--json")
        lines = ("weights --json", "weights", f"publish-weights {two} --version 2")
        told, shown, refused = await run_together(nats_url, fleet, *lines)
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["ledger"]["complete"]
    [model] = json.loads(told.stdout)["models"]
    [version] = model["versions"]
    assert (version["recorded"], version["workers"]) == (True, ["w0", "w1"])
    assert "w0, w1" in shown.stdout
    assert refused.code == ExitCode.FAILED
    assert "version 2 is recorded already" in refused.stderr


def test_only_a_version_in_the_desired_state_is_recorded() -> None:
    """A version is recorded if the desired state names it, not if a publisher has noted it."""
    links = tuple(
        Link(objects=f"b/versions/{n}-1-0000000{n}", version=n, digest=f"{n:064x}", anchor_bytes=1) for n in (1, 2)
    )
    record = ChainRecord(model=MODEL, links=links, noted=(links[0].objects,))
    shown = ModelWeights(record=record, age_s=0.0, used=0, limit=1, recorded={links[1].objects}, workers={})
    assert [row[COLUMNS.index("recorded")] for row in weights_rows(shown)] == ["-", "yes"]
    assert [version["recorded"] for version in weights_as_json(shown)["versions"]] == [False, True]


async def test_without_workers_a_published_version_is_stored(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Without workers, the version is stored. A missing model name and a model without versions are errors."""
    one, _ = folders(tmp_path)
    nameless, nothing = await run_together(nats_url, fleet, f"publish-weights {one} --version 1", "weights")
    stored = await run_rollbus(nats_url, fleet, "publish-weights", str(one), "--version", "1", "--model", MODEL)
    assert (nameless.code, nothing.code, stored.code) == (ExitCode.USAGE, ExitCode.FAILED, ExitCode.NO_WORKERS)
    assert "--model NAME is required" in nameless.stderr
    assert "has no published weights" in nothing.stderr
    assert "version 1 is stored as objects:" in stored.stderr


async def test_an_error_names_what_the_fleet_has(nats_url: str, fleet: str) -> None:
    """The error of a wrong model, worker, path or fleet has the known names, and the reason of the only worker."""
    lines = (
        *("weights --model nope", "pause --worker nope", "drain nope"),
        *("update-weights /nope --version 1", "update-weights /proc --version 1"),
    )
    async with (
        synthetic_worker(nats_url, fleet, model="m", worker_id="a"),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        model, worker, drained, missing, outside = await run_together(nats_url, fleet, *lines)
        elsewhere = await run_together(nats_url, f"{fleet}-2", "pause", "status")

    assert (model.code, worker.code) == (ExitCode.USAGE, ExitCode.USAGE)
    assert model.stderr == f"rollbus: --model: fleet {fleet} has no model nope; allowed: m\n"
    assert worker.stderr == "rollbus: --worker names no live worker: nope; allowed: a (m)\n"
    assert drained.stderr == "rollbus: WORKER names no live worker: nope; allowed: a (m)\n"
    refused = "rollbus: update_weights was not started: the only worker, a, refused: "
    assert missing.stderr.startswith(f"{refused}bad_source: /nope does not exist on the worker's machine.")
    assert outside.stderr.startswith(f"{refused}path_refused: /proc is outside the worker's directories of weights")
    assert "start the worker with --weight-root DIR" in outside.stderr
    for ended in elsewhere:
        begin, _, fleets = ended.stderr.strip().partition("; fleets with workers there: ")
        assert (ended.code, begin) == (ExitCode.NO_WORKERS, f"rollbus: fleet {fleet}-2 has no workers at {nats_url}")
        assert fleet in fleets.split(", ")

import pytest
from msgspec.structs import replace

from rollbus import CommandIncomplete, CommandResult
from rollbus.frontend.cli.control import COLUMNS, AckCounter, result_rows, summary
from rollbus.frontend.cli.exits import ExitCode, exit_code_of_result
from rollbus.frontend.command_json import result_as_json
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.weights import Canary, Staging, UpdateTiming, Verified

DONE = Ack(
    id="c", command="pause", worker="a", incarnation="i", model="m", status=AckStatus.APPLIED, epoch=7,
    weight_version=2, seconds=0.125,
)  # fmt: skip
FAILED = replace(
    DONE, worker="b", status=AckStatus.FAILED, error=AckError(code=ControlCode.TIMEOUT, message="3 in flight")
)
LOADING = replace(DONE, worker="c", status=AckStatus.PROGRESS, stage="loading")
EMPTY = CommandResult(
    command="pause", id="c", epochs={"m": 7}, seconds=0.31, applied={}, failed={}, unsupported={}, stale={}, late={},
    missing={},
)  # fmt: skip
MIXED = replace(
    EMPTY, applied={"a": DONE}, failed={"b": FAILED}, late={"c": LOADING}, missing={"d": "its lease expired"}
)


def test_a_command_result_has_a_row_for_each_worker() -> None:
    """A ledger has a row per worker. Workers that did not apply the command come first, with their reason."""
    assert COLUMNS == ("result", "worker", "version", "seconds", "why")
    assert result_rows(MIXED) == [
        ["failed", "b", "2", "0.12", "3 in flight"],
        ["late", "c", "2", "0.12", "still in progress at the timeout: loading"],
        ["missing", "d", "-", "-", "its lease expired"],
        ["applied", "a", "2", "0.12", "-"],
    ]


def test_the_result_of_an_abort_lists_the_aborted_requests() -> None:
    """The ledger of an abort lists the request ids that each worker aborted, or that it had none."""
    ended, none = replace(DONE, request_ids=("x", "y")), replace(DONE, worker="b", request_ids=())

    rows = result_rows(replace(EMPTY, command="abort", applied={"a": ended, "b": none}))

    assert [row[-1] for row in rows] == ["aborted x, y", "had none of these requests"]


@pytest.mark.proves("P20")
def test_the_result_of_an_update_lists_modules_that_were_not_probed() -> None:
    """The ledger of an update names modules that could not be probed: three in the table, up to 64 in JSON."""
    names = tuple(f"layers.{number} (it is quantized)" for number in range(4))
    all_probed = replace(DONE, verified=Verified(probed=5, equal=2, seconds=0.5))
    some = replace(DONE, worker="b", verified=Verified(probed=1, unprobed=names, num_unprobed=70))
    ledger = replace(EMPTY, command="update_weights", applied={"a": all_probed, "b": some})

    assert [row[-1] for row in result_rows(ledger)] == [
        "5 modules probed, 2 equal in 0.50 s",
        f"1 modules probed, 0 equal, not probed: {', '.join(names[:3])} and 67 more",
    ]
    assert [worker["verified"] for worker in result_as_json(ledger)["workers"]] == [
        {"probed": 5, "equal": 2, "compared": 0, "unprobed": (), "num_unprobed": 0, "seconds": 0.5},
        {"probed": 1, "equal": 0, "compared": 0, "unprobed": names, "num_unprobed": 70, "seconds": 0.0},
    ]


def test_the_result_of_an_update_has_bytes_and_times() -> None:
    """The ledger of an update shows fetched bytes and times per worker.

    The summary has the fleet's pause and the late workers.
    """
    timing = UpdateTiming(
        fetched_bytes=34 * 1024**2, staged_s=2.1, waited_s=0.1, paused_s=0.9, loaded_s=0.6, canary_s=0.25
    )
    checked = replace(DONE, worker="b", timing=UpdateTiming(staged_s=2.1))
    ledger = replace(
        EMPTY, command="update_weights", applied={"a": replace(DONE, timing=timing), "b": checked}, late={"c": LOADING},
        not_awaited=("c",), paused_s=1.25,
    )  # fmt: skip

    assert [row[-1] for row in result_rows(ledger)][1:] == [
        "staged 2.1 s (34 MiB fetched), waited 0.10 s, paused 0.90 s (loaded 0.60 s, canary 0.25 s)",
        "staged 2.1 s",
    ]
    assert summary(ledger) == (
        "update_weights: applied by 2 of 3 workers in 0.31 s, epoch 7, paused 1.25 s; 1 late; not waited for: c"
    )
    assert exit_code_of_result(ledger) is ExitCode.OK
    told = result_as_json(ledger)
    assert (told["complete"], told["paused_s"], told["not_awaited"]) == (True, 1.25, ["c"])
    assert told["workers"][0]["timing"] == {
        "fetched_bytes": 34 * 1024**2, "staged_s": 2.1, "waited_s": 0.1, "paused_s": 0.9, "loaded_s": 0.6,
        "canary_s": 0.25,
    }  # fmt: skip


def test_the_result_of_an_abort_names_ids_that_no_worker_had() -> None:
    """The result of an abort names ids that no worker had. If no worker had any of them, the command failed."""
    some = replace(DONE, request_ids=("x",))
    partly = replace(EMPTY, command="abort", applied={"a": some}).of_abort(("x", "y"))
    nothing = replace(EMPTY, command="abort", applied={"a": replace(DONE, request_ids=())}).of_abort(("y", "z"))

    assert summary(partly).endswith("; not found: y")
    assert (result_as_json(partly)["not_found"], exit_code_of_result(partly)) == (["y"], ExitCode.OK)
    assert (result_as_json(nothing)["not_found"], exit_code_of_result(nothing)) == (["y", "z"], ExitCode.FAILED)
    assert not nothing.is_complete
    assert str(CommandIncomplete(nothing)) == "abort was applied by 1 of 1 workers, and none has y, z"


def test_a_command_result_is_summed_up_in_one_line() -> None:
    """The summary has counts, time and epochs, and mentions only counts that are not zero."""
    two = {"a": DONE, "b": DONE}

    assert summary(MIXED) == "pause: applied by 1 of 4 workers in 0.31 s, epoch 7; 1 failed; 1 late; 1 missing"
    assert summary(replace(EMPTY, applied=two)) == "pause: applied by all 2 workers in 0.31 s, epoch 7"
    assert summary(replace(EMPTY, applied={"a": DONE}, epochs={})) == "pause: applied by 1 of 1 worker in 0.31 s"
    assert summary(replace(EMPTY, applied=two, epochs={"n": 1, "m": 7})).endswith("s, epoch 7 of m, epoch 1 of n")


def test_the_names_of_a_command_result_are_stable() -> None:
    """The names of a ledger in --json are stable for programs: names may be added, but not changed."""
    told = result_as_json(MIXED)

    assert {name: told[name] for name in ("command", "id", "complete", "epochs", "seconds")} == {
        "command": "pause", "id": "c", "complete": False, "epochs": {"m": 7}, "seconds": 0.31,
    }  # fmt: skip
    none = {"stage": None, "canary": None, "request_ids": None, "verified": None, "timing": None}
    assert told["workers"][1:] == [
        {
            "worker": "b", "result": "failed", "code": "timeout", "why": "3 in flight", "model": "m",
            "weight_version": 2, "in_flight": 0, "seconds": 0.125, **none,
        },
        {
            "worker": "c", "result": "late", "code": None, "why": "still in progress at the timeout: loading",
            "model": "m", "weight_version": 2, "in_flight": 0, "seconds": 0.125, **none, "stage": "loading",
        },
        {
            "worker": "d", "result": "missing", "code": None, "why": "its lease expired", "model": None,
            "weight_version": None, "in_flight": None, "seconds": None, **none,
        },
    ]  # fmt: skip
    canary = Canary(token_ids=(1,), logprobs=(-0.5,))
    [worker] = result_as_json(replace(EMPTY, applied={"a": replace(DONE, canary=canary)}))["workers"]
    assert (worker["canary"]["token_ids"], worker["canary"]["logprobs"]) == ((1,), (-0.5,))


@pytest.mark.parametrize(
    ("ledger", "code"),
    [
        (replace(EMPTY, applied={"a": DONE}), ExitCode.OK),
        (MIXED, ExitCode.PARTIAL),
        (replace(MIXED, applied={}), ExitCode.FAILED),
        (replace(EMPTY, stale={"a": DONE}), ExitCode.FAILED),
        (replace(EMPTY, unsupported={"a": DONE}, missing={"b": "x"}), ExitCode.FAILED),
        (replace(EMPTY, late={"c": LOADING}, missing={"d": "x"}), ExitCode.TIMEOUT),
        (replace(EMPTY, missing={"d": "x"}), ExitCode.TIMEOUT),
    ],
)
def test_the_command_result_decides_the_exit_code(ledger: CommandResult, code: ExitCode) -> None:
    """The exit code is 0 if all workers applied, 3 if some did, 4 if none did and none gave a reason, and else 1."""
    assert exit_code_of_result(ledger) == code


def test_progress_counts_workers_by_their_last_ack() -> None:
    """The progress counts each worker once, by its last ack. Another command restarts the count."""
    lines: list[str] = []
    counter = AckCounter(lines.append)

    for ack in (replace(DONE, status=AckStatus.ACCEPTED), LOADING, DONE, replace(DONE, id="d", command="resume")):
        counter.add(ack)

    assert lines == [
        "pause: 1 accepted", "pause: 1 accepted, 1 loading", "pause: 1 applied, 1 loading", "resume: 1 applied"
    ]  # fmt: skip


def test_progress_of_a_stage_sums_the_bytes_of_its_workers() -> None:
    """The progress of a stage is the sum of the bytes of all its workers. A stage without bytes shows only its name."""
    lines: list[str] = []
    counter = AckCounter(lines.append)
    for worker, stage, done in (("a", "fetching", 2**29), ("b", "fetching", 2**30), ("c", "checking", 0)):
        progress = Staging(source="x", stage=stage, done_bytes=done, total_bytes=2**30 if done else 0)
        counter.add(replace(LOADING, worker=worker, command="check_weights", stage=stage, progress=progress))

    assert lines[-1] == "check_weights: 2 fetching 75 % of 2.0 GiB, 1 checking"

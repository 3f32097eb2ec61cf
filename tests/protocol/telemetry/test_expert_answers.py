"""The workers that a reader of expert counts queries, and the merged answers."""

import pytest

from rollbus.bus.protocol.fleet.command_result import CommandResult
from rollbus.bus.protocol.telemetry.experts import MAX_ASKED, choose_workers, loads_of, merge_answers
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import ControlCode, InvalidRequest
from rollbus.schemas.presence import RoutedExpertsInfo, WorkerPresence
from rollbus.schemas.telemetry import ExpertCounts, ExpertLoad
from tests.support.presences import capabilities, presence

ROUTING = RoutedExpertsInfo(num_layers=2, top_k=2, num_experts=4, dtype="u1")
LOAD = ExpertLoad(number=1, first=1, seconds=5.0, num_layers=2, num_experts=4, top_k=2)


def worker(name: str, **fields: object) -> WorkerPresence:
    """Return a worker that can answer, unless `fields` of its capabilities prevent that."""
    able = capabilities(**{"telemetry_reads": True, "routed_experts": ROUTING, **fields})
    return presence(worker=name, capabilities=able)


def ack(name: str, status: AckStatus = AckStatus.APPLIED, **fields: object) -> Ack:
    """Return a command ack."""
    return Ack(id="c", command="read_experts", worker=name, incarnation="1", model="m", status=status, **fields)  # type: ignore[arg-type]


def test_a_sample_of_workers_changes_only_when_a_worker_ends() -> None:
    """A reader queries a fixed sample of 64 workers. Other workers replace those that end, and the rest stays."""
    fleet = [worker(f"w{number}") for number in range(1000)]
    asked, unable = choose_workers(fleet, None)
    ended = set(asked[:10])
    again, _ = choose_workers([one for one in fleet if one.worker not in ended], None)

    assert len(asked) == len(again) == MAX_ASKED
    assert list(asked) == sorted(asked)
    assert not unable
    assert set(asked) - ended < set(again)


def test_workers_that_cannot_answer_are_listed_with_their_reason() -> None:
    """Workers that cannot answer are listed with their reason and take no place in the sample."""
    fleet = [
        worker("good"),
        worker("old", telemetry_reads=False),
        worker("dense", routed_experts=None),
        worker("refuses", routed_experts=None, routing_refusal="it was told not to"),
        presence(worker="starts", capabilities=None),
    ]
    asked, unable = choose_workers(fleet, None)

    assert asked == ("good",)
    assert unable == {
        "old": "the worker runs an earlier release, which does not answer this command",
        "dense": "its engine returns no routed experts",
        "refuses": "its engine returns no routed experts: it was told not to",
        "starts": "it is serving",
    }
    assert choose_workers(fleet, ["old"]) == ((), {"old": unable["old"]})
    with pytest.raises(InvalidRequest, match="workers names 65; allowed: up to 64"):
        choose_workers([worker(f"w{number}") for number in range(65)], [f"w{number}" for number in range(65)])


def test_every_worker_is_in_the_sum_or_listed_with_a_reason() -> None:
    """Each worker is part of the sum or listed with a reason, for every status and answer."""
    error = AckError(code=ControlCode.UNSUPPORTED, message="too many experts")
    bad = ExpertCounts(weight_version=1, prompt=b"?")
    broken = ExpertLoad(number=1, first=1, seconds=5.0, num_layers=2, num_experts=4, top_k=2, counts=(bad,))
    result = CommandResult(
        command="read_experts",
        id="c",
        applied={"a": ack("a", experts=LOAD), "b": ack("b", experts=broken), "c": ack("c")},
        unsupported={"d": ack("d", AckStatus.UNSUPPORTED, error=error)},
        late={"e": ack("e", AckStatus.ACCEPTED)},
        missing={"f": "it did not answer within 5.0 s"},
    )
    loads, silent = loads_of(result)
    answers = merge_answers("m", loads, {"old": "old"} | silent, tuple("abcdef"), 7)

    assert answers.window is not None
    assert answers.window.workers == ("a",)
    assert answers.left_out.keys() == {"b", "c", "d", "e", "f", "old"}
    assert answers.left_out["d"] == "too many experts"
    assert "prompt of version 1" in answers.left_out["b"]
    assert merge_answers("m", {}, silent, (), 1).window is None

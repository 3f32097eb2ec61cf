"""The load of experts over workers: which are asked, what their answers add up to, and its imbalance."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbus.bus.protocol.fleet.command_result import CommandResult
from rollbus.bus.protocol.telemetry.experts import (
    MAX_ASKED,
    choose_workers,
    decode_counts,
    encode_counts,
    imbalance,
    loads_of,
    merge_answers,
    merge_loads,
)
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import ControlCode, InvalidRequest, RemoteProtocolError
from rollbus.schemas.limits import MAX_EXPERT_VERSIONS
from rollbus.schemas.presence import RoutedExpertsInfo, WorkerPresence
from rollbus.schemas.telemetry import ExpertCounts, ExpertLoad, TokenTally
from tests.support.fleet import capabilities, presence

tables = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(st.integers(0, 1000), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
        lambda cells: np.array(cells, np.int64).reshape(shape)
    )
)


def load_of(*versions: tuple[int, np.ndarray], num_experts: int = 4, seconds: float = 5.0) -> ExpertLoad:
    """Return a worker's answer for generated tokens of these versions, with two layers and top 2."""
    counts = tuple(
        ExpertCounts(
            weight_version=version,
            generated=encode_counts(table),
            generated_tokens=TokenTally(computed=int(table.sum()) // 2, seen=int(table.sum()) // 4),
        )
        for version, table in versions
    )
    return ExpertLoad(number=1, first=1, seconds=seconds, num_layers=2, num_experts=num_experts, top_k=2, counts=counts)


ONES = np.ones((2, 4), np.int64)


@given(tables)
def test_encoded_counts_decode_to_equal_counts(table: np.ndarray) -> None:
    """Encoded counts decode to equal counts, and counts of only zeros have no bytes."""
    data = encode_counts(table)

    assert (decode_counts(data, *table.shape) == table).all()
    assert bool(data) == bool(table.any())


@settings(max_examples=300)
@given(st.binary(max_size=60) | st.binary(max_size=60).map(zlib.compress), st.integers(1, 8), st.integers(1, 8))
def test_any_bytes_decode_to_valid_counts_or_raise_an_error(data: bytes, num_layers: int, num_experts: int) -> None:
    """Any bytes decode to valid counts or raise `RemoteProtocolError`."""
    try:
        counts = decode_counts(data, num_layers, num_experts)
    except RemoteProtocolError:
        return
    assert counts.shape == (num_layers, num_experts)
    assert counts.min() >= 0


@pytest.mark.parametrize(
    ("data", "shape", "problem"),
    [
        (zlib.compress(bytes(1024**2)), (2, 4), "more than 64 bytes; allowed: 64"),
        (zlib.compress(bytes(56)), (2, 4), "has 56 bytes; allowed: 64"),
        (zlib.compress(bytes(64)) + b"more", (2, 4), "allowed: 64, one zlib stream"),
        (zlib.compress(bytes(64))[:-4], (2, 4), "one zlib stream"),
        (b"not zlib", (2, 4), "counts is no zlib"),
        (zlib.compress(b"\xff" * 64), (2, 4), "allowed: up to 2\\*\\*53"),
        (b"", (1024, 65_536), "= 67108864 cells; allowed: up to 262144"),
    ],
)
def test_invalid_counts_are_refused_and_the_error_names_the_problem(
    data: bytes, shape: tuple[int, int], problem: str
) -> None:
    """A decompression bomb is not decompressed, and the error names the allowed size."""
    with pytest.raises(RemoteProtocolError, match=problem):
        decode_counts(data, *shape)


def test_counts_of_workers_are_added_by_version() -> None:
    """Counts and tallies of workers are added by version, the highest version first.

    Planes are the sums of the versions.
    """
    window, left_out = merge_loads(
        {"b": load_of((3, 2 * ONES)), "a": load_of((3, ONES), (2, 5 * ONES), seconds=10.0), "c": load_of()}
    )

    assert not left_out
    assert window.workers == ("a", "b", "c")
    assert window.seconds == 10.0
    assert [version.weight_version for version in window.versions] == [3, 2]
    assert (window.versions[0].generated.counts == 3 * ONES).all()
    assert (window.generated.counts == 8 * ONES).all()
    assert (window.generated.computed, window.generated.seen) == (32, 16)
    assert window.generated.share_seen == 0.5
    assert window.prompt.share_seen is None


def test_a_worker_with_invalid_counts_is_left_out_with_a_reason() -> None:
    """A worker with invalid bytes, another model's shape or a shape above the limits is left out with a reason.

    The other workers count.
    """
    bad = ExpertLoad(
        number=1,
        first=1,
        seconds=5.0,
        num_layers=2,
        num_experts=4,
        top_k=2,
        counts=(ExpertCounts(weight_version=1, generated=b"not zlib"),),
    )
    huge = ExpertLoad(number=1, first=1, seconds=5.0, num_layers=1024, num_experts=65_536, top_k=2)
    loads = {"good": load_of((1, ONES)), "other": load_of((1, np.ones((2, 6), np.int64)), num_experts=6)}
    window, left_out = merge_loads({**loads, "good2": load_of((1, ONES)), "bad": bad, "huge": huge})

    assert window.workers == ("good", "good2")
    assert (window.generated.counts == 2 * ONES).all()
    assert left_out.keys() == {"other", "bad", "huge"}
    assert "generated of version 1 is no zlib" in left_out["bad"]
    assert "2 layers x 6 experts, top 2; allowed: 2 layers x 4 experts, top 2" in left_out["other"]
    assert merge_loads({"huge": huge})[0] is None
    assert merge_loads({}) == (None, {})


def test_versions_are_bounded_over_all_workers() -> None:
    """Workers that invent versions use no more memory than one worker with the allowed number of versions."""
    window, _ = merge_loads({f"w{i}": load_of((i, ONES), (100 + i, ONES)) for i in range(20)})

    assert [version.weight_version for version in window.versions] == list(range(119, 119 - MAX_EXPERT_VERSIONS, -1))


@given(tables)
def test_the_imbalance_is_computed_for_each_layer(table: np.ndarray) -> None:
    """The imbalance equals the values computed layer by layer for a model with top 1."""
    found = imbalance(table, 1)
    num_experts = table.shape[1]

    for layer, counts in enumerate(table.tolist()):
        total = sum(counts)
        shares = [count / total for count in counts if count] if total else []
        entropy = -sum(share * math.log(share) for share in shares)
        assert found.routes[layer] == (total > 0)
        assert found.max_over_mean[layer] == pytest.approx(max(counts) * num_experts / total if total else 1.0)
        wanted = entropy / math.log(num_experts) if total and num_experts > 1 else 1.0
        assert found.entropy[layer] == pytest.approx(wanted, abs=1e-9)
        assert found.unused[layer] == (counts.count(0) if total else 0)


def test_a_layer_without_experts_does_not_count_as_collapsed() -> None:
    """A layer without experts is not a collapsed layer.

    An engine reports expert 0 for each choice of the former, and a collapsed layer uses `top_k` experts.
    """
    table = np.array([[20, 0, 0, 0], [10, 10, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0]])
    found = imbalance(table, 2)

    assert found.routes.tolist() == [False, True, True, False]
    assert found.max_over_mean.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert found.entropy.tolist() == pytest.approx([1.0, 0.5, 1.0, 1.0])
    assert found.unused.tolist() == [0, 2, 0, 0]
    assert found.summary() == pytest.approx((1.5, 2.0, 0.75, 2))
    assert imbalance(np.zeros((3, 4), np.int64), 2).summary() == (1.0, 1.0, 1.0, 0)


def test_workers_displaced_by_invented_versions_are_listed_as_left_out() -> None:
    """If one worker names eight versions above those of all others, the other workers are listed as left out."""
    loads = {f"w{number}": load_of((7, ONES)) for number in range(3)}
    loads["liar"] = load_of(*((2**31 - 1 - number, ONES) for number in range(MAX_EXPERT_VERSIONS)))
    window, left_out = merge_loads(loads)
    assert window.workers == ("liar",)
    assert left_out.keys() == {"w0", "w1", "w2"}


def test_the_imbalance_is_correct_for_the_largest_counts() -> None:
    """The imbalance is correct if sums and products of the counts exceed 64-bit integers."""
    counts = np.zeros((1, 4096), np.int64)
    counts[0, :2] = 2**53
    assert imbalance(counts, 2).max_over_mean[0] == pytest.approx(2048)


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

    assert answers.window.workers == ("a",)
    assert answers.left_out.keys() == {"b", "c", "d", "e", "f", "old"}
    assert answers.left_out["d"] == "too many experts"
    assert "prompt of version 1" in answers.left_out["b"]
    assert merge_answers("m", {}, silent, (), 1).window is None

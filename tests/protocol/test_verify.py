"""Detection of workers whose weights differ from the majority's, by their canaries."""

from msgspec.structs import replace

from rollbus.bus.protocol.fleet.canary import dissenters
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.weights import Canary
from tests.protocol.test_ledger import ack

GOOD = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
CLOSE = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3004))
BAD = Canary(token_ids=(1, 9, 3), logprobs=(-0.1, -2.2, -0.3))
WORSE = Canary(token_ids=(7, 9, 3), logprobs=(-1.1, -2.2, -0.3))


def acks(signature: str = "cpu", **canaries: Canary | None) -> dict[str, Ack]:
    """Return acks of workers of one kind with these canaries."""
    return {
        worker: ack(worker, AckStatus.APPLIED, canary=canary, signature=signature)
        for worker, canary in canaries.items()
    }


def differing(found: dict[str, Ack], dtype: str = "float32") -> list[str]:
    """Return the ids of the workers that differ."""
    return sorted(dissenters(found, dict.fromkeys(found, dtype)))


def test_workers_with_equal_canaries_agree() -> None:
    """Workers with equal or nearly equal canaries agree. A single worker never differs."""
    assert differing(acks(a=GOOD, b=CLOSE, c=GOOD)) == []
    assert differing(acks(a=BAD)) == []
    assert differing({}) == []


def test_the_worker_in_the_minority_is_named_with_the_reason() -> None:
    """The worker in the minority differs, and the reason describes the difference."""
    found = acks(a=GOOD, b=BAD, c=CLOSE)

    assert differing(found) == ["b"]
    [why] = dissenters(found, dict.fromkeys(found, "float32")).values()
    assert why.startswith("its canary differs from the majority's: the tokens differ from number 1 on")


def test_without_a_majority_all_workers_differ() -> None:
    """Without a majority all workers differ, because no result is known to be correct."""
    assert differing(acks(a=GOOD, b=BAD)) == ["a", "b"]
    assert differing(acks(a=GOOD, b=BAD, c=WORSE)) == ["a", "b", "c"]
    assert differing(acks(a=GOOD, b=GOOD, c=BAD, d=BAD)) == ["a", "b", "c", "d"]


def test_only_workers_with_the_same_device_and_dtype_are_compared() -> None:
    """Only workers with the same device and dtype are compared, because others compute different values."""
    assert differing(acks("cpu", a=GOOD, b=GOOD) | acks("gpu", c=BAD)) == []
    mixed = acks(a=GOOD, b=BAD)
    assert dissenters(mixed, {"a": "float32", "b": "bfloat16"}) == {}


def test_workers_without_a_canary_are_skipped() -> None:
    """Workers without a canary neither differ nor count."""
    assert differing(acks(a=None, b=GOOD, c=None)) == []


def test_a_narrower_dtype_is_compared_with_a_tolerance() -> None:
    """A difference that is an error in float32 may be rounding in bfloat16. A wrong model differs in both."""
    off = replace(GOOD, logprobs=(-0.1, -0.3, -0.3))

    assert differing(acks(a=GOOD, b=off, c=GOOD)) == ["b"]
    assert differing(acks(a=GOOD, b=off, c=GOOD), "bfloat16") == []
    assert differing(acks(a=GOOD, b=WORSE, c=GOOD), "bfloat16") == ["b"]


def test_a_large_fleet_of_differing_workers_is_compared_in_bounded_time() -> None:
    """If all workers of a large fleet differ, the comparison takes bounded time and does not compare each pair."""
    found: dict[str, Ack] = {}
    for i in range(300):
        found |= {f"w{i}": replace(acks(a=GOOD)["a"], canary=replace(GOOD, token_ids=(i, 1, 2)))}

    assert len(differing(found)) == 300

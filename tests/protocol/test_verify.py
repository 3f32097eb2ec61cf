"""Whose weights differ from the others', as their canaries tell."""

from msgspec.structs import replace

from rollbus.bus.protocol.fleet.verify import dissenters
from rollbus.schemas.control import Ack, AckStatus, Canary
from tests.protocol.test_ledger import ack

GOOD = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
CLOSE = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3004))
BAD = Canary(token_ids=(1, 9, 3), logprobs=(-0.1, -2.2, -0.3))
WORSE = Canary(token_ids=(7, 9, 3), logprobs=(-1.1, -2.2, -0.3))


def acks(signature: str = "cpu", **canaries: Canary | None) -> dict[str, Ack]:
    """Answers of workers of one kind with these canaries."""
    return {
        worker: ack(worker, AckStatus.APPLIED, canary=canary, signature=signature)
        for worker, canary in canaries.items()
    }


def differing(found: dict[str, Ack], dtype: str = "float32") -> list[str]:
    """Who differs."""
    return sorted(dissenters(found, dict.fromkeys(found, dtype)))


def test_equal_weights_agree() -> None:
    """Nobody differs where all give the same, or nearly so; one alone has nobody to differ from."""
    assert differing(acks(a=GOOD, b=CLOSE, c=GOOD)) == []
    assert differing(acks(a=BAD)) == []
    assert differing({}) == []


def test_the_minority_is_named_with_the_reason() -> None:
    """Two against one: that one; the reason says what differs."""
    found = acks(a=GOOD, b=BAD, c=CLOSE)

    assert differing(found) == ["b"]
    [why] = dissenters(found, dict.fromkeys(found, "float32")).values()
    assert why.startswith("its canary differs from the majority's: the tokens differ from number 1 on")


def test_a_tie_fails_all() -> None:
    """One against one, or three that all differ: nobody knows which is right."""
    assert differing(acks(a=GOOD, b=BAD)) == ["a", "b"]
    assert differing(acks(a=GOOD, b=BAD, c=WORSE)) == ["a", "b", "c"]
    assert differing(acks(a=GOOD, b=GOOD, c=BAD, d=BAD)) == ["a", "b", "c", "d"]


def test_only_workers_of_one_kind_are_compared() -> None:
    """Other devices and other dtypes compute otherwise."""
    assert differing(acks("cpu", a=GOOD, b=GOOD) | acks("gpu", c=BAD)) == []
    mixed = acks(a=GOOD, b=BAD)
    assert dissenters(mixed, {"a": "float32", "b": "bfloat16"}) == {}


def test_workers_without_a_canary_are_passed_over() -> None:
    """They neither differ nor count."""
    assert differing(acks(a=None, b=GOOD, c=None)) == []


def test_a_narrower_dtype_is_compared_with_a_tolerance() -> None:
    """What float32 would not forgive is rounding in bfloat16; a wrong model is not."""
    off = replace(GOOD, logprobs=(-0.1, -0.3, -0.3))

    assert differing(acks(a=GOOD, b=off, c=GOOD)) == ["b"]
    assert differing(acks(a=GOOD, b=off, c=GOOD), "bfloat16") == []
    assert differing(acks(a=GOOD, b=WORSE, c=GOOD), "bfloat16") == ["b"]


def test_a_large_fleet_of_strangers_is_compared_in_bounded_time() -> None:
    """Where all differ all fail, without comparing each with each."""
    found: dict[str, Ack] = {}
    for i in range(300):
        found |= {f"w{i}": replace(acks(a=GOOD)["a"], canary=replace(GOOD, token_ids=(i, 1, 2)))}

    assert len(differing(found)) == 300

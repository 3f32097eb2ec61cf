"""What tests share is started once, and again when one of them has broken it."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.shared import Shared


class Part:
    """Something that can break."""

    def __init__(self) -> None:
        self.is_sound = True
        self.is_ended = False


@contextlib.contextmanager
def part() -> Iterator[Part]:
    """Start one; where it is broken, ending it fails."""
    made = Part()
    yield made
    made.is_ended = True
    assert made.is_sound


def test_what_is_sound_stays_and_what_is_broken_is_replaced() -> None:
    """Each that was made is ended; that a broken one does not end in order is not the next test's failure."""
    with Shared(part, is_sound=lambda it: it.is_sound) as shared:
        first = shared.get()
        assert shared.get() is first
        first.is_sound = False
        second = shared.get()
        assert (second is first, first.is_ended, second.is_ended) == (False, True, False)
        assert shared.get() is second
    assert second.is_ended


def test_the_last_one_must_end_in_order() -> None:
    """What fails at the end of all is not hidden."""
    shared = Shared(part, is_sound=lambda it: it.is_sound)
    with pytest.raises(AssertionError), shared:
        shared.get().is_sound = False


def test_a_failed_start_is_tried_again() -> None:
    """The next test makes its own attempt."""
    fails = [True, False]

    @contextlib.contextmanager
    def sometimes() -> Iterator[str]:
        if fails.pop(0):
            raise OSError("no port")
        yield "there"

    with Shared(sometimes, is_sound=lambda _: True) as shared:
        with pytest.raises(OSError, match="no port"):
            shared.get()
        assert shared.get() == "there"

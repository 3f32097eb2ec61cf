"""A shared resource starts once, and again after a test has broken it."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.shared import Shared


class Part:
    """A resource that can break."""

    def __init__(self) -> None:
        self.is_sound = True
        self.is_ended = False


@contextlib.contextmanager
def part() -> Iterator[Part]:
    """Start a resource; its end fails if it is broken."""
    made = Part()
    yield made
    made.is_ended = True
    assert made.is_sound


def test_a_sound_resource_stays_and_a_broken_resource_is_replaced() -> None:
    """Each resource is ended, and an error at the end of a broken resource does not fail the next test."""
    with Shared(part, is_sound=lambda it: it.is_sound) as shared:
        first = shared.get()
        assert shared.get() is first
        first.is_sound = False
        second = shared.get()
        assert (second is first, first.is_ended, second.is_ended) == (False, True, False)
        assert shared.get() is second
    assert second.is_ended


def test_an_error_at_the_end_of_the_last_resource_is_raised() -> None:
    """An error at the end of the last resource is raised."""
    shared = Shared(part, is_sound=lambda it: it.is_sound)
    with pytest.raises(AssertionError), shared:
        shared.get().is_sound = False


def test_a_failed_start_is_tried_again() -> None:
    """After a failed start the next test tries to start the resource again."""
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

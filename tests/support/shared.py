"""Resources that several tests share because they start slowly. A broken resource is replaced for the next test."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Starts a resource when a test first requests it, and replaces it when it is broken.

    Args:
        make: starts the resource; leaving the context ends it.
        is_sound: returns True if the next test can use the resource like a new one.
    """

    def __init__(
        self, make: Callable[[], contextlib.AbstractContextManager[T]], *, is_sound: Callable[[T], bool]
    ) -> None:
        self._make = make
        self._is_sound = is_sound
        self._life = contextlib.ExitStack()
        self._made: list[T] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.close()

    def get(self) -> T:
        """Return the resource; replace it first if it is broken."""
        if self._made and not self._is_sound(self._made[0]):
            self._made.clear()
            # An error at the end of the broken resource must not fail the next test.
            with contextlib.suppress(Exception):
                self._life.close()
        if not self._made:
            self._made.append(self._life.enter_context(self._make()))
        return self._made[0]

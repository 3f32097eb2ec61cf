"""What several tests share because it takes long to start. When one of them has broken it, the others get a new one."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["Shared"]

T = TypeVar("T")


class Shared(Generic[T]):
    """Starts something when a test first asks for it, and again when it is no longer sound.

    Args:
        make: starts it; leaving the context ends it.
        is_sound: the next test can use it as if it were new.
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
        """Return what is there if it is sound, else what is started in its place."""
        if self._made and not self._is_sound(self._made[0]):
            self._made.clear()
            # That it does not end in order is no news, and not the next test's fault.
            with contextlib.suppress(Exception):
                self._life.close()
        if not self._made:
            self._made.append(self._life.enter_context(self._make()))
        return self._made[0]

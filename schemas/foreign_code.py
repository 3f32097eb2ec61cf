"""The boundary to code that is not ours: no document says what vLLM, torch, transformers and others may raise."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ForeignError", "foreign_code"]


class ForeignError(Exception):
    """Foreign code failed; reads as `type: message` of what it raised.

    Attributes:
        cause: what it raised.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


@contextmanager
def foreign_code(*known: type[Exception]) -> Iterator[None]:
    """Run the body, of which only errors of the types `known` mean something to the caller.

    Raises:
        ForeignError: the body raised another one.
    """
    try:
        yield
    except known:
        raise
    except Exception as exc:
        # Boundary: without it, an error that a new release of theirs raises would end an engine, a worker or a service.
        raise ForeignError(exc) from exc

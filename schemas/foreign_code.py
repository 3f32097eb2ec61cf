"""The boundary to foreign code: vLLM, torch, transformers and others do not document which exceptions they raise."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ForeignError", "foreign_code"]


class ForeignError(Exception):
    """Foreign code failed. The text is `type: message` of the original exception.

    Attributes:
        cause: the original exception.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


@contextmanager
def foreign_code(*known: type[Exception]) -> Iterator[None]:
    """Run the body and pass on only exceptions of the types `known` unchanged.

    Raises:
        ForeignError: the body raised any other exception.
    """
    try:
        yield
    except known:
        raise
    except Exception as exc:
        # Boundary: otherwise a new exception type of a foreign release would end an engine, a worker or a service.
        raise ForeignError(exc) from exc

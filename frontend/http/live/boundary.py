"""The boundary of what people look at: its faults end neither the service, nor the view of something else."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["contained"]

logger = logging.getLogger(__name__)


@contextmanager
def contained(part: str) -> Iterator[None]:
    """Log an error of the body, which is this part of the view, and go on behind the body. Cancellation passes."""
    try:
        yield
    except Exception:
        # Boundary: a fault of what people look at must not end the service that trainers use.
        logger.exception("view.failed part=%s", part)

"""Error boundary of the live view: an error in one part stops neither the service nor another part of the view."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["contained"]

logger = logging.getLogger(__name__)


@contextmanager
def contained(part: str) -> Iterator[None]:
    """Log an error of the body, which is this part of the view, and continue after the body. Cancellation passes."""
    try:
        yield
    except Exception:
        # Boundary: an error in the live view must not stop the service that trainers use.
        logger.exception("view.failed part=%s", part)

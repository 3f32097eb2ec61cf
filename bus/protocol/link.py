"""The client's half of a link: frames from one worker, in order, from one incarnation at a time."""

from schemas.errors import RemoteProtocolError
from schemas.messages import Frame

__all__ = ["Link"]


class Link:
    """Checks the numbers of the frames that one worker sends."""

    def __init__(self) -> None:
        self.incarnation: str | None = None
        """Of the worker, as of its last frame; None before the first."""
        self._next = 0

    def receive(self, frame: Frame) -> bool:
        """Take note of `frame`; False if it is a duplicate and must be ignored.

        Raises:
            RemoteProtocolError: frames before it are missing. The link goes on behind the gap.
        """
        if frame.incarnation != self.incarnation:
            self.incarnation, self._next = frame.incarnation, 0
        if frame.number < self._next:
            return False
        missing = frame.number - self._next
        self._next = frame.number + 1
        if missing:
            raise RemoteProtocolError(f"{missing} frames before number {frame.number} are missing")
        return True

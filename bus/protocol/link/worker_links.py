"""The links of one worker id that a client follows: usually that of one incarnation.

A new incarnation ends the one before: a worker that restarts, or fences itself, has lost its links. If both
incarnations publish presence, two workers have one id by mistake. Then the client follows both, so that its requests at
both complete.
"""

from collections import deque
from collections.abc import Collection, Iterable

from ....schemas.frame_header import FrameHeader
from ....schemas.messages import Frame
from .link_receiver import LinkReceiver

__all__ = ["FollowedLinks"]

MAX_RETIRED = 8
"""Ended incarnations that are remembered, so that their late frames are not followed. A worker restarts rarely."""


class FollowedLinks:
    """Follows the links of all workers with one id.

    Args:
        client_incarnation: incarnation of this client; frames for another incarnation are stale.
    """

    def __init__(self, client_incarnation: str) -> None:
        self._client_incarnation = client_incarnation
        self._receivers: dict[str, LinkReceiver] = {}
        self._retired: deque[str] = deque(maxlen=MAX_RETIRED)

    def __repr__(self) -> str:
        """Return one line with the links."""
        return f"<FollowedLinks {' '.join(map(repr, self._receivers.values())) or 'none'}>"

    @property
    def receivers(self) -> Collection[LinkReceiver]:
        """The receivers of the incarnations that are followed."""
        return self._receivers.values()

    def receiver_of(self, frame: Frame | FrameHeader, live: Collection[str]) -> tuple[LinkReceiver | None, list[str]]:
        """Return the receiver of `frame`, and the incarnations whose link is lost with all its requests.

        Args:
            live: incarnations that publish presence under this id.

        Returns:
            None in place of the receiver if the frame is stale.
        """
        incarnation = frame.incarnation
        if frame.client_incarnation != self._client_incarnation:
            return None, []
        receiver = self._receivers.get(incarnation)
        if receiver is not None:
            return receiver, [incarnation] if receiver.is_new_link(frame) else []
        is_namesake = incarnation in live and len(live) > 1
        if incarnation in self._retired and not is_namesake:
            return None, []
        ended = [other for other in self._receivers if not (is_namesake and other in live)]
        self._retire(ended)
        receiver = self._receivers[incarnation] = LinkReceiver(self._client_incarnation)
        return receiver, ended

    def prune(self, live: Collection[str]) -> None:
        """If several links are followed, remove those whose workers no longer publish presence."""
        if len(self._receivers) > 1:
            self._retire([incarnation for incarnation in self._receivers if incarnation not in live])

    def _retire(self, incarnations: Iterable[str]) -> None:
        for incarnation in incarnations:
            del self._receivers[incarnation]
            self._retired.append(incarnation)

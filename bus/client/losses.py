"""What becomes of requests whose worker is gone, or whose frames are lost or do not decode. On the bus thread."""

from collections.abc import Callable, Container

from ...schemas.chunk import ChunkError
from ...schemas.errors import ErrorCode, RequestFailed
from ...schemas.frame_header import FrameHeader
from ..protocol.attempt import events as on
from ..protocol.fleet.presence_table import LostWorker
from .children import ChildRequest
from .exchange import AttemptCoordinator, is_at

__all__ = ["Losses"]


class Losses:
    """Finds the open requests that are lost, and lets the coordinator resume or end them."""

    def __init__(self, coordinator: AttemptCoordinator) -> None:
        self._coordinator = coordinator

    def __repr__(self) -> str:
        """One line with the exchange."""
        return f"<Losses of {self._coordinator!r}>"

    def mark_worker_lost(self, lost: LostWorker) -> None:
        """Give up what a lost worker, or a lost life of one, had. The queue keeps what it had not offered."""
        reason = f"worker {lost.worker} is gone: {lost.reason}"
        if lost.is_death:
            engine = lost.worker, lost.incarnation
            victims = self._coordinator.open_children(lambda child: is_at(child, engine))
            self._coordinator.on_engine_death(engine, dict.fromkeys(victims, ChunkError(ErrorCode.WORKER_LOST, reason)))
        self._mark_lost_where(
            lambda child: child.worker == lost.worker and (lost.is_final or child.incarnation == lost.incarnation),
            ErrorCode.WORKER_LOST,
            reason,
        )
        for child in self._coordinator.open_children(lambda child: child.handed_to == lost.worker):
            self._coordinator.send(child, on.WorkerSilent(child.open_call.failure(ErrorCode.WORKER_LOST, reason)))

    def mark_unheard_lost(self, incarnations: Container[tuple[str, str]], offered_before: float) -> None:
        """Give up what a life of a worker has of which nothing was heard since it offered to run it.

        Its last frame may be handled behind the announcement that it is gone, as these come on different subjects.

        Args:
            incarnations: the live ones, each with its worker.
            offered_before: on `time.monotonic()`; offers after that are too young for an announcement.
        """
        self._mark_lost_where(
            lambda child: (
                child.worker is not None
                and child.since < offered_before
                and (child.worker, child.incarnation) not in incarnations
            ),
            ErrorCode.WORKER_LOST,
            "the life of the worker that offered to run it is over",
        )

    def mark_lost(self, worker: str, incarnation: str, reason: str) -> None:
        """Give up what a life of a worker has in its hands."""
        lost = worker, incarnation
        self._mark_lost_where(lambda child: (child.worker, child.incarnation) == lost, ErrorCode.WORKER_LOST, reason)

    def fail_unreadable(self, worker: str, header: FrameHeader, reason: str) -> None:
        """End the one request that an undecodable frame of `worker` names, unless another worker has it."""
        (key,) = header.keys
        child = self._coordinator.find(key.request_id, key.attempt, key.child)
        if child is not None and (child.worker, child.incarnation) in ((None, None), (worker, header.incarnation)):
            self._coordinator.send(child, on.Failed(_unreadable(child, worker, reason)))
            child = None
        self._coordinator.refuse_offer(child, worker, key)

    def retry_unreadable(self, incarnation: tuple[str, str], header: FrameHeader | None, reason: str) -> None:
        """Resume as new attempts the requests of a worker whose frame does not decode.

        A request is a suspect if its chunk does not decode. If that cannot be read from the frame, all requests of the
        worker are. A suspect at two workers ends.
        """
        worker = incarnation[0]
        offered, suspects = (frozenset(), frozenset()) if header is None else (header.keys, header.bad_keys)
        for child in self._coordinator.open_children(
            lambda child: (
                (child.worker, child.incarnation) == incarnation or (child.worker is None and child.key in offered)
            )
        ):
            is_suspect = not suspects or child.key in suspects
            error = _unreadable(child, worker, reason)
            self._coordinator.send(child, on.Lost(error, unreadable_at=worker if is_suspect else None))
        # Their offers may have been in that frame, too.
        for child in self._coordinator.open_children(lambda child: child.handed_to == worker):
            self._coordinator.send(child, on.WorkerSilent(_unreadable(child, worker, reason)))

    def mark_all_lost(self, reason: str) -> None:
        """Give up every attempt that a worker has in its hands: what was under way may be lost."""
        self._mark_lost_where(lambda child: child.worker is not None, ErrorCode.FRAMES_LOST, reason)

    def _mark_lost_where(self, is_lost: Callable[[ChildRequest], bool], code: ErrorCode, message: str) -> None:
        for child in self._coordinator.open_children(is_lost):
            self._coordinator.send(child, on.Lost(child.open_call.failure(code, message)))


def _unreadable(child: ChildRequest, worker: str, reason: str) -> RequestFailed:
    message = f"worker {worker} sent a frame that does not decode: {reason}"
    return child.open_call.failure(ErrorCode.PROTOCOL_ERROR, message)

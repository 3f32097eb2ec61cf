"""Handles requests whose worker is lost, or whose frames are lost or cannot be decoded. Runs on the bus thread."""

from collections.abc import Callable, Container

from ...schemas.chunk import ChunkError
from ...schemas.errors import ErrorCode
from ...schemas.frame_header import FrameHeader
from ...schemas.messages import RequestKey
from ..protocol.attempt import events as on
from ..protocol.fleet.presence_table import LostWorker
from ..protocol.queue.suspects import Engine
from .children import ChildRequest
from .exchange import AttemptCoordinator, is_at

__all__ = ["Losses"]


class Losses:
    """Finds open requests that are lost, and lets the coordinator resume or fail them."""

    def __init__(self, coordinator: AttemptCoordinator) -> None:
        self._coordinator = coordinator

    def __repr__(self) -> str:
        """Return one line with the coordinator."""
        return f"<Losses of {self._coordinator!r}>"

    def mark_worker_lost(self, lost: LostWorker) -> None:
        """Mark the offered requests of a lost worker or incarnation as lost. The queue keeps the others."""
        reason = f"worker {lost.worker} was lost: {lost.reason}"
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
        """Mark requests as lost if their worker's incarnation has sent no presence since its offer.

        Presence and frames use different subjects, so the last frame of a worker may arrive after its final presence.

        Args:
            incarnations: live (worker, incarnation) pairs.
            offered_before: time on `time.monotonic()`. Later offers are too young to expect presence.
        """
        self._mark_lost_where(
            lambda child: (
                child.worker is not None
                and child.since < offered_before
                and (child.worker, child.incarnation) not in incarnations
            ),
            ErrorCode.WORKER_LOST,
            "the incarnation of the worker that offered to run the request has ended",
        )

    def mark_lost(self, worker: str, incarnation: str, reason: str) -> None:
        """Mark the requests of one incarnation of a worker as lost."""
        lost = worker, incarnation
        self._mark_lost_where(lambda child: (child.worker, child.incarnation) == lost, ErrorCode.WORKER_LOST, reason)

    def fail_unreadable(self, worker: str, header: FrameHeader, reason: str) -> None:
        """Fail the one request that an undecodable frame of `worker` names, unless another worker has it."""
        (key,) = header.keys
        self.fail_false((worker, header.incarnation), key, _unreadable(worker, reason))

    def fail_false(self, engine: Engine, key: RequestKey, message: str) -> None:
        """Fail the request of a chunk that is wrong as `protocol_error`, unless another worker has the request."""
        child = self._coordinator.find(key.request_id, key.attempt, key.child)
        if child is not None and (child.worker, child.incarnation) in ((None, None), engine):
            self._coordinator.send(child, on.Failed(child.open_call.failure(ErrorCode.PROTOCOL_ERROR, message)))
            child = None
        self._coordinator.refuse_offer(child, engine[0], key)

    def retry_unreadable(self, incarnation: tuple[str, str], header: FrameHeader | None, reason: str) -> None:
        """Resume the requests of a worker whose frame cannot be decoded as new attempts.

        A request is a suspect if its chunk cannot be decoded. If the frame does not show which chunk that is, all
        requests of the worker are suspects. A request that is a suspect at two workers fails.
        """
        worker = incarnation[0]
        offered, suspects = (frozenset(), frozenset()) if header is None else (header.keys, header.bad_keys)
        for child in self._coordinator.open_children(
            lambda child: (
                (child.worker, child.incarnation) == incarnation or (child.worker is None and child.key in offered)
            )
        ):
            is_suspect = not suspects or child.key in suspects
            error = child.open_call.failure(ErrorCode.PROTOCOL_ERROR, _unreadable(worker, reason))
            self._coordinator.send(child, on.Lost(error, unreadable_at=worker if is_suspect else None))
        # The unreadable frame may also have contained their offers.
        for child in self._coordinator.open_children(lambda child: child.handed_to == worker):
            error = child.open_call.failure(ErrorCode.PROTOCOL_ERROR, _unreadable(worker, reason))
            self._coordinator.send(child, on.WorkerSilent(error))

    def mark_all_lost(self, reason: str) -> None:
        """Mark every attempt at a worker as lost, because messages in transit may be lost."""
        self._mark_lost_where(lambda child: child.worker is not None, ErrorCode.FRAMES_LOST, reason)

    def _mark_lost_where(self, is_lost: Callable[[ChildRequest], bool], code: ErrorCode, message: str) -> None:
        for child in self._coordinator.open_children(is_lost):
            self._coordinator.send(child, on.Lost(child.open_call.failure(code, message)))


def _unreadable(worker: str, reason: str) -> str:
    return f"worker {worker} sent a frame that cannot be decoded: {reason}"

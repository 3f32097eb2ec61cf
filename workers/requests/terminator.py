"""Ends requests that the worker or the client ends, not the engine. Plain state, no I/O."""

from ...bus.protocol.states import WorkerRequestEvent
from ...bus.protocol.telemetry.timeline import RETURNED
from ...schemas.chunk import ChunkError, FinishReason
from ...schemas.errors import ErrorCode, RequestError
from ...schemas.messages import RequestKey
from .link_stats import WorkerLinkStats
from .outbound import OutboundLink, OutboundRegistry
from .versions import Versions
from .worker_requests import Instructions, WorkerRequest, WorkerRequestTable

__all__ = ["RequestTerminator"]


class RequestTerminator:
    """Ends requests. It shares the state of `WorkerLinks`."""

    def __init__(
        self, requests: WorkerRequestTable, outbound: OutboundRegistry, versions: Versions, stats: WorkerLinkStats
    ) -> None:
        self._requests = requests
        self._outbound = outbound
        self._versions = versions
        self._stats = stats

    def fail(self, request: WorkerRequest, error: RequestError) -> None:
        """End an open request with `error`."""
        request.outbound.sender.fail(request.origin.key, ChunkError.of(error), self._versions.weight_version)
        self._outbound.touch(request.outbound)
        self._requests.end(request, WorkerRequestEvent.FINISHED, error.code.value)

    def fail_at(self, link: OutboundLink, key: RequestKey, error: RequestError, instructions: Instructions) -> None:
        """End a request with `error` if its terminal chunk is not sent yet. The engine need not have the request."""
        request = self._requests.find(link.client, link.incarnation, key)
        if request is not None and self._requests.is_open(request):
            self.fail(request, error)
            instructions.abort.append(request.name)
        else:
            link.sender.fail(key, ChunkError.of(error), self._versions.weight_version)
            self._outbound.touch(link)
        self._stats.failed += 1

    def abort(self, client: str, incarnation: str, key: RequestKey, instructions: Instructions) -> None:
        """Abort a request for its client, and remove its message from the queue."""
        request = self._requests.find(client, incarnation, key)
        is_open = request is not None and self._requests.is_open(request)
        if request is not None and is_open:
            instructions.abort.append(request.name)
        link = self._outbound.find(client, incarnation)
        if link is None:
            # In plain mode the engine ends the request, and the worker delivers all tokens until then.
            return
        if key in link.sender.keys:
            self._stats.stopped += 1
            link.sender.abort(key, self._versions.weight_version)
            self._outbound.touch(link)
        if request is not None:
            if is_open:
                self._requests.end(request, WorkerRequestEvent.STOPPED, FinishReason.ABORT.value)
            self.ack(request, instructions)

    def ack(self, request: WorkerRequest, instructions: Instructions) -> None:
        """Ack the queue message of a request, if there is one."""
        message = self._requests.pop_message(request)
        if message is not None:
            instructions.ack.append(message)

    def remove_link(self, link: OutboundLink, instructions: Instructions, *, to_other_workers: bool = False) -> int:
        """Remove a link and its requests. Return the number of requests.

        Args:
            to_other_workers: True to nak the queue messages, so that other workers receive them. False to ack them.
        """
        requests = self._requests.of_client(link.client, link.incarnation)
        reason = RETURNED if to_other_workers else ErrorCode.CLIENT_LOST.value
        for request in requests:
            if self._requests.is_open(request):
                instructions.abort.append(request.name)
                self._requests.end(request, WorkerRequestEvent.STOPPED, reason)
            message = self._requests.pop_message(request)
            if message is not None and to_other_workers:
                instructions.nak.append((message, 0.0))
            elif message is not None:
                instructions.ack.append(message)
        self._outbound.remove(link)
        return len(requests)

    def keep_within(self, max_held_bytes: int, instructions: Instructions) -> None:
        """Fail the requests with the most unacknowledged bytes until at most `max_held_bytes` remain."""
        excess = self._outbound.held_bytes - max_held_bytes
        if excess <= 0:
            return
        unsent = [
            (link.sender.unsent_bytes(key), key, link) for link in self._outbound.links() for key in link.sender.keys
        ]
        error = RequestError(
            code=ErrorCode.OVER_BUDGET,
            message=f"this worker holds more than {max_held_bytes} unacknowledged bytes",
        )
        for num_bytes, key, link in sorted(unsent, key=lambda item: item[0], reverse=True):
            if excess <= 0 or not num_bytes:
                break
            excess -= num_bytes
            self._stats.over_budget += 1
            self.fail_at(link, key, error, instructions)

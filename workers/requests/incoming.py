"""Incoming requests of a worker. A message contains one sample of a request, or several samples (siblings)."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from ...bus.protocol.queue.fairness import Turn
from ...bus.queue.puller import QueuedRequest
from ...bus.subjects import Subjects
from ...schemas.errors import ErrorCode, InvalidRequest, RemoteProtocolError, RequestError, RequestRejected
from ...schemas.limits import MAX_DELIVERIES, Name
from ...schemas.messages import RequestKey, RequestMessage, Sibling, decode_request, decode_request_message
from ...schemas.request import GenerateRequest, request_id_of
from .admission import Versions, check_lag, check_reply_to
from .table import RequestOrigin

MAX_INDEX = 2**31 - 1
"""The largest attempt number on the wire."""


class _Ids(msgspec.Struct):
    # Bounded: the worker remembers groups of requests that it has not validated yet.
    request_id: Name
    group_id: Name | None = None
    session_id: Name | None = None


_ids_decoder = msgspec.msgpack.Decoder(_Ids)


class IncomingRequest(msgspec.Struct, frozen=True):
    """A received message, with its samples that are neither accepted nor rejected yet."""

    client: str
    """Name of the client, from the subject."""
    envelope: RequestMessage
    samples: tuple[Sibling, ...]
    """At least one. The first sample of the message is the envelope's child and keeps the request's own seed."""
    message: QueuedRequest | None = None
    """The queue message, or None for a direct request."""
    turn: Turn | None = None
    """Turn in which the samples wait for a slot as followers of their group, or None if they are not followers."""

    @classmethod
    def decode(cls, client: str, data: bytes, message: QueuedRequest | None = None) -> "IncomingRequest":
        """Decode the envelope of a request. `client` comes from the subject.

        Raises:
            RemoteProtocolError: the data is not a request message, or names another client.
        """
        envelope = decode_request_message(data)
        if envelope.client != client:
            raise RemoteProtocolError(f"client {client} sent a request in the name of {envelope.client}")
        if envelope.reply_to is not None and message is None:
            raise RemoteProtocolError("a direct request must not have reply_to")
        return cls(client, envelope, (Sibling(envelope.child), *envelope.siblings), message)

    @classmethod
    def origins_in(cls, message: QueuedRequest) -> list[RequestOrigin]:
        """Return the origins of the requests in a queue message, or no origins if the message cannot be decoded."""
        try:
            incoming = cls.decode(message.client, message.data, message)
        except RemoteProtocolError:
            return []
        request_id = request_id_of(incoming.envelope.request)
        return [] if request_id is None else incoming.origins(request_id)

    def group(self) -> tuple[str | None, bool]:
        """Return the group of the samples, as written by the client, and True if the request is a turn of a session.

        Without usable ids, the group is None.
        """
        try:
            ids = _ids_decoder.decode(self.envelope.request)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None, False
        is_session = ids.session_id is not None and ids.group_id is None
        return ids.request_id if ids.group_id is None else ids.group_id, is_session

    def check_queued(self) -> None:
        """Check what only a message of the queue must not have.

        Raises:
            InvalidRequest: the message has siblings, or is a first attempt in the lane `resume`, where it would go
                before the first attempts of other clients.
        """
        if self.message is None:
            return
        if len(self.samples) > 1:
            raise InvalidRequest("siblings", f"has {len(self.samples) - 1} entries", "none in the queue")
        kv = self.envelope.kv
        if self.message.lane == "resume" and self.envelope.attempt == 0 and (kv is None or kv.is_prefill):
            raise InvalidRequest("attempt", "is 0 in the lane resume", "at least 1 there, or a decode phase")

    def is_poison(self, request: GenerateRequest | RequestError) -> bool:
        """Return True if the queue delivered the message too often.

        A wait for weights or for an adapter may take any number of deliveries.
        """
        if self.message is None or self.message.num_delivered <= MAX_DELIVERIES:
            return False
        # An invalid request never reaches an engine, so it cannot kill one.
        return isinstance(request, GenerateRequest) and request.min_weight_version is None and request.lora is None

    def with_samples(self, samples: Sequence[Sibling], turn: Turn | None = None) -> "IncomingRequest":
        """Return the same message with only these samples."""
        return replace(self, samples=tuple(samples), turn=turn)

    def origins(self, request_id: str) -> list[RequestOrigin]:
        """Return the origin of each sample. Only the first origin has the queue message."""
        envelope, attempt = self.envelope, self.envelope.attempt
        if envelope.reply_to is not None and self.message is not None:
            attempt = min(attempt + self.message.num_delivered - 1, MAX_INDEX)
        return [
            RequestOrigin(
                self.client,
                envelope.incarnation,
                RequestKey(request_id, attempt, sample.child),
                self.message if number == 0 else None,
                envelope.reply_to,
                None if envelope.kv is None else "prefill" if envelope.kv.is_prefill else "decode",
                envelope.lost,
                envelope.given_id,
            )
            for number, sample in enumerate(self.samples)
        ]

    def request_of(self, sample: Sibling, request: GenerateRequest) -> GenerateRequest:
        """Return the request of one sample, derived from `request`, the request of the whole message."""
        if sample.child == self.envelope.child:
            return request
        return replace(request, sampling=replace(request.sampling, seed=sample.seed))

    def decode_request(self, versions: Versions, subjects: Subjects) -> tuple[GenerateRequest | RequestError, str]:
        """Decode the request and its id. An invalid or too stale request is returned as an error.

        If an adapter answers under the model's name, a request for the model gets it as its `lora`.

        Raises:
            RemoteProtocolError: the request has no usable id, or no valid `reply_to`.
        """
        envelope = self.envelope
        if envelope.reply_to is not None:
            check_reply_to(envelope.reply_to, subjects.plain(self.client))
        request: GenerateRequest | RequestError
        try:
            request = decode_request(envelope.request)
            request_id: str | None = request.request_id
            lora = versions.adapter_of(request.lora)
            if lora != request.lora:
                request = replace(request, lora=lora)
            check_lag(request, attempt=envelope.attempt, submitted_target=envelope.target_version, versions=versions)
        except RequestError as exc:
            request, request_id = exc, request_id_of(envelope.request)
        except RemoteProtocolError as exc:
            request = RequestRejected(code=ErrorCode.INVALID_REQUEST, message=str(exc))
            request_id = request_id_of(envelope.request)
        if request_id is None:
            raise RemoteProtocolError(f"the request has no usable request_id: {request}")
        return request, request_id

"""`connect`: a client of a fleet, from URLs, names and credentials."""

import os
from collections.abc import Sequence

from ...schemas.errors import BusBroken
from ...schemas.limits import DEFAULT_MAX_UNREAD_BYTES, DEFAULT_PREFILL_MIN_TOKENS
from ..auth.credentials import Credentials
from ..nats.server import Server
from ..tracing.switch import Tracing
from .client import Client

__all__ = ["connect"]

DEFAULT_WORKER_GRACE_S = 15.0
"""Seconds. A restart of the server or the network takes less; after a longer outage an error helps the caller more."""


def connect(  # noqa: PLR0913 - each has a default, and most callers name one or two
    url: str | Sequence[str] | Server | None = None,
    *,
    fleet: str | None = None,
    client: str | None = None,
    credentials: Credentials | str | os.PathLike[str] | None = None,
    worker_grace_s: float = DEFAULT_WORKER_GRACE_S,
    wait_for_workers_s: float = 0.0,
    max_unread_bytes: int = DEFAULT_MAX_UNREAD_BYTES,
    prefill_min_tokens: int = DEFAULT_PREFILL_MIN_TOKENS,
    placement: bool = True,
    tracing: Tracing = False,
) -> Client:
    """Return a client of a fleet. Enter it with `async with` to connect.

    Args:
        url: URL of the NATS server. None: `$ROLLBUS_NATS`, or `nats://127.0.0.1:4222` if that is not set. Several
            URLs, in a sequence or separated by commas, are servers of one cluster; the client connects to any of them.
            A `Server` replaces `credentials` and the environment.
        fleet: name of the fleet whose workers serve the requests. None: the fleet in the credentials, or `default`.
        client: name of this client in subjects, unique among connected clients. None: the name in the credentials, or
            a random name.
        credentials: credentials of the NATS user, or their file. None: the file in `$ROLLBUS_CREDS`, or no user.
        worker_grace_s: seconds that a request waits for a worker after the last worker of its model was lost (default:
            15). While the client is disconnected from NATS, it treats workers as lost after lease plus margin (6 s).
            While a worker of the model starts, updates or is paused, requests wait until their deadline.
        wait_for_workers_s: seconds that a request waits for a worker if no worker serves its model and none starts
            (default: 0: a new request fails with `NoWorkers` after half a second). A larger value than `worker_grace_s`
            replaces it.
        max_unread_bytes: bytes of unread results above which `complete_many` sends no more requests (default: 1 GiB).
        prefill_min_tokens: prompts of at least this many tokens go to a prefill worker first, if the fleet has one
            (default: 32).
        placement: True (default): the client may send a request directly to a worker that has the beginning of its
            prompt in the prefix cache, or that serves its group. False: all requests, also those of sessions, go
            through the queue.
        tracing: OpenTelemetry spans of requests; needs `rollbus[otel]`. False (default): none. True: the environment
            configures the export (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER` and so on). A `TracerProvider`:
            that provider creates the spans.

    Raises:
        InvalidRequest: a name is not valid in a subject or differs from the credentials, a number is out of range, or
            `tracing` is set and OpenTelemetry is not installed.
        BusBroken: a URL is malformed, or the credentials cannot be read.
    """
    try:
        server = Server.named(url, credentials)
    except BusBroken as exc:
        # The message is complete without the internal frames of the traceback.
        raise exc.with_traceback(None) from None
    return Client(
        server,
        fleet=fleet,
        client=client,
        worker_grace_s=worker_grace_s,
        wait_for_workers_s=wait_for_workers_s,
        max_unread_bytes=max_unread_bytes,
        prefill_min_tokens=prefill_min_tokens,
        placement=placement,
        tracing=tracing,
    )

"""The storage that a NATS server can still reserve for streams, which its API does not report."""

from typing import Any, Final

from ...schemas.errors import PermissionDenied
from .jetstream import NO_STORAGE, ApiError, ask
from .patched_client import PatchedNatsClient

__all__ = ["free_storage"]

STEP_BYTES: Final = 1024**2
"""Precision of the answer in bytes."""
_NAME: Final = "doctor"
_NOT_VALID: Final = "a..b"
"""Subject that no stream can have."""
_ACCOUNT_FULL: Final = 10002
_NOT_CREATED: Final = 10049
"""The server's code for a stream that failed behind the check of its size."""


async def free_storage(nats: PatchedNatsClient, up_to: int) -> int | None:
    """Return the bytes that a server without a cluster can reserve, at most `up_to`.

    `$JS.API.INFO` has the limits of the account, not those of the server. This function therefore requests streams that
    cannot be created: the server first checks their size, and then rejects the subject of their source.

    Returns:
        The bytes; None: this user may not ask, or the answer does not show the server's storage.

    Raises:
        BusBroken: the server does not answer.
    """
    if nats.is_in_cluster:  # a server of a cluster proposes a stream to others before it checks the subject
        return None
    if (has_room := await _has_room(nats, up_to)) is not False:
        return up_to if has_room else None
    enough, too_much = 0, up_to
    while too_much - enough > STEP_BYTES:
        middle = (enough + too_much) // 2
        enough, too_much = (middle, too_much) if await _has_room(nats, middle) else (enough, middle)
    return enough


async def _has_room(nats: PatchedNatsClient, num_bytes: int) -> bool | None:
    stream: dict[str, Any] = {
        "name": _NAME,
        "storage": "file",
        "max_bytes": num_bytes,
        "sources": [{"name": f"{_NAME}-absent", "filter_subject": _NOT_VALID}],
    }
    try:
        await ask(nats, f"STREAM.CREATE.{_NAME}", stream)
    except PermissionDenied:
        return None
    except ApiError as error:
        return {_NOT_CREATED: True, NO_STORAGE: False, _ACCOUNT_FULL: False}.get(error.code)
    return None

"""Asking a server whether this user may, where nobody would hear of the answer."""

from typing import Final

from .connection import Connection, publish

__all__ = ["check_permitted", "publish_permitted"]

ANSWER_S: Final = 3.0
"""For the server's word; one that does not answer has other troubles, which show elsewhere."""


async def publish_permitted(nats: Connection, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
    """Publish, and wait until the server has looked whether this user may, as far as it answers.

    Raises:
        PermissionDenied: the user may not.
        Exception: as `publish`.
    """
    async with nats.denials.expected(subject):
        await publish(nats, subject, data, headers=headers)
        await nats.confirm(timeout_s=ANSWER_S)


async def check_permitted(nats: Connection) -> None:
    """Wait until the server has dealt with what was published and subscribed before.

    Raises:
        PermissionDenied: something of it the user may not.
    """
    await nats.confirm(timeout_s=ANSWER_S)
    if nats.denials.first is not None:
        raise nats.denials.first

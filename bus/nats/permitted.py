"""Publishes and subscribes with a check of the user's permission, where a denial would otherwise go unnoticed."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from .connection import Connection, publish, subscribe

__all__ = ["check_permitted", "publish_permitted", "subscribe_permitted"]

ANSWER_S: Final = 3.0
"""Seconds for the server's answer. If the server does not answer, other calls report that."""


async def publish_permitted(nats: Connection, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
    """Publish, and wait until the server has checked the user's permission, if the server answers.

    Raises:
        PermissionDenied: the user may not publish.
        Exception: the errors of `publish`.
    """
    async with nats.denials.expected(subject):
        await publish(nats, subject, data, headers=headers)
        await nats.confirm(timeout_s=ANSWER_S)


async def subscribe_permitted(
    nats: Connection,
    subject: str,
    handler: Callable[[Msg], Awaitable[None]],
    *,
    max_pending_msgs: int,
    max_pending_bytes: int,
) -> Subscription:
    """Subscribe, and wait until the server has checked the user's permission, if the server answers.

    Raises:
        PermissionDenied: the user may not subscribe; the subscription is removed.
        Exception: the errors of `subscribe`.
    """
    async with AsyncExitStack() as undo:
        async with nats.denials.expected(subject, "subscribe"):
            subscription = await subscribe(
                nats, subject, handler, max_pending_msgs=max_pending_msgs, max_pending_bytes=max_pending_bytes
            )
            # Otherwise each reconnect would subscribe again, and after a cancellation no caller owns the subscription.
            undo.push_async_callback(_end, nats, subscription)
            await nats.confirm(timeout_s=ANSWER_S)
        undo.pop_all()
    return subscription


async def _end(nats: Connection, subscription: Subscription) -> None:
    if not nats.is_closed:
        await subscription.unsubscribe()


async def check_permitted(nats: Connection) -> None:
    """Wait until the server has processed all earlier publications and subscriptions.

    Raises:
        PermissionDenied: the user lacks the permission for one of them.
    """
    await nats.confirm(timeout_s=ANSWER_S)
    if nats.denials.first is not None:
        raise nats.denials.first

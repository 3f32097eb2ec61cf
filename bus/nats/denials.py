"""Permission errors of a NATS server.

The server reports them asynchronously; this module raises them in the waiting call.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from ...schemas.errors import PermissionDenied
from ..auth.credentials import User
from ..auth.permissions import describe_denial

__all__ = ["Denials"]

logger = logging.getLogger(__name__)

MAX_LOGGED: Final = 100
"""Maximum number of logged subjects. A program has few kinds of subjects, and further denials repeat them."""
_VIOLATION: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
_ACTIONS: Final = {"publish": "publish", "subscription": "subscribe"}


class _Waiter:
    """A call that waits for a possible denial."""

    def __init__(self, action: str, subject: str, scope: asyncio.Timeout) -> None:
        self.action = action
        self.subject = subject
        self.scope = scope
        self.denial: PermissionDenied | None = None


class Denials:
    """All denials of one connection.

    Args:
        user: the connection's user; None without credentials.

    Attributes:
        first: the first denial that no call waited for.
    """

    def __init__(self, user: User | None) -> None:
        self._user = user
        self._waiters: list[_Waiter] = []
        self._logged: set[tuple[str, str]] = set()
        self.first: PermissionDenied | None = None

    @asynccontextmanager
    async def expected(self, subject: str, action: str = "publish") -> AsyncIterator[None]:
        """Raise `PermissionDenied` in the block as soon as the server denies a publish or subscribe on `subject`.

        Args:
            action: `publish` or `subscribe`.

        If several blocks publish to one subject at once, each block gets its own denial. The server rejects the
        messages one by one in their order.
        """
        waiter = _Waiter(action, subject, asyncio.timeout(None))
        try:
            async with waiter.scope:
                self._waiters.append(waiter)
                try:
                    yield
                finally:
                    self._waiters.remove(waiter)
        except TimeoutError:
            if waiter.denial is None:
                raise
        if waiter.denial is not None:
            raise waiter.denial

    def add(self, words: str) -> PermissionDenied | None:
        """Handle an error text of the server. Return the denial if no call waits for it."""
        violation = _VIOLATION.search(words)
        action, subject = (_ACTIONS[violation[1].lower()], violation[2]) if violation else ("do", words)
        denial = PermissionDenied(self._describe(action, subject), action=action, subject=subject)
        waiters = [waiter for waiter in self._waiters if (waiter.action, waiter.subject) == (action, subject)]
        for waiter in waiters:
            if waiter.denial is None:
                waiter.denial = denial
                waiter.scope.reschedule(asyncio.get_running_loop().time())
                break
        if waiters:
            return None
        self.first = self.first or denial
        if (action, subject) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((action, subject))
            logger.warning("nats.denied action=%s subject=%s error=%s", action, subject, denial)
        return denial

    def _describe(self, action: str, subject: str) -> str:
        if self._user is None:
            return f"a user without credentials may not {action} {'to' if action == 'subscribe' else 'on'} {subject}"
        return f"user {self._user.name} (role {self._user.role}) {describe_denial(self._user, action, subject)}"

"""The worker's calls to the engine core about recomputed KV; `kv_history` is the other side."""

import logging

from ....schemas.errors import ControlError
from .calls import Calls
from .kv_history import OUTDATE, WATCH

__all__ = ["KvWatch"]

logger = logging.getLogger(__name__)


class KvWatch:
    """Makes the engine core report recomputed KV, if its scheduler allows this.

    Attributes:
        is_on: True if the engine core reports recomputed KV; False until `start`.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.is_on = False

    async def start(self) -> None:
        """Start the reports. Call this before the first request. With a custom scheduler, `is_on` may remain False.

        Raises:
            EngineDead: the engine has ended.
        """
        try:
            await self._calls.on_cores(WATCH)
        except ControlError as exc:
            logger.warning("engine.kv_watch_failed reason=%s", exc.message)
        else:
            self.is_on = True

    async def outdate(self, lora_number: int | None = None) -> None:
        """Report that the weights, or the adapter of this number, were replaced; see `kv_history.outdate_kv`.

        Raises:
            ControlError: `engine_error`.
            EngineDead: the engine has ended.
        """
        if self.is_on:
            await self._calls.on_cores(OUTDATE, lora_number)

"""What the worker asks of the engine core about KV that is computed anew; the other side is `kv_history`."""

import logging

from ....schemas.errors import ControlError
from .calls import Calls
from .kv_history import OUTDATE, WATCH

__all__ = ["KvWatch"]

logger = logging.getLogger(__name__)


class KvWatch:
    """Has the engine core tell of KV that it computes anew, where its scheduler allows it.

    Attributes:
        is_on: the engine core does; False until `start`.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.is_on = False

    async def start(self) -> None:
        """Begin, before the first request; where the scheduler is another than vLLM's own, `is_on` may stay False.

        Raises:
            EngineDead: the engine is gone.
        """
        try:
            await self._calls.on_cores(WATCH)
        except ControlError as exc:
            logger.warning("engine.kv_watch_failed reason=%s", exc.message)
        else:
            self.is_on = True

    async def outdate(self, lora_number: int | None = None) -> None:
        """Say that weights, or the adapter of this number, were replaced; see `kv_history.outdate_kv`.

        Raises:
            ControlError: `engine_error`.
            EngineDead: the engine is gone.
        """
        if self.is_on:
            await self._calls.on_cores(OUTDATE, lora_number)

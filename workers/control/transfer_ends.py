"""Ends transfers of weights whose lease has ended, and loads the desired weights after the end of any transfer."""

import time

from ...bus.protocol.fleet.desired import WEIGHTS
from .desire import pending_registers
from .handled import HandledRegisters
from .reading import DesiredReader
from .transfer import Transfer

__all__ = ["TransferEnds"]


class TransferEnds:
    """The part of a reconciler that ends transfers. Coroutines may raise `EngineDead`."""

    def __init__(self, transfer: Transfer, reader: DesiredReader, handled: HandledRegisters) -> None:
        self._transfer = transfer
        self._reader = reader
        self._handled = handled
        self._needed_read: int | None = None

    def __repr__(self) -> str:
        """One line with the transfer."""
        return f"<TransferEnds {self._transfer!r}>"

    async def handle(self, *, may_act: bool) -> None:
        """End a transfer whose lease has ended. After the end of any transfer, make the desired weights due again.

        The caller executes no command of the transfer meanwhile.

        Args:
            may_act: True if the desired state is known and this worker holds its lease.
        """
        reason = self._transfer.end_of_lease(time.monotonic())
        if reason is None:
            self._needed_read = None
        elif self._has_no_finish() and may_act:
            self._transfer.end(reason)
        if await self._transfer.recover():
            self._handled.reload_weights()

    def _has_no_finish(self) -> bool:
        """Return True if a read of the desired state that began after the end of the lease found no new weights."""
        if self._needed_read is None:
            self._needed_read = self._reader.request_read()
        pending = pending_registers(self._reader.effective, self._handled.by_name)
        return self._reader.num_read >= self._needed_read and all(due.register != WEIGHTS for due in pending)

"""Loads models' tokenizers for the service, so that a load that fails or hangs harms nothing else."""

import asyncio
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from ..tokenization import Tokenizer, TokenizerUnavailable, load_tokenizer

__all__ = ["TokenizerLoads"]

logger = logging.getLogger(__name__)

PRELOAD_WAIT_S: Final = 5.0
"""Tokenizers mostly load in less; a probe that asks whether the service is ready waits no longer."""
STOP_WAIT_S: Final = 5.0
"""A load mostly ends in less; a service that stops waits no longer for one that hangs."""


class TokenizerLoads:
    """The tokenizers that were loaded, and the loads under way, by folder; a fleet serves a few."""

    def __init__(self) -> None:
        self._loads: dict[Path, asyncio.Future[Tokenizer]] = {}
        # One load after another: several threads that import transformers at once find it half imported.
        self._turn = threading.Lock()
        self._is_stopping = False

    def __repr__(self) -> str:
        """One line with counts."""
        num_ended = sum(load.done() for load in self._loads.values())
        return f"<TokenizerLoads ended={num_ended} loading={len(self._loads) - num_ended}>"

    async def tokenizer(self, folder: Path) -> Tokenizer:
        """Return the tokenizer of a folder; load it if there was no load, or the last one failed.

        Cancellation: the load goes on.

        Raises:
            TokenizerUnavailable: it cannot be loaded.
        """
        load = self._loads.get(folder)
        if load is None or (load.done() and load.exception() is not None):
            load = self._begin(folder)
        return await asyncio.shield(load)

    async def has_ended(self, folder: Path) -> bool:
        """Return whether the tokenizer of a folder is loaded, or cannot be; wait some seconds for its load.

        This begins a load only if there was none: probes come again and again, also where the load fails.

        Cancellation: the load goes on.
        """
        load = self._loads.get(folder)
        if load is None:
            load = self._begin(folder)
            # No request gets its error.
            load.add_done_callback(_log_failure)
        await asyncio.wait([load], timeout=PRELOAD_WAIT_S)
        return load.done()

    async def stop(self) -> None:
        """Begin no more loads, wait some seconds for the one under way, and then leave it alone."""
        self._is_stopping = True
        loading = [load for load in self._loads.values() if not load.done()]
        if loading:
            await asyncio.wait(loading, timeout=STOP_WAIT_S)
        for load in loading:
            load.cancel()

    def _begin(self, folder: Path) -> asyncio.Future[Tokenizer]:
        found: Future[Tokenizer] = Future()
        # A daemon: at its end the process would wait for a pool's thread that hangs.
        threading.Thread(target=self._run, args=(folder, found), name="tokenizer-load", daemon=True).start()
        load = self._loads[folder] = asyncio.wrap_future(found)
        load.add_done_callback(_error_of)
        return load

    def _run(self, folder: Path, found: Future[Tokenizer]) -> None:
        with self._turn:
            # False: the service has stopped.
            if not found.set_running_or_notify_cancel():
                return
            try:
                if self._is_stopping:
                    raise TokenizerUnavailable("no tokenizer: the service stops")
                found.set_result(load_tokenizer(folder))
            except TokenizerUnavailable as exc:
                found.set_exception(exc)
            except BaseException as exc:
                # Boundary of one load: a panic of the tokenizers library is no `Exception`.
                logger.error("tokenizer.load_panicked folder=%s", folder, exc_info=exc)
                found.set_exception(TokenizerUnavailable(f"no tokenizer in {folder}: a library failed"))


def _error_of(load: asyncio.Future[Tokenizer]) -> BaseException | None:
    """Return the error of a load that has ended, so that asyncio does not complain that nobody asked for it."""
    return None if load.cancelled() else load.exception()


def _log_failure(load: asyncio.Future[Tokenizer]) -> None:
    error = _error_of(load)
    if error is not None:
        logger.warning("tokenizer.load_failed error=%s", error)

"""Loads models' tokenizers for the service. A load that fails or hangs does not affect other requests."""

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
"""Seconds that a readiness probe waits for a load. Most tokenizers load faster."""
MAX_LOADS: Final = 16
"""Tokenizers that are kept or being loaded: a fleet serves few models, and a tokenizer occupies up to 100 MB. Workers
choose the names of the folders. Beyond the limit, the tokenizer that was used least recently is removed."""
STOP_WAIT_S: Final = 5.0
"""Seconds that a stopping service waits for a load. Most loads end faster."""


class TokenizerLoads:
    """The loaded tokenizers and the running loads by folder, at most `MAX_LOADS`."""

    def __init__(self) -> None:
        # Least recently used first.
        self._loads: dict[Path, asyncio.Future[Tokenizer]] = {}
        # One load at a time: if several threads import transformers at once, they see a partly imported module.
        self._turn = threading.Lock()
        self._is_stopping = False

    def __repr__(self) -> str:
        """Return one line with counts."""
        num_ended = sum(load.done() for load in self._loads.values())
        return f"<TokenizerLoads ended={num_ended} loading={len(self._loads) - num_ended}>"

    async def tokenizer(self, folder: Path) -> Tokenizer:
        """Return the tokenizer of a folder. Load it if there was no load, or if the last load failed.

        Cancellation: the load continues.

        Raises:
            TokenizerUnavailable: the tokenizer cannot be loaded.
        """
        load = self._find(folder)
        if load is None or (load.done() and load.exception() is not None):
            load = self._begin(folder)
        return await asyncio.shield(load)

    async def has_ended(self, folder: Path) -> bool:
        """Return True if the tokenizer of a folder is loaded or cannot be loaded. Wait some seconds for its load.

        This starts a load only if there was none, because probes repeat even if the load fails.

        Cancellation: the load continues.
        """
        load = self._find(folder)
        if load is None:
            load = self._begin(folder)
            # Log the error, because no request receives it.
            load.add_done_callback(_log_failure)
        await asyncio.wait([load], timeout=PRELOAD_WAIT_S)
        return load.done()

    async def stop(self) -> None:
        """Start no more loads and wait some seconds for the running load. Abandon it if it does not end."""
        self._is_stopping = True
        loading = [load for load in self._loads.values() if not load.done()]
        if loading:
            await asyncio.wait(loading, timeout=STOP_WAIT_S)
        for load in loading:
            load.cancel()

    def _find(self, folder: Path) -> asyncio.Future[Tokenizer] | None:
        """Return the load of a folder, and move it to the end of the order."""
        load = self._loads.pop(folder, None)
        if load is not None:
            self._loads[folder] = load
        return load

    def _begin(self, folder: Path) -> asyncio.Future[Tokenizer]:
        """Load a tokenizer in a thread.

        Raises:
            TokenizerUnavailable: too many other tokenizers are being loaded.
        """
        self._loads.pop(folder, None)
        if len(self._loads) >= MAX_LOADS:
            ended = next((known for known, load in self._loads.items() if load.done()), None)
            if ended is None:
                raise TokenizerUnavailable(f"no tokenizer: {MAX_LOADS} other tokenizers are being loaded")
            del self._loads[ended]
        found: Future[Tokenizer] = Future()
        # A daemon thread: with a pool, the process would wait at its exit for a thread that hangs.
        threading.Thread(target=self._run, args=(folder, found), name="tokenizer-load", daemon=True).start()
        load = self._loads[folder] = asyncio.wrap_future(found)
        load.add_done_callback(_error_of)
        return load

    def _run(self, folder: Path, found: Future[Tokenizer]) -> None:
        with self._turn:
            # False if the service has stopped.
            if not found.set_running_or_notify_cancel():
                return
            try:
                if self._is_stopping:
                    raise TokenizerUnavailable("no tokenizer: the service stops")
                found.set_result(load_tokenizer(folder))
            except TokenizerUnavailable as exc:
                found.set_exception(exc)
            except BaseException as exc:
                # Boundary of one load. A panic of the tokenizers library is not an `Exception`.
                logger.error("tokenizer.load_panicked folder=%s", folder, exc_info=exc)
                found.set_exception(TokenizerUnavailable(f"no tokenizer in {folder}: a library failed"))


def _error_of(load: asyncio.Future[Tokenizer]) -> BaseException | None:
    """Return the error of a load that has ended. Otherwise asyncio would log that the error was never retrieved."""
    return None if load.cancelled() else load.exception()


def _log_failure(load: asyncio.Future[Tokenizer]) -> None:
    error = _error_of(load)
    if error is not None:
        logger.warning("tokenizer.load_failed error=%s", error)

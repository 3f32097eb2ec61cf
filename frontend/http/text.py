"""Conversion of tokens to text while they arrive, with stop strings, and the loading of tokenizers for it.

The bus transports token ids, so the service searches the text for stop strings. A load of a tokenizer that fails or
hangs does not affect other requests.
"""

import asyncio
import codecs
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeAlias

import numpy as np
from msgspec import Meta

from ... import bus
from ..tokenization import Tokenizer, TokenizerUnavailable, load_tokenizer

logger = logging.getLogger(__name__)


LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8. At most this many tokens can be parts of one character."""


class Detokenizer:
    """Converts tokens to text in constant time per token.

    A character is returned as soon as all of its bytes are known.

    Bytes that can never become a character are U+FFFD, as in the tokenizer's own text.

    Args:
        prompt_token_ids: the preceding tokens. Their text is not repeated, but a character may begin in them.
        skip_special_tokens: if True, special tokens add no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(prompt_token_ids[-LONGEST_CHARACTER:])

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the new text."""
        if not self._hidden.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        """Return the text that remains at the end: U+FFFD if a character is incomplete, else an empty string."""
        return self._utf8.decode(b"", final=True)


MAX_STOPS: Final = 64
"""Limit on stop strings. Each of them is searched in each piece of text."""
MAX_STOP_CHARS: Final = 4096

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
"""Stop strings in a request body."""


def stop_strings(given: StopStrings) -> Sequence[str]:
    """Return the stop strings of a body as a sequence."""
    return () if given is None else (given,) if isinstance(given, str) else given


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, in time linear in the text.

    The first stop string is the one that is complete first. If several end at the same place, it is the first of them
    in `stops`. Text that may be the beginning of a stop string is held.

    Args:
        stops: the stop strings. None of them may be empty.
        include_stop: if True, the text includes the stop string at its end.

    Attributes:
        stop: the stop string that was found. Do not add text after that.
        include_stop: the argument `include_stop`.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.stop: str | None = None
        self.include_stop = include_stop
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    @property
    def has_stops(self) -> bool:
        """False: all text is final at once."""
        return bool(self._patterns)

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Return the text that is final now. If `may_stop` is False, ignore stop strings that `text` completes."""
        if not self._patterns:
            return text
        for index, char in enumerate(text):
            # Advance all patterns, even if one is found.
            found = [pattern.text for pattern in self._patterns if pattern.add(char)]
            if found and may_stop:
                self.stop = found[0]
                answer = self._held + text[: index + 1]
                self._held = ""
                return answer if self.include_stop else answer[: -len(self.stop)]
        self._held += text
        unsure = 0 if self.include_stop else max(pattern.matched for pattern in self._patterns)
        sure = len(self._held) - unsure
        answer, self._held = self._held[:sure], self._held[sure:]
        return answer

    def flush(self) -> str:
        """Return the held text. Call this if no more text follows."""
        answer, self._held = self._held, ""
        return answer


class _Pattern:
    """Length of the prefix of a string with which a text ends, by the Knuth-Morris-Pratt algorithm."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each prefix of the string: the length of the longest shorter prefix with which it ends.
        self._shorter = [0] * len(text)
        for index in range(1, len(text)):
            self._shorter[index] = self._next(self._shorter[index - 1], text[index])

    def _next(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == char)

    def add(self, char: str) -> bool:
        """Add a character of the text. Return True if the text now ends with the string."""
        self.matched = self._next(self.matched, char)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[-1]
        return True


class TextDelta(NamedTuple):
    """The text that some tokens add to an answer."""

    text: str
    kept: int
    """Number of the tokens that belong to the answer. Discard later tokens with their logprobs and routed experts."""
    stop: str | None = None
    """The stop string that ended the answer. The last of the kept tokens completed it."""


class AnswerText:
    """The text of one answer, up to its end. The split of the tokens between calls does not affect it.

    Args:
        min_tokens: a stop string counts only if a token after this number of tokens completes it.

    Attributes:
        tokens: number of tokens that belong to the answer so far.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher, *, min_tokens: int = 0) -> None:
        self.tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens

    def add(self, token_ids: Sequence[int], *, final: bool = False, by_stop_token: bool = False) -> TextDelta:
        """Add the next tokens of an answer that no stop string has ended.

        Args:
            final: no more tokens follow, so no text is held.
            by_stop_token: the last token is a stop token, which ended the answer. The token is kept, and its text is
                treated like that of a stop string.
        """
        unread = by_stop_token and not self._stops.include_stop
        if not self._stops.has_stops:
            self.tokens += len(token_ids)
            text = self._detokenizer.add(token_ids[:-1] if unread else token_ids)
            return TextDelta(text + self._detokenizer.flush() if final else text, len(token_ids))
        texts: list[str] = []
        for kept, token_id in enumerate(token_ids, 1):
            self.tokens += 1
            if not (unread and kept == len(token_ids)):
                may_stop = self.tokens > self._min_tokens
                texts.append(self._stops.add(self._detokenizer.add([token_id]), may_stop=may_stop))
            if self._stops.stop is not None:
                return TextDelta("".join(texts), kept, self._stops.stop)
        if final:
            texts += [self._stops.add(self._detokenizer.flush(), may_stop=False), self._stops.flush()]
        return TextDelta("".join(texts), len(token_ids))


def text_of(
    request: bus.GenerateRequest,
    tokenizer: Tokenizer,
    stops: Sequence[str],
    *,
    include_stop: bool,
    skip_special_tokens: bool,
) -> AnswerText:
    """Return the empty text of a new answer."""
    prompt_end = np.asarray(request.prompt_token_ids[-LONGEST_CHARACTER:]).tolist()
    return AnswerText(
        Detokenizer(tokenizer, prompt_end, skip_special_tokens=skip_special_tokens),
        StopMatcher(stops, include_stop),
        min_tokens=request.sampling.min_tokens,
    )


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

    async def tokenizer(self, folder: Path) -> Tokenizer:
        """Return the tokenizer of a folder. Load it if there was no load, or if the last load failed.

        Cancellation: the load continues.

        Raises:
            TokenizerUnavailable: the tokenizer cannot be loaded.
        """
        load = self._find(folder)
        if load is None or (load.done() and load.exception() is not None):
            load = self._begin(folder)
        return load.result() if load.done() else await asyncio.shield(load)

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

"""Tokens with what belongs to them, and the answers that grow of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

import bus
from frontend.http.detokenizer import Detokenizer
from frontend.http.errors import HttpError
from frontend.http.openai.options import Options
from frontend.http.stops import AnswerText, StopMatcher
from frontend.tokenization import Tokenizer
from schemas.errors import ErrorCode
from schemas.rows import Rows

__all__ = ["Choice", "Piece", "Update"]

Logprobs = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
Array = TypeVar("Array", bound=npt.NDArray[np.generic])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of one answer, or all of them."""

    ids: Ids
    """i4[k]."""
    logprobs: Logprobs | None
    """f4[k]."""
    top_ids: Ids | None
    """i4[k, width], best first."""
    top_logprobs: Logprobs | None
    """f4[k, width]."""
    weight_versions: Ids
    """i4[k]."""
    rows: Rows | None
    """u1|u2[rows, layers, top_k]: some may belong to later tokens."""
    finish_reason: bus.FinishReason | None = None
    """None: there will be more."""
    stop_token: int | None = None
    """Which of `stop_token_ids` ended the answer."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache, where that is known."""
    worker: str | None = None
    """Who made the last of the tokens, where that is known."""

    @classmethod
    def of_generation(cls, generation: bus.Generation) -> "Piece":
        """All of an answer."""
        return cls(
            ids=generation.token_ids,
            logprobs=generation.logprobs,
            top_ids=generation.top_token_ids,
            top_logprobs=generation.top_logprobs,
            weight_versions=generation.weight_versions,
            rows=generation.routed_experts,
            finish_reason=generation.finish_reason,
            stop_token=generation.stop_reason,
            cached_tokens=generation.cached_tokens,
            worker=generation.worker_ids[-1] if generation.worker_ids else None,
        )

    @classmethod
    def of_chunk(cls, chunk: bus.Chunk) -> "Piece":
        """What one chunk added."""
        top, end, rows = chunk.top_logprobs, chunk.end, chunk.routed_experts
        return cls(
            ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            top_ids=None if top is None else top.token_ids,
            top_logprobs=None if top is None else top.logprobs,
            weight_versions=np.full(chunk.num_tokens, chunk.weight_version, "i4"),
            rows=None if rows is None else rows.numpy(),
            finish_reason=chunk.finish_reason,
            stop_token=None if end is None else end.stop_reason,
            cached_tokens=None if end is None else end.cached_tokens,
            worker=chunk.worker_id,
        )

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """What follows each other as one; the last one says how it ended."""
        if len(pieces) == 1:
            return pieces[0]
        return replace(
            pieces[-1],
            ids=np.concatenate([piece.ids for piece in pieces]),
            logprobs=_join([piece.logprobs for piece in pieces]),
            top_ids=_join([piece.top_ids for piece in pieces]),
            top_logprobs=_join([piece.top_logprobs for piece in pieces]),
            weight_versions=np.concatenate([piece.weight_versions for piece in pieces]),
            rows=_join([piece.rows for piece in pieces]),
            worker=next((piece.worker for piece in reversed(pieces) if piece.worker is not None), None),
        )

    def cut(self, kept: int) -> "Piece":
        """The first `kept` tokens, still with all rows."""
        if kept == len(self.ids):
            return self
        return replace(
            self,
            ids=self.ids[:kept],
            logprobs=None if self.logprobs is None else self.logprobs[:kept],
            top_ids=None if self.top_ids is None else self.top_ids[:kept],
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[:kept],
            weight_versions=self.weight_versions[:kept],
        )


def _join(parts: Sequence[Array | None]) -> Array | None:
    # Chunks without tokens have none.
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


@dataclass(frozen=True, slots=True)
class Update:
    """What some more tokens add to an answer."""

    text: str
    tokens: Piece
    """Those of them that belong to the answer."""


class Choice:
    """One answer, as it grows.

    Args:
        index: among the answers to one HTTP request.
        wanted: what it answers.
        keep: all of it is asked for at the end.

    Attributes:
        num_tokens: so far.
        finish_reason: OpenAI's word for why it has ended; None while it grows.
        stop_reason: the stop string or the id of the stop token that ended it.
    """

    def __init__(
        self, index: int, wanted: bus.GenerateRequest, options: Options, tokenizer: Tokenizer, *, keep: bool
    ) -> None:
        self.index = index
        self.wanted = wanted
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cached_tokens: int | None = None
        self.text_offset = 0
        """Of the next token, in the text of all tokens; counted by who shows them."""
        self._options = options
        self._keep = keep
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        prompt_end = [int(token_id) for token_id in wanted.prompt_token_ids[-8:]]
        self._text = AnswerText(
            Detokenizer(tokenizer, prompt_end, skip_special_tokens=options.skip_special_tokens),
            StopMatcher(options.stops, options.include_stop),
            min_tokens=wanted.sampling.min_tokens,
        )

    def add(self, piece: Piece) -> Update:
        """Take the next tokens of an answer that has not ended.

        Raises:
            HttpError: 502, its logprobs are not those of its tokens.
        """
        self._check(piece)
        delta = self._text.add(
            piece.ids.tolist(),
            final=piece.finish_reason is not None,
            by_stop_token=piece.finish_reason is bus.FinishReason.STOP and not self._options.include_stop,
        )
        update = Update(delta.text, piece.cut(delta.kept))
        self.num_tokens += delta.kept
        self.cached_tokens = piece.cached_tokens
        if delta.stop is not None:
            self.finish_reason, self.stop_reason = bus.FinishReason.STOP, delta.stop
        elif piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_token
        if self._keep:
            self._pieces.append(update.tokens)
            self._texts.append(delta.text)
        return update

    def _check(self, piece: Piece) -> None:
        if self.wanted.sampling.logprobs is None or not len(piece.ids):
            return
        num_logprobs = 0 if piece.logprobs is None else len(piece.logprobs)
        if num_logprobs != len(piece.ids):
            raise HttpError(
                502, f"{len(piece.ids)} tokens came with {num_logprobs} logprobs", code=ErrorCode.PROTOCOL_ERROR
            )

    def taken(self) -> tuple[str, Piece]:
        """All of its text and tokens, which are not kept here any more."""
        pieces, texts, self._pieces, self._texts = self._pieces, self._texts, [], []
        return "".join(texts), Piece.joined(pieces)

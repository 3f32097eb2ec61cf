"""How the two routes write answers: a chat's messages, or plain text."""

from typing import Any, Final, Protocol

import numpy as np

from frontend.http.openai.options import Options
from frontend.http.openai.pieces import Choice, Piece, Update
from frontend.tokenization import Tokenizer, token_text
from schemas.chunk import json_logprobs

__all__ = ["CHAT", "COMPLETION", "Shape", "choice_json"]


class Shape(Protocol):
    """How one route writes answers."""

    id_prefix: str
    object: str
    event_object: str
    prompt_is_common: bool
    """All answers are to one prompt, whose token ids stand beside them."""

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What stands in a stream before the first text of an answer."""

    def text(self, text: str, *, delta: bool) -> dict[str, Any]:
        """The text of an answer, or a part of it."""

    def logprobs(self, choice: Choice, tokens: Piece, options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
        """The logprobs of the answer's next tokens.

        Raises:
            LocalProtocolError: one is no number.
        """


def choice_json(
    shape: Shape, choice: Choice, update: Update, options: Options, tokenizer: Tokenizer, *, delta: bool
) -> dict[str, Any]:
    """One answer, or what a stream tells of it."""
    logprobs = None
    if options.top_logprobs is not None and (len(update.tokens.ids) or not delta):
        logprobs = shape.logprobs(choice, update.tokens, options, tokenizer)
    found = {
        "index": choice.index,
        **shape.text(update.text, delta=delta),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if options.token_ids:
        found["token_ids"] = update.tokens.ids.tolist()
    return found


class _Namer:
    """What tokens are called in logprobs."""

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def token(self, token_id: int) -> tuple[str, bytes]:
        data = self._tokenizer.token_bytes(token_id)
        return (f"token_id:{token_id}" if self._as_token_ids else token_text(data)), data


def _alternatives(tokens: Piece, at: int, width: int) -> list[tuple[int, float]]:
    if tokens.top_ids is None or tokens.top_logprobs is None:
        return []
    return list(zip(tokens.top_ids[at, :width].tolist(), json_logprobs(tokens.top_logprobs[at, :width]), strict=True))


def _sampled(tokens: Piece) -> list[tuple[int, float]]:
    logprobs = np.empty(0, "f4") if tokens.logprobs is None else tokens.logprobs
    return list(zip(tokens.ids.tolist(), json_logprobs(logprobs), strict=True))


class _Chat:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    event_object = "chat.completion.chunk"
    prompt_is_common = True

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def text(self, text: str, *, delta: bool) -> dict[str, Any]:
        if delta:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: Choice, tokens: Piece, options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
        namer = _Namer(tokenizer, as_token_ids=options.as_token_ids)
        return {
            "content": [
                {
                    **_entry(namer, token_id, logprob),
                    "top_logprobs": [
                        _entry(namer, *alternative)
                        for alternative in _alternatives(tokens, at, options.top_logprobs or 0)
                    ],
                }
                for at, (token_id, logprob) in enumerate(_sampled(tokens))
            ],
            "refusal": None,
        }


def _entry(namer: _Namer, token_id: int, logprob: float) -> dict[str, Any]:
    name, data = namer.token(token_id)
    return {"token": name, "logprob": logprob, "bytes": list(data)}


class _Completion:
    id_prefix = "cmpl-"
    object = "text_completion"
    event_object = "text_completion"
    prompt_is_common = False

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return None

    def text(self, text: str, *, delta: bool) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, choice: Choice, tokens: Piece, options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
        namer = _Namer(tokenizer, as_token_ids=options.as_token_ids)
        names, logprobs, tops, offsets = [], [], [], []
        for at, (token_id, logprob) in enumerate(_sampled(tokens)):
            name, _ = namer.token(token_id)
            names.append(name)
            logprobs.append(logprob)
            others = _alternatives(tokens, at, options.top_logprobs or 0)
            # The sampled token is among them, also where it is none of the most likely.
            tops.append({namer.token(other)[0]: value for other, value in [*others, (token_id, logprob)]})
            offsets.append(choice.text_offset)
            choice.text_offset += len(name)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


CHAT: Final[Shape] = _Chat()
COMPLETION: Final[Shape] = _Completion()

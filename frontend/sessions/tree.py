"""The turns of a session as a tree: which served turn a request continues, and where it forks.

A turn is one answer with the messages before it that no earlier turn has. Its parent is the turn whose history it
continues. Turns are only added, so a sample of a leaf never changes.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np

from ...schemas.decoding import JsonObject
from ...schemas.errors import RollbusError
from ...schemas.rows import Float32s, Int32s
from .messages import MessageKey, call_ids, changed_setting, frame_of, key_of

History = Sequence[Mapping[str, Any]]
KeyAt = Callable[[int], MessageKey]
"""Returns the key of the message of a history at an index."""
WHOLE: Final = "whole"
"""Join: the prompt is one rendering of all messages."""
CHECKED: Final = "checked"
"""Join: the text of the whole prompt equals what the template makes of the same messages."""
TAIL: Final = "tail"
"""Join: only the new messages were rendered in this turn."""
UNCHECKED: Final = "unchecked"
"""Join: the tokenizer changes text, so that decoded text shows nothing."""
DIFFERS: Final = "differs"
"""Join, only of the last turn of a sample: the template now makes another text of the whole history. The ids are still
those that the model saw."""


class SessionError(RollbusError):
    """A session cannot do what was asked.

    Attributes:
        code: `session_ended`, `session_limit`, `unknown_session`, `rows_missing` or `special_token_in_content`.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Why a turn does not continue the newest turn."""

    message: int
    """Index in the history of the first message that differs from every served branch."""
    field: str
    """Field of that message, or else why nothing that was sampled is continued:

    - `sibling`: nothing differs.
    - `model`, `tools`, `variables`: those of the template have changed, and it shows them in earlier text.
    - `template`: the template now writes the text from that message on, up to the next answer, in another way.
    - `reasoning_dropped`: the template drops reasoning, and the session has the policy `template`.
    - `rejected_alone`: the template rejects the new messages after a single question and its answer.
    - `instructions_moved`: the template moves new instructions to the beginning.
    - `end_hidden`: the template does not show where the answer before the new messages ends."""


class Turn(msgspec.Struct, kw_only=True, frozen=True):
    """One served answer and the messages before it that its parent does not have."""

    id: str
    """Id of the turn."""
    request_id: str = ""
    """Id of the request. The ids of the answer and its items contain it."""
    parent: str | None
    messages: list[JsonObject]
    """The messages after the parent's answer, as the client sent them."""
    answer: JsonObject
    """The assistant's message, as it was served."""
    frame: str
    setting: JsonObject | None = None
    """The model, and what its template shows besides messages, with the fields `model`, `tools` and `variables`. None:
    that of the parent."""
    prompt_ids: bytes
    """<i4: ids of the prompt after the parent's ids."""
    token_ids: bytes
    """<i4[G]: sampled ids."""
    logprobs: bytes
    """<f4[G]."""
    weight_versions: bytes
    """<i4[G]."""
    lora_versions: bytes = b""
    """<i4[G]: versions of the adapter; empty: none."""
    kv_from: int | None = None
    """Sampled token before which the engine last computed all KV again; 0 and less: never. None: not reported."""
    finish_reason: str
    """Finish reason of the engine, or `length` at a limit of the session."""
    ended_by: str = ""
    """Text of the special token that ended the turn; empty: something else ended it."""
    is_complete: bool = True
    """False: the client left, or the session ended, before the answer was complete."""
    fork: Fork | None = None
    join: str = WHOLE
    attempts: int = 1
    cost: float = 0.0
    """Price of the prompt and of the sampled tokens."""
    num_rows: int = 0
    """Rows of routed experts, which are stored beside the turn."""
    rows_start: int = 0
    served_at: float = 0.0
    retry_key: str = ""
    """Digest of the key that the client chose; empty: none."""
    body_digest: str = ""
    """Digest of the API and the body."""
    is_stream: bool = False

    def is_named(self, ids: Set[str]) -> bool:
        """Return True if an id of a message, as `call_ids` returns them, is that of this turn's answer."""
        return not ids.isdisjoint(call_ids(self.answer) | {self.id, self.request_id})

    @property
    def num_messages(self) -> int:
        """Number of messages that the turn adds to a history, with its answer."""
        return len(self.messages) + 1

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens after the parent's tokens."""
        return len(self.prompt_ids) // 4

    @property
    def num_sampled(self) -> int:
        """G, the number of sampled tokens."""
        return len(self.token_ids) // 4


def int32(data: bytes) -> Int32s:
    """Return the integers of a stored array."""
    return np.frombuffer(data, "<i4")


def float32(data: bytes) -> Float32s:
    """Return the numbers of a stored array."""
    return np.frombuffer(data, "<f4")


@dataclass(frozen=True, slots=True)
class Match:
    """The served turn that a history continues."""

    parent: Turn | None
    """None: the history continues no turn."""
    index: int
    """Number of messages of the history that the parent and its ancestors have."""
    fork: Fork | None
    other: "Match | None" = None
    """The turn that continues more of the history, but with other tools or variables."""


@dataclass(slots=True)
class SessionTree:
    """All turns of a session, in the order in which they were closed."""

    turns: dict[str, Turn] = field(default_factory=dict)
    _children: dict[str | None, list[Turn]] = field(default_factory=dict)
    num_tokens: int = 0
    """Number of stored tokens: those of a shared prefix count once."""
    cost: float = 0.0
    """Sum of the costs of all turns."""
    _keys: dict[str, list[MessageKey]] = field(default_factory=dict)
    """By turn: the keys of its messages, and of its answer."""

    def add(self, turn: Turn) -> None:
        """Add a turn, whose parent is in the tree."""
        if turn.parent is not None and turn.parent not in self.turns:
            raise KeyError(f"turn {turn.id} has the unknown parent {turn.parent}")
        self.turns[turn.id] = turn
        self._children.setdefault(turn.parent, []).append(turn)
        self._keys[turn.id] = [key_of(each) for each in (*turn.messages, turn.answer)]
        self.num_tokens += turn.num_prompt + turn.num_sampled
        self.cost += turn.cost

    def path(self, turn: Turn | None) -> list[Turn]:
        """Return the turns from the root to `turn`."""
        found = []
        while turn is not None:
            found.append(turn)
            turn = None if turn.parent is None else self.turns[turn.parent]
        return found[::-1]

    def token_ids(self, turn: Turn | None) -> Int32s:
        """Return all ids up to the end of a turn, i4[S]."""
        parts = [int32(part) for each in self.path(turn) for part in (each.prompt_ids, each.token_ids)]
        return np.concatenate(parts) if parts else np.empty(0, "<i4")

    def pieces(self, turn: Turn | None) -> list[list[int]]:
        """Return the ids of the prompt before each answer up to a turn, without those of earlier turns."""
        return [int32(each.prompt_ids).tolist() for each in self.path(turn)]

    def messages(self, turn: Turn | None) -> list[JsonObject]:
        """Return the messages up to a turn, with the answers as they were served."""
        return [message for each in self.path(turn) for message in (*each.messages, each.answer)]

    def setting(self, turn: Turn) -> JsonObject:
        """Return the setting of a turn; with an empty model if an earlier release stored none."""
        found = (each.setting for each in reversed(self.path(turn)) if each.setting is not None)
        return next(found, {"model": "", "tools": None, "variables": None})

    def leaves(self, *, interrupted: bool = False) -> list[Turn]:
        """Return the turns without a child. An interrupted turn is no leaf by default, but its parent may be one.

        Args:
            interrupted: True: interrupted turns are leaves too.
        """
        found = [turn for turn in self.turns.values() if turn.is_complete or interrupted]
        inner: set[str] = set()
        for turn in found:
            above = turn.parent
            while above is not None and above not in inner:
                inner.add(above)
                above = self.turns[above].parent
        return [turn for turn in found if turn.id not in inner]

    def find(self, history: History, setting: JsonObject) -> Match:
        """Return the deepest turn with a setting that a history continues.

        Of several, the turn whose ids come back; then the last one that was served completely.
        """
        frame = frame_of(setting)
        # Once for all branches, or a long message would hold the event loop for each of them.
        key, ids = cache(lambda at: key_of(history[at])), cache(lambda at: call_ids(history[at]))
        order = {each: place for place, each in enumerate(self.turns)}
        best: dict[bool, tuple[Any, ...]] = dict.fromkeys((True, False), (0, 0, False, -1, None))
        waiting: list[tuple[str | None, int, int]] = [(None, 0, 0)]
        is_split = False
        while waiting:
            parent, index, hits = waiting.pop()
            children = [
                child
                for child in self._children.get(parent, ())
                # The history must have a message after the answer, or it asks nothing new of this turn.
                if index + child.num_messages <= len(history)
                and self._first_difference(child, history, index, key) is None
            ]
            # Ids decide only between branches.
            is_split |= len(children) > 1
            for child in children:
                end, is_own = index + child.num_messages, child.frame == frame
                found = hits + (is_split and child.is_named(ids(end - 1)))
                waiting.append((child.id, end, found))
                best[is_own] = max(best[is_own], (end, found, child.is_complete, order[child.id], child))
        own, other = (Match(turn, end, self._fork(turn, history, end, key)) for end, *_, turn in best.values())
        if other.parent is None or best[False][:2] <= best[True][:2]:
            return own
        fork = Fork(message=own.index, field=changed_setting(self.setting(other.parent), setting))
        return Match(own.parent, own.index, fork, None if fork.field == "model" else other)

    def _first_difference(self, child: Turn, history: History, index: int, key: KeyAt) -> tuple[int, str] | None:
        """Return place and field of the first message in which a history from `index` on differs from a turn.

        The field is empty if the history ends there.
        """
        for place, served in enumerate(self._keys[child.id]):
            at = index + place
            if at >= len(history):
                return place, ""
            # Most messages are as they were, and need no key. Calls do: as values, 1 and 1.0 are equal.
            if served.role != "assistant" and history[at] == child.messages[place]:
                continue
            if (differing := key(at).difference(served)) is not None:
                return place, differing
        return None

    def _fork(self, parent: Turn | None, history: History, index: int, key: KeyAt) -> Fork | None:
        """Return where a history leaves all turns after `parent`; None: there is no turn after it."""
        found = [
            difference
            for child in self._children.get(None if parent is None else parent.id, ())
            if (difference := self._first_difference(child, history, index, key)) is not None
        ]
        if not found:
            return None
        place, differing = max(found)
        return Fork(message=index + place, field=differing or "sibling")

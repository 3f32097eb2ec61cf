"""The requests of `bench.placement`: what trainers send, as conversations, and what their prompts cost at least.

Each trace is made for a fleet of so many slots, from a seed. It is a closed loop: at most `max_in_flight` samples are
under way at once, and what begins together begins when there is room for all of it.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "GROUP",
    "LENGTH_SIGMA",
    "MAX_TIMES",
    "TRACES",
    "Conversation",
    "Shape",
    "Tokens",
    "Trace",
    "Turn",
    "block_keys",
    "least_computed",
    "make_trace",
]

Tokens = npt.NDArray[np.int32]
GROUP: Final = 8
"""Samples of one prompt, as in GRPO."""
TURNS: Final = 8
LENGTH_SIGMA: Final = 1.0
"""Of the logarithm of lengths with a heavy tail: the longest of a thousand is 13 times the mean."""
MAX_TIMES: Final = 16
"""The longest answer, in means: where trainers cut."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    new_tokens: Tokens
    """What its prompt adds to everything before."""
    max_tokens: int
    """Generated, exactly."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of which each begins with the prompt and the tokens of the one before."""

    name: str
    turns: tuple[Turn, ...]
    samples: int = 1
    """Of its only request, n; 1 with several turns."""
    group: str | None = None
    """`group_id` of its requests: others that share the prompt come as requests of their own."""
    room: int = 1
    """Samples that must fit for it to begin: a group begins as a whole, with its first one."""

    @property
    def is_session(self) -> bool:
        """True if later turns need what earlier ones have left in a worker's cache."""
        return len(self.turns) > 1

    @property
    def num_tokens(self) -> int:
        """Tokens that all its samples generate."""
        return self.samples * sum(turn.max_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trainer sends."""

    name: str
    conversations: tuple[Conversation, ...]
    max_in_flight: int
    """Samples at once."""
    num_slow: int = 0
    """Workers at half the speed."""
    has_faults: bool = False
    """A worker is killed at a third of the samples, and the fleet gets new weights at two thirds."""
    is_beside_flood: bool = False
    """Another client sends all groups at once meanwhile, again and again."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are generated in all."""
        return sum(one.num_tokens for one in self.conversations)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a trace is."""

    slots: int
    """Of the whole fleet: requests that its engines run at once."""
    rounds: int = 4
    """Samples for each slot."""
    busy: float = 1.0
    """Share of the slots that the trainer fills."""
    prompt_tokens: int = 2048
    """Of a group's prompt; the others are in proportion."""
    short: int = 16
    """Tokens of an answer where prefill dominates."""
    long: int = 128
    """Mean tokens of an answer where decoding does."""
    vocab_size: int = 500
    seed: int = 0

    @property
    def samples(self) -> int:
        """In the whole trace."""
        return self.slots * self.rounds

    @property
    def in_flight(self) -> int:
        """Samples at once."""
        return max(int(self.slots * self.busy), GROUP)


class _Maker:
    """Draws prompts and lengths.

    Args:
        name: of the trace; another one draws others.
    """

    def __init__(self, shape: Shape, name: str) -> None:
        self._shape = shape
        self._random = np.random.default_rng([shape.seed, *name.encode()])

    def prompt(self, tokens_of_2048: int) -> Tokens:
        """Return random tokens, so many where a group's prompt has 2,048."""
        size = max(tokens_of_2048 * self._shape.prompt_tokens // 2048, 1)
        return self._random.integers(10, self._shape.vocab_size, size, np.int32)

    def length(self, mean: int) -> int:
        """Return a length of a lognormal distribution."""
        drawn = self._random.lognormal(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
        return int(min(max(drawn, 1), mean * MAX_TIMES))

    def near(self, mean: int) -> int:
        """Return a length within a quarter of the mean."""
        return max(round(mean * self._random.uniform(0.75, 1.25)), 1)

    def chance(self, probability: float) -> bool:
        """Return True so often."""
        return bool(self._random.random() < probability)


def _groups(shape: Shape, make: _Maker) -> Trace:
    """Groups of one prompt, as one request with n = 8."""
    conversations = tuple(
        Conversation(f"g{i}", (Turn(make.prompt(2048), make.near(shape.short)),), samples=GROUP, room=GROUP)
        for i in range(max(shape.samples // GROUP, 1))
    )
    return Trace("groups", conversations, shape.in_flight)


def _group_ids(shape: Shape, make: _Maker) -> Trace:
    """Groups of one prompt, as eight requests of one `group_id`, with answers of different lengths."""
    conversations = []
    for i in range(max(shape.samples // GROUP, 1)):
        prompt = make.prompt(2048)
        for j in range(GROUP):
            turn = Turn(prompt, make.length(shape.short))
            room = 0 if j else GROUP
            conversations.append(Conversation(f"g{i}.{j}", (turn,), group=f"g{i}", room=room))
    return Trace("group ids", tuple(conversations), shape.in_flight)


def _flood(shape: Shape, make: _Maker) -> Trace:
    """All groups at once, four times as many as there are slots."""
    return replace(_group_ids(shape, make), name="all groups at once", max_in_flight=shape.samples)


def _agents(shape: Shape, make: _Maker) -> Trace:
    """Conversations of eight turns, each with what a tool has said since."""
    conversations = tuple(
        Conversation(
            f"a{i}",
            tuple(Turn(make.prompt(1024 if turn == 0 else 256), make.near(shape.short)) for turn in range(TURNS)),
        )
        for i in range(max(shape.samples // 2, 1))
    )
    return Trace("agents", conversations, shape.in_flight)


def _system(shape: Shape, make: _Maker) -> Trace:
    """A system prompt of 4,000 tokens before each of many short prompts."""
    system = make.prompt(4000)
    conversations = tuple(
        Conversation(f"s{i}", (Turn(np.concatenate([system, make.prompt(256)]), make.near(shape.short)),))
        for i in range(shape.samples)
    )
    return Trace("system prompt", conversations, shape.in_flight)


def _tails(shape: Shape, make: _Maker) -> Trace:
    """Short prompts that share nothing, and answers with a heavy tail."""
    conversations = tuple(
        Conversation(f"t{i}", (Turn(make.prompt(128), make.length(shape.long)),)) for i in range(shape.samples)
    )
    return Trace("heavy tails", conversations, shape.slots * 2)


def _nothing(shape: Shape, make: _Maker) -> Trace:
    """Prompts that share nothing."""
    conversations = tuple(
        Conversation(f"n{i}", (Turn(make.prompt(1024), make.near(shape.short * 2)),)) for i in range(shape.samples)
    )
    return Trace("no locality", conversations, shape.in_flight)


def _hot(shape: Shape, make: _Maker) -> Trace:
    """Four of five prompts begin with the same 4,000 tokens, and their answers are longer."""
    hot = make.prompt(4000)
    conversations = []
    for i in range(shape.samples):
        is_hot = make.chance(0.8)
        prompt = np.concatenate([hot, make.prompt(64)]) if is_hot else make.prompt(1024)
        turn = Turn(prompt, make.near(shape.long if is_hot else shape.short))
        conversations.append(Conversation(f"h{i}", (turn,)))
    return Trace("hot prefix", tuple(conversations), shape.in_flight)


def _mixed(shape: Shape, make: _Maker) -> Trace:
    """Groups, conversations and a hot prefix beside each other, and one slow worker."""
    part = replace(shape, rounds=max(shape.rounds // 3, 1))
    parts = [_groups(part, make), _group_ids(part, make), _agents(part, make), _hot(part, make)]
    conversations = [one for part in parts for one in part.conversations]
    # Neighbours stay together, as a group's requests do.
    order = sorted(range(len(conversations)), key=lambda i: zlib.crc32((conversations[i].group or f"{i}").encode()))
    return Trace("mixed", tuple(conversations[i] for i in order), shape.in_flight, num_slow=1)


def _race(shape: Shape, make: _Maker) -> Trace:
    """All that is mixed, twice as long, with faults."""
    return replace(_mixed(replace(shape, rounds=2 * shape.rounds), make), name="mixed, with faults", has_faults=True)


def _aside(shape: Shape, make: _Maker) -> Trace:
    """Short prompts that share nothing, four at a time, beside another client that floods the fleet."""
    conversations = tuple(
        Conversation(f"b{i}", (Turn(make.prompt(256), make.near(shape.short)),)) for i in range(shape.samples // 4)
    )
    return Trace("beside a flood", conversations, 4, is_beside_flood=True)


TRACES: Final[dict[str, Callable[[Shape, _Maker], Trace]]] = {
    "groups": _groups,
    "prefill": lambda shape, make: replace(_groups(replace(shape, short=4), make), name="groups, 4 tokens"),
    "group-ids": _group_ids,
    "flood": _flood,
    "agents": _agents,
    "system": _system,
    "tails": _tails,
    "nothing": _nothing,
    "slow": lambda shape, make: replace(_groups(shape, make), name="one slow worker", num_slow=1),
    "slow-nothing": lambda shape, make: replace(_nothing(shape, make), name="one slow, no locality", num_slow=1),
    "hot": _hot,
    "mixed": _mixed,
    "race": _race,
    "aside": _aside,
}
"""By the name on the command line."""


def make_trace(name: str, shape: Shape) -> Trace:
    """Return the trace of that name."""
    return TRACES[name](shape, _Maker(shape, name))


def block_keys(tokens: Tokens, block_tokens: int) -> list[int]:
    """Return one number for each whole block of `tokens` that the engine may find cached, of it and all before it.

    The last token is always computed, so a block that ends with it does not count.
    """
    keys, key = [], 0
    data = tokens.tobytes()
    for end in range(block_tokens, len(tokens), block_tokens):
        key = hash((key, data[4 * (end - block_tokens) : 4 * end]))
        keys.append(key)
    return keys


def least_computed(prompts: Iterable[tuple[Tokens, Sequence[Tokens]]], block_tokens: int) -> int:
    """Return how many prompt tokens one engine would compute that forgets nothing.

    Args:
        prompts: of each request the prompt, and of each of its samples what the engine caches when it has ended.
    """
    known: set[int] = set()
    computed = 0
    for prompt, sequences in prompts:
        for sequence in sequences:
            keys = block_keys(prompt, block_tokens)
            cached = next((i for i, key in enumerate(keys) if key not in known), len(keys))
            computed += len(prompt) - cached * block_tokens
            known.update(keys)
            known.update(block_keys(sequence, block_tokens))
    return computed

"""The requests of `bench.placement`: conversations as trainers send them, and the minimum cost of their prompts.

Each trace is for a fleet with a number of slots, and is drawn from a seed. It is a closed loop: at most `max_in_flight`
samples are in flight at once. A group starts when there is room for all of it.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
GROUP: Final = 8
"""Samples of one prompt, as in GRPO."""
TURNS: Final = 8
LENGTH_SIGMA: Final = 1.0
"""Standard deviation of the logarithm of lengths with a heavy tail. The longest of a thousand lengths is 13 times the
mean."""
MAX_TIMES: Final = 16
"""Maximum length of an answer as a multiple of the mean. Trainers cut longer answers."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    new_tokens: Tokens
    """Tokens that the prompt adds to all tokens before it."""
    max_tokens: int
    """Exact number of generated tokens."""
    pause_s: float = 0.0
    """Seconds for which a tool runs before the turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Successive requests, each of which begins with the prompt and the tokens of the previous request."""

    name: str
    turns: tuple[Turn, ...]
    samples: int = 1
    """Value n of its only request. 1 with several turns."""
    group: str | None = None
    """`group_id` of its requests, if the samples of a prompt are separate requests."""
    room: int = 1
    """Samples that must fit before the conversation starts. A group starts as a whole with its first request."""

    @property
    def is_session(self) -> bool:
        """True if later turns need the tokens that earlier turns have left in a worker's cache."""
        return len(self.turns) > 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all samples generate."""
        return self.samples * sum(turn.max_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trainer."""

    name: str
    conversations: tuple[Conversation, ...]
    max_in_flight: int
    """Maximum number of samples in flight."""
    num_slow: int = 0
    """Number of workers at half the speed."""
    has_faults: bool = False
    """True if a worker is killed at a third of the samples, and the weights are updated at two thirds."""
    is_beside_flood: bool = False
    """True if another client sends all groups at once during the trace, again and again."""

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(one.num_tokens for one in self.conversations)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a trace."""

    slots: int
    """Requests that the engines of the whole fleet run at once."""
    rounds: int = 4
    """Samples for each slot."""
    busy: float = 1.0
    """Share of the slots that the trainer fills."""
    prompt_tokens: int = 2048
    """Tokens of a group's prompt. Other prompts have proportional lengths."""
    short: int = 16
    """Tokens of an answer if prefill dominates."""
    long: int = 128
    """Mean tokens of an answer if decoding dominates."""
    vocab_size: int = 500
    seed: int = 0

    @property
    def samples(self) -> int:
        """Number of samples in the whole trace."""
        return self.slots * self.rounds

    @property
    def in_flight(self) -> int:
        """Maximum number of samples in flight."""
        return max(int(self.slots * self.busy), GROUP)


class _Maker:
    """Draws prompts and lengths.

    Args:
        name: name of the trace. Each name draws different values.
    """

    def __init__(self, shape: Shape, name: str) -> None:
        self._shape = shape
        self._random = np.random.default_rng([shape.seed, *name.encode()])

    def prompt(self, tokens_of_2048: int) -> Tokens:
        """Return random tokens. Their number is scaled from a group's prompt of 2,048 tokens to the shape's prompt."""
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
        """Return True with this probability."""
        return bool(self._random.random() < probability)


def _groups(shape: Shape, make: _Maker) -> Trace:
    """Groups with one prompt, as one request with n = 8."""
    conversations = tuple(
        Conversation(f"g{i}", (Turn(make.prompt(2048), make.near(shape.short)),), samples=GROUP, room=GROUP)
        for i in range(max(shape.samples // GROUP, 1))
    )
    return Trace("groups", conversations, shape.in_flight)


def _group_ids(shape: Shape, make: _Maker) -> Trace:
    """Groups with one prompt, as eight requests with one `group_id` and answers of different lengths."""
    conversations = []
    for i in range(max(shape.samples // GROUP, 1)):
        prompt = make.prompt(2048)
        for j in range(GROUP):
            turn = Turn(prompt, make.length(shape.short))
            room = 0 if j else GROUP
            conversations.append(Conversation(f"g{i}.{j}", (turn,), group=f"g{i}", room=room))
    return Trace("group ids", tuple(conversations), shape.in_flight)


def _flood(shape: Shape, make: _Maker) -> Trace:
    """All groups at once: four times as many samples as slots."""
    return replace(_group_ids(shape, make), name="all groups at once", max_in_flight=shape.samples)


def _agents(shape: Shape, make: _Maker) -> Trace:
    """Conversations of eight turns. Each turn adds the result of a tool."""
    conversations = tuple(
        Conversation(
            f"a{i}",
            tuple(Turn(make.prompt(1024 if turn == 0 else 256), make.near(shape.short)) for turn in range(TURNS)),
        )
        for i in range(max(shape.samples // 2, 1))
    )
    return Trace("agents", conversations, shape.in_flight)


def _sessions(shape: Shape, make: _Maker) -> Trace:
    """Coding agents with tools that run for 4 s in the mean, some for a minute, and a third short requests of others.

    Four are open for each slot: the fleet is full, and the caches of its workers just have their prompts.
    """
    conversations = []
    for i in range(2 * shape.samples):
        turns = [Turn(make.prompt(256), make.near(shape.short))]
        if i % 3:
            turns = [Turn(make.prompt(2048), make.near(shape.short * 4))]
            turns += [
                Turn(make.prompt(make.length(512)), make.near(shape.short * 4), make.length(4000) / 1000)
                for _ in range(2 * TURNS)
            ]
        conversations.append(Conversation(f"c{i}", tuple(turns)))
    return Trace("sessions with tools", tuple(conversations), 4 * shape.slots)


def _crowd(shape: Shape, make: _Maker) -> Trace:
    """The trace `sessions` with six for each slot: more prompts than the caches have."""
    return replace(_sessions(shape, make), name="too many sessions", max_in_flight=6 * shape.slots)


def _system(shape: Shape, make: _Maker) -> Trace:
    """A system prompt of 4,000 tokens before each of many short prompts."""
    system = make.prompt(4000)
    conversations = tuple(
        Conversation(f"s{i}", (Turn(np.concatenate([system, make.prompt(256)]), make.near(shape.short)),))
        for i in range(shape.samples)
    )
    return Trace("system prompt", conversations, shape.in_flight)


def _tails(shape: Shape, make: _Maker) -> Trace:
    """Short prompts without common tokens, and answers with a heavy tail."""
    conversations = tuple(
        Conversation(f"t{i}", (Turn(make.prompt(128), make.length(shape.long)),)) for i in range(shape.samples)
    )
    return Trace("heavy tails", conversations, shape.slots * 2)


def _nothing(shape: Shape, make: _Maker) -> Trace:
    """Prompts without common tokens."""
    conversations = tuple(
        Conversation(f"n{i}", (Turn(make.prompt(1024), make.near(shape.short * 2)),)) for i in range(shape.samples)
    )
    return Trace("no locality", conversations, shape.in_flight)


def _hot(shape: Shape, make: _Maker) -> Trace:
    """Four of five prompts begin with the same 4,000 tokens and have longer answers."""
    hot = make.prompt(4000)
    conversations = []
    for i in range(shape.samples):
        is_hot = make.chance(0.8)
        prompt = np.concatenate([hot, make.prompt(64)]) if is_hot else make.prompt(1024)
        turn = Turn(prompt, make.near(shape.long if is_hot else shape.short))
        conversations.append(Conversation(f"h{i}", (turn,)))
    return Trace("hot prefix", tuple(conversations), shape.in_flight)


def _mixed(shape: Shape, make: _Maker) -> Trace:
    """Groups, conversations and a hot prefix at the same time, and one slow worker."""
    part = replace(shape, rounds=max(shape.rounds // 3, 1))
    parts = [_groups(part, make), _group_ids(part, make), _agents(part, make), _hot(part, make)]
    conversations = [one for part in parts for one in part.conversations]
    # Keep the requests of a group together.
    order = sorted(range(len(conversations)), key=lambda i: zlib.crc32((conversations[i].group or f"{i}").encode()))
    return Trace("mixed", tuple(conversations[i] for i in order), shape.in_flight, num_slow=1)


def _race(shape: Shape, make: _Maker) -> Trace:
    """The trace `mixed` with twice the length, and with faults."""
    return replace(_mixed(replace(shape, rounds=2 * shape.rounds), make), name="mixed, with faults", has_faults=True)


def _aside(shape: Shape, make: _Maker) -> Trace:
    """Short prompts without common tokens, four at a time, while another client floods the fleet."""
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
    "sessions": _sessions,
    "crowd": _crowd,
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
"""Traces by their name on the command line."""


def make_trace(name: str, shape: Shape) -> Trace:
    """Return the trace of that name."""
    return TRACES[name](shape, _Maker(shape, name))


def block_keys(tokens: Tokens, block_tokens: int, known: Sequence[int] = ()) -> list[int]:
    """Return a number for each whole block of `tokens` that may be in a cache.

    The number stands for the block and all blocks before it. The last token is always computed, so a block that ends
    with it does not count.

    Args:
        known: the numbers of the first blocks.
    """
    keys, key = [*known], known[-1] if known else 0
    data = tokens.tobytes()
    for end in range((len(keys) + 1) * block_tokens, len(tokens), block_tokens):
        key = hash((key, data[4 * (end - block_tokens) : 4 * end]))
        keys.append(key)
    return keys


def least_computed(prompts: Iterable[tuple[Tokens, Sequence[Tokens]]], block_tokens: int) -> int:
    """Return the number of prompt tokens that a single engine with an unlimited cache would compute.

    Args:
        prompts: prompt of each request, and for each of its samples the tokens that the engine caches at its end.
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

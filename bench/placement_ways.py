"""The ways to choose a worker that `bench.placement` compares on real buses, each in a process of its own.

    python -m bench.placement_ways WAY URL SLOTS BLOCK_TOKENS CACHES_OUTPUTS

It is a way of `bench.ways`: each line `TRACE SHAPE`, with a `Shape` as JSON, has it play that trace, and the answer is
a `Played`. The numbers are those of one worker's engine. All ways send the same requests:

- `queue`: `placement=False`; workers pull, and nothing else happens;
- `sessions`: groups and conversations are sessions, and nothing is remembered of prompts;
- `least`: each request goes to the worker with the most free slots, or to the queue if none has one;
- `static`: the hash of the group or the conversation chooses the worker, and it waits for a slot there;
- `ours`: the policy, with `group_id` as trainers give it.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from unittest import mock

import numpy as np
import uvloop

import rollbus
from bench.on_the_bus import START_S
from bench.placement_choices import session_of
from bench.placement_traces import Conversation, Shape, Tokens, Trace, Turn, least_computed, make_trace
from bench.ways import answer
from rollbus.bus.protocol.placement.policy import (
    Placement,
    PlacementPolicy,
    PlacementReason,
    PlacementWanted,
)
from rollbus.bus.protocol.placement.prefix_index import PrefixIndex
from rollbus.bus.protocol.placement.worker_load import WorkerLoad
from rollbus.bus.protocol.queue.rendezvous import rendezvous

__all__ = ["WAYS", "Played", "Player", "patched"]

POLICY: Final = "rollbus.bus.client.placement.PlacementPolicy"
"""What the clients of other ways have another one of."""
QUEUED: Final = Placement(None, PlacementReason.QUEUED)


@dataclass(slots=True)
class Played:
    """What came of a trace."""

    seconds: float = 0.0
    tokens: int = 0
    computed: int = 0
    """Prompt tokens that engines computed."""
    ended_s: list[float] = field(default_factory=list)
    """Of each sample, since the beginning."""
    first_s: list[float] = field(default_factory=list)
    """Of each sample, from when it was asked for to its first token."""
    placed: int = 0
    refused: int = 0
    least: int = 0
    """Prompt tokens that one engine would compute which forgets nothing."""


class LeastLoaded(PlacementPolicy):
    """Each request goes to the worker with the most free slots, whatever that worker has cached."""

    def place(self, wanted: PlacementWanted, able: Sequence[WorkerLoad], now: float) -> Placement:
        """Decide where a request goes."""
        load = max(able, key=lambda load: load.room(now), default=None)
        if load is None or not load.room(now):
            return QUEUED
        return Placement(load.worker, PlacementReason.PLACED_ABLE)

    def place_group(
        self, wanted: PlacementWanted, count: int, able: Sequence[WorkerLoad], now: float
    ) -> list[Placement]:
        """Decide where samples go: evenly."""
        rooms = {load.worker: load.room(now) for load in able}
        placements = []
        for _ in range(count):
            worker = max(rooms, key=rooms.__getitem__, default=None)
            is_placed = worker is not None and rooms[worker] > 0
            placements.append(Placement(worker, PlacementReason.PLACED_ABLE) if is_placed else QUEUED)
            if worker is not None:
                rooms[worker] -= 1
        return placements


class Static(PlacementPolicy):
    """The hash of the session chooses the worker, and the client waits until that worker has room."""

    def place(self, wanted: PlacementWanted, able: Sequence[WorkerLoad], now: float) -> Placement:
        """Decide where a request goes."""
        if wanted.session_id is None or not able:
            return QUEUED
        worker = rendezvous(wanted.session_id, [load.worker for load in able])
        return Placement(worker, PlacementReason.PLACED_SESSION)

    def place_group(
        self, wanted: PlacementWanted, count: int, able: Sequence[WorkerLoad], now: float
    ) -> list[Placement]:
        """Decide where samples go: all to the same."""
        return [self.place(wanted, able, now)] * count


def patched(way: str) -> ExitStack:
    """Return a context in which clients choose as `way` says."""
    stack = ExitStack()
    if way in ("least", "static"):
        stack.enter_context(mock.patch(POLICY, LeastLoaded if way == "least" else Static))
    if way == "sessions":
        stack.enter_context(mock.patch.object(PrefixIndex, "longest", return_value={}))
    return stack


class Player:
    """Plays traces.

    Args:
        way: one of `WAYS`.
        slots: of one worker.
        block_tokens: that its engine caches together.
        caches_outputs: it caches generated tokens as well.
    """

    def __init__(self, rb: rollbus.Client, way: str, slots: int, block_tokens: int, *, caches_outputs: bool) -> None:
        self._rb = rb
        self._way = way
        self._block_tokens = block_tokens
        self._caches_outputs = caches_outputs
        self._lines: defaultdict[str, _Room] = defaultdict(lambda: _Room(slots))
        self._played = Played()
        self._prompts: list[tuple[Tokens, list[Tokens]]] = []
        self._began = 0.0

    async def play(self, trace: Trace) -> Played:
        """Send a trace, at most so many samples at once, and wait until all have ended."""
        self._played, self._began = Played(tokens=trace.num_tokens), time.monotonic()
        self._prompts.clear()
        before = self._rb.stats()
        room = _Room(trace.max_in_flight)
        async with asyncio.TaskGroup() as tasks:
            for conversation in trace.conversations:
                await room.acquire(conversation.samples, conversation.room)
                tasks.create_task(self._converse(conversation, room))
        self._played.seconds = time.monotonic() - self._began
        after = self._rb.stats()
        self._played.placed = sum(after.placed.values()) - sum(before.placed.values())
        self._played.placed -= after.placed[PlacementReason.QUEUED] - before.placed[PlacementReason.QUEUED]
        self._played.refused = after.placements_refused - before.placements_refused
        self._played.least = least_computed(self._prompts, self._block_tokens)
        return self._played

    async def _converse(self, conversation: Conversation, room: "_Room") -> None:
        before = np.empty(0, np.int32)
        for turn in conversation.turns:
            prompt = np.concatenate([before, turn.new_tokens])
            if self._way == "static":
                workers = [worker.worker for worker in self._rb.fleet.workers]
                line = self._lines[rendezvous(session_of(conversation), workers)]
                await line.acquire(conversation.samples, conversation.samples)
                before = await self._ask(conversation, turn, prompt)
                line.release(conversation.samples)
            else:
                before = await self._ask(conversation, turn, prompt)
        room.release(conversation.samples)

    async def _ask(self, conversation: Conversation, turn: Turn, prompt: Tokens) -> Tokens:
        """Send one request; returns prompt and tokens of its first sample."""
        asked, played = time.monotonic(), self._played
        tokens: list[list[int]] = [[] for _ in range(conversation.samples)]
        async for chunk in self._rb.generate(self._request(conversation, turn, prompt)):
            if not tokens[chunk.child] and chunk.num_tokens:
                played.first_s.append(time.monotonic() - asked)
            tokens[chunk.child] += chunk.token_ids.tolist()
            if chunk.end is not None:
                played.ended_s.append(time.monotonic() - self._began)
                played.computed += len(prompt) - (chunk.end.cached_tokens or 0)
        sequences: list[Tokens] = [np.concatenate([prompt, np.array(one, np.int32)]) for one in tokens]
        self._prompts.append((prompt, sequences if self._caches_outputs else [prompt] * len(sequences)))
        return sequences[0]

    def _request(self, conversation: Conversation, turn: Turn, prompt: Tokens) -> rollbus.GenerateRequest:
        is_shared = conversation.is_session or conversation.room != 1
        session = {
            "queue": None,
            "least": None,
            "sessions": session_of(conversation) if is_shared else None,
            "static": session_of(conversation),
            "ours": conversation.name if conversation.is_session else None,
        }[self._way]
        sampling = rollbus.SamplingParams(
            max_tokens=turn.max_tokens, temperature=1.0, ignore_eos=True, logprobs=0, n=conversation.samples
        )
        return rollbus.GenerateRequest(
            prompt_token_ids=prompt,
            sampling=sampling,
            return_routed_experts=False,
            session_id=session,
            group_id=conversation.group if self._way == "ours" else None,
        )


class _Room:
    """Room for the samples that may be under way: requests get it in the order in which they ask."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._has_more = asyncio.Event()
        self._turn = asyncio.Lock()

    async def acquire(self, count: int, room: int) -> None:
        """Wait until there is so much room, and take so much of it."""
        async with self._turn:
            while self._free < room:
                self._has_more.clear()
                await self._has_more.wait()
            self._free -= count

    def release(self, count: int) -> None:
        """Give it back."""
        self._free += count
        self._has_more.set()


WAYS: Final = ("queue", "sessions", "least", "static", "ours")


async def run(way: str, url: str, slots: int, block_tokens: int, *, caches_outputs: bool) -> None:
    """Be a way."""
    with patched(way):
        async with rollbus.connect(url, placement=way != "queue") as rb:
            await rb.fleet.wait_for_workers(timeout_s=START_S)
            player = Player(rb, way, slots, block_tokens, caches_outputs=caches_outputs)

            async def measure(question: list[str]) -> dict[str, Any]:
                trace, shape = question
                return asdict(await player.play(make_trace(trace, Shape(**json.loads(shape)))))

            await answer(measure)


if __name__ == "__main__":
    name, address, *numbers = sys.argv[1:]
    worker_slots, tokens, caches = map(int, numbers)
    uvloop.run(run(name, address, worker_slots, tokens, caches_outputs=bool(caches)))

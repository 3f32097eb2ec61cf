"""The ways to choose a worker that `bench.placement` compares on real buses, each in its own process.

    python -m bench.placement_ways WAY URL SLOTS BLOCK_TOKENS CACHES_OUTPUTS WEIGHTS

It is a way of `bench.processes`. Each line `TRACE SHAPE SECONDS`, with a `Shape` as JSON, plays that trace for at most
so many seconds. The answer is a `Played`. The numbers describe the engine of one worker. WEIGHTS is the folder with
which the fleet is updated in traces with faults. All ways send the same requests:

- `queue`: `placement=False`; workers pull requests, and the client places none;
- `static`: the hash of the group or the conversation chooses the worker, and the request waits for a slot there;
- `ours`: the policy of rollbus, with `group_id` as trainers set it.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final
from unittest import mock

import numpy as np

import rollbus
from bench.placement_choices import session_of
from bench.placement_traces import Conversation, Shape, Tokens, Trace, Turn, least_computed, make_trace
from bench.processes import START_S, answer
from rollbus.bus.protocol.queue.load import WorkerLoad
from rollbus.bus.protocol.queue.placement import Placement, PlacementNeeds, PlacementPolicy, PlacementReason, rendezvous

POLICY: Final = "rollbus.bus.protocol.queue.placement.PlacementPolicy"
"""The class that `static` replaces in its clients."""
QUEUED: Final = Placement(None, PlacementReason.QUEUED)
SETTLE_S: Final = 2.0
"""Seconds until a flood has filled its share of the queue."""
FLOOD_ROUNDS: Final = 4
"""Requests of a flood for each slot of the fleet."""
MAX_FLOODS: Final = 100
"""Maximum repetitions of a flood. They take longer than the trace beside the flood."""
SLOW: Final = "slow"
"""First part of the ids of slow workers. Slow workers are not killed."""


@dataclass(slots=True)
class Played:
    """The result of a trace."""

    seconds: float = 0.0
    tokens: int = 0
    """Number of generated tokens."""
    computed: int = 0
    """Prompt tokens that engines computed."""
    ended_s: list[float] = field(default_factory=list)
    """Seconds from the start to the end of each sample."""
    first_s: list[float] = field(default_factory=list)
    """Seconds from the request to the first token of each sample."""
    silent_s: float = 0.0
    """Longest time in which an open sample received no token."""
    lost: int = 0
    """Samples without all of their tokens."""
    placed: int = 0
    refused: int = 0
    least: int = 0
    """Prompt tokens that a single engine with an unlimited cache would compute."""


class Static(PlacementPolicy):
    """Chooses the worker by the hash of the session. The client waits until that worker has free slots."""

    def place(self, wanted: PlacementNeeds, able: Sequence[WorkerLoad], now: float) -> Placement:
        """Choose the worker of a request."""
        if wanted.session_id is None or not able:
            return QUEUED
        worker = rendezvous(wanted.session_id, [load.worker for load in able])
        return Placement(worker, PlacementReason.PLACED_SESSION)

    def place_group(
        self, wanted: PlacementNeeds, count: int, able: Sequence[WorkerLoad], now: float
    ) -> list[Placement]:
        """Choose the same worker for all samples."""
        return [self.place(wanted, able, now)] * count


class Player:
    """Plays traces.

    Args:
        way: name in `WAYS`.
        slots: slots of one worker.
        block_tokens: tokens of a block in its engine's cache.
        caches_outputs: True if the engine also caches generated tokens.
        weights: checkpoint for updates of the fleet.
    """

    def __init__(
        self, rb: rollbus.Client, way: str, slots: int, block_tokens: int, *, caches_outputs: bool, weights: str
    ) -> None:
        self._rb = rb
        self._way = way
        self._weights = weights
        self._block_tokens = block_tokens
        self._caches_outputs = caches_outputs
        self._lines: defaultdict[str, _Room] = defaultdict(lambda: _Room(slots))
        self._played = Played()
        self._prompts: list[tuple[Tokens, list[Tokens]]] = []
        self._began = 0.0
        # Actions by the number of ended samples at which they run.
        self._strikes: dict[int, Callable[[], Coroutine[None, None, None]]] = {}

    async def play(self, trace: Trace, most_s: float | None = None) -> Played:
        """Send a trace, with at most its `max_in_flight` samples at once, and wait until all samples have ended.

        Args:
            most_s: seconds after which the other requests are aborted or not sent; None: no limit.
        """
        self._played, self._began = Played(), time.monotonic()
        self._prompts.clear()
        if trace.has_faults:
            num_samples = sum(one.samples * len(one.turns) for one in trace.conversations)
            self._strikes = {num_samples // 3: self._kill, num_samples * 2 // 3: self._update}
        before = self._rb.stats()
        room = _Room(trace.max_in_flight)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s), asyncio.TaskGroup() as tasks:
                for conversation in trace.conversations:
                    await room.acquire(conversation.samples, conversation.room)
                    tasks.create_task(self._converse(conversation, room, tasks))
        self._played.seconds = time.monotonic() - self._began
        after = self._rb.stats()
        self._played.placed = sum(after.placed.values()) - sum(before.placed.values())
        self._played.placed -= after.placed[PlacementReason.QUEUED] - before.placed[PlacementReason.QUEUED]
        self._played.refused = after.placements_refused - before.placements_refused
        self._played.least = least_computed(self._prompts, self._block_tokens)
        return self._played

    async def play_beside(self, trace: Trace, most_s: float, rival: "Player", flood: Trace) -> Played:
        """Play a trace while another client floods the fleet continuously. The tokens of the flood count too."""
        endless = replace(flood, conversations=flood.conversations * MAX_FLOODS)
        async with asyncio.TaskGroup() as tasks:
            flooding = tasks.create_task(rival.play(endless))
            await asyncio.sleep(SETTLE_S)
            before = rival._played.tokens
            played = await self.play(trace, most_s)
            flooding.cancel()
        played.tokens += rival._played.tokens - before
        played.lost += rival._played.lost
        return played

    async def _kill(self) -> None:
        """Kill a worker. The process that started the worker starts another worker."""
        pids = {worker.worker: worker.pid for worker in self._rb.fleet.workers}
        os.kill(next(pid for name, pid in sorted(pids.items()) if pid and not name.startswith(SLOW)), signal.SIGKILL)

    async def _update(self) -> None:
        """Update the weights of the fleet while requests are in flight."""
        version = 1 + max(worker.weight_version for worker in self._rb.fleet.workers)
        # The worker that was killed loads the weights when it starts again.
        with contextlib.suppress(rollbus.CommandIncomplete):
            await self._rb.fleet.update_weights(self._weights, version=version, clear_cache=True)

    async def _converse(self, conversation: Conversation, room: "_Room", tasks: asyncio.TaskGroup) -> None:
        before = np.empty(0, np.int32)
        for turn in conversation.turns:
            await asyncio.sleep(turn.pause_s)
            prompt = np.concatenate([before, turn.new_tokens])
            if self._way == "static":
                workers = [worker.worker for worker in self._rb.fleet.workers]
                line = self._lines[rendezvous(session_of(conversation), workers)]
                await line.acquire(conversation.samples, conversation.samples)
                before = await self._ask(conversation, turn, prompt)
                line.release(conversation.samples)
            else:
                before = await self._ask(conversation, turn, prompt)
            for count in [count for count in self._strikes if count <= len(self._played.ended_s)]:
                tasks.create_task(self._strikes.pop(count)())
        room.release(conversation.samples)

    async def _ask(self, conversation: Conversation, turn: Turn, prompt: Tokens) -> Tokens:
        """Send one request. Return the prompt and the tokens of its first sample."""
        asked, played = time.monotonic(), self._played
        tokens: list[list[int]] = [[] for _ in range(conversation.samples)]
        heard = [asked] * conversation.samples
        with contextlib.suppress(rollbus.RequestError):
            async for chunk in self._rb.generate(self._request(conversation, turn, prompt)):
                now = time.monotonic()
                if not tokens[chunk.child] and chunk.num_tokens:
                    played.first_s.append(now - asked)
                played.silent_s, heard[chunk.child] = max(played.silent_s, now - heard[chunk.child]), now
                tokens[chunk.child] += chunk.token_ids.tolist()
                played.tokens += chunk.num_tokens
                if chunk.end is not None:
                    played.ended_s.append(now - self._began)
                    # A resumed request can find more tokens than its prompt in the cache.
                    played.computed += max(len(prompt) - (chunk.end.cached_tokens or 0), 0)
        played.lost += sum(len(one) != turn.max_tokens for one in tokens)
        sequences: list[Tokens] = [np.concatenate([prompt, np.array(one, np.int32)]) for one in tokens]
        self._prompts.append((prompt, sequences if self._caches_outputs else [prompt] * len(sequences)))
        return sequences[0]

    def _request(self, conversation: Conversation, turn: Turn, prompt: Tokens) -> rollbus.GenerateRequest:
        session = {
            "queue": None,
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
    """Limits the samples in flight. Requests get room in the order in which they ask for it."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._has_more = asyncio.Event()
        self._turn = asyncio.Lock()

    async def acquire(self, count: int, room: int) -> None:
        """Wait until `room` samples fit, and take the room of `count` samples."""
        async with self._turn:
            while self._free < room:
                self._has_more.clear()
                await self._has_more.wait()
            self._free -= count

    def release(self, count: int) -> None:
        """Release the room of `count` samples."""
        self._free += count
        self._has_more.set()


WAYS: Final = ("queue", "static", "ours")


async def run(way: str, url: str, slots: int, block_tokens: int, *, caches_outputs: bool, weights: str) -> None:
    """Run a way."""
    with mock.patch(POLICY, Static) if way == "static" else contextlib.nullcontext():
        async with (
            rollbus.connect(url, placement=way != "queue") as rb,
            rollbus.connect(url, placement=way != "queue") as other,
        ):
            await rb.fleet.wait_for_workers(timeout_s=START_S)
            await other.fleet.wait_for_workers()
            player, rival = (
                Player(one, way, slots, block_tokens, caches_outputs=caches_outputs, weights=weights)
                for one in (rb, other)
            )

            async def measure(question: list[str]) -> dict[str, Any]:
                name, shape, most_s = question[0], Shape(**json.loads(question[1])), float(question[2])
                trace = make_trace(name, shape)
                if trace.is_beside_flood:
                    flood = make_trace("flood", replace(shape, rounds=FLOOD_ROUNDS))
                    return asdict(await player.play_beside(trace, most_s, rival, flood))
                return asdict(await player.play(trace, most_s))

            await answer(measure)


async def play(name: str, address: str, *numbers_and_folder: str) -> None:
    """Play one way in this process."""
    *numbers, folder = numbers_and_folder
    worker_slots, tokens, caches = map(int, numbers)
    await run(name, address, worker_slots, tokens, caches_outputs=bool(caches), weights=folder)

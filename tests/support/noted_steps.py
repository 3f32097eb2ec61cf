"""What the engine of a worker process sampled, as the process itself noted it, also if it is killed afterwards."""

import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollbus.bus.protocol.stream.engine_step import split
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import Rows
from rollbus.workers.engines.vllm.engine import VllmEngine


class Noted(msgspec.Struct):
    """One attempt of a request on one engine. A file has a line for the request and one for each step."""

    key: str
    """Client, request id, attempt and more, joined by slashes."""
    worker: str
    prompt: list[int] = []
    """Only in the first line, as `rows_start`."""
    rows_start: int = 0
    token_ids: list[int] = []
    logprobs: list[float] = []
    rows: list[Any] = []

    @property
    def request_id(self) -> str:
        """Id of the request on the wire."""
        return self.key.rsplit("/", 4)[-4]

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 0 on."""
        return int(self.key.rsplit("/", 4)[-3])


def note_steps(folder: Path, worker: str, dies_after: int | None) -> None:
    """Note all requests and steps of the engine in this process.

    Args:
        dies_after: the process kills itself when it has noted so many tokens of the first attempt of a request, before
            it sends the last of them.
    """
    file = os.open(folder / worker, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    counts: dict[str, int] = {}
    add, steps = VllmEngine.add, VllmEngine.steps

    def write(noted: Noted) -> None:
        # The worker's own requests, before it serves, have other keys.
        if noted.key.count("/") >= 4:
            os.write(file, msgspec.json.encode(noted) + b"\n")

    async def add_noted(engine: VllmEngine, key: str, request: GenerateRequest, *more: Any) -> None:
        write(Noted(key, worker, np.asarray(request.prompt_token_ids).tolist(), request.routed_experts_prompt_start))
        await add(engine, key, request, *more)

    async def steps_noted(engine: VllmEngine) -> AsyncIterator[Sequence[Any]]:
        async for several in steps(engine):
            for step in split(several):
                logprobs = [] if step.logprobs is None else step.logprobs.tolist()
                rows = [] if step.routed_experts is None else step.routed_experts.tolist()
                noted = Noted(step.key, worker, token_ids=step.token_ids.tolist(), logprobs=logprobs, rows=rows)
                write(noted)
                counts[step.key] = counts.get(step.key, 0) + len(step.token_ids)
                if dies_after is not None and counts[step.key] >= dies_after and not noted.attempt:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield several

    VllmEngine.add, VllmEngine.steps = add_noted, steps_noted  # type: ignore[method-assign, assignment]


class Sampled(msgspec.Struct):
    """What engines sampled for one request, in all of its attempts."""

    token_ids: list[int]
    """Prompt and sampled tokens."""
    num_prompt: int
    logprobs: npt.NDArray[np.float32]
    """f4[sampled tokens]."""
    rows: Rows
    """Rows from `rows_start` to the token before the last one."""
    rows_start: int
    num_resumed: int
    """Number of tokens that a later attempt had from an earlier one."""


def read_notes(folder: Path) -> dict[str, list[Noted]]:
    """Return the attempts of each request id, in order."""
    found: dict[str, Noted] = {}
    for file in folder.iterdir():
        for line in file.read_bytes().splitlines():
            noted = msgspec.json.decode(line, type=Noted)
            known = found.setdefault(f"{noted.worker} {noted.key}", noted)
            if known is not noted:
                known.token_ids += noted.token_ids
                known.logprobs += noted.logprobs
                known.rows += noted.rows
    requests: dict[str, list[Noted]] = {}
    for noted in sorted(found.values(), key=lambda noted: noted.attempt):
        requests.setdefault(noted.request_id, []).append(noted)
    return requests


def sampled_of(attempts: Sequence[Noted]) -> Sampled:
    """Return what a client gets of these attempts. A later one begins with what the client had of the earlier ones."""
    first = attempts[0]
    size = len(first.prompt)
    ids, logprobs, rows = list(first.prompt), np.empty(0, np.float32), np.empty((0, 0, 0), np.uint8)
    resumed = 0
    for number, noted in enumerate(attempts):
        assert noted.attempt == number
        assert noted.prompt == ids[: len(noted.prompt)]
        kept = len(noted.prompt) - size
        resumed += kept
        ids = [*noted.prompt, *noted.token_ids]
        logprobs = np.concatenate([logprobs[:kept], np.array(noted.logprobs, np.float32)])
        new = np.array(noted.rows, np.uint8)
        rows = new if not number else np.concatenate([rows[: noted.rows_start - first.rows_start], new])
    return Sampled(ids, size, logprobs, rows, first.rows_start, resumed)

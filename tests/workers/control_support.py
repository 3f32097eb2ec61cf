"""A worker's weights and adapters around a synthetic engine, without a bus, and a client that reads its links."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.bus.queue.puller import QueuePuller
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.control import LoadLora, UpdateWeights
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.schemas.weights import Canary, WeightSource
from rollbus.workers.config import WorkerConfig
from rollbus.workers.control.loras import Loras
from rollbus.workers.control.staging import Stager
from rollbus.workers.control.transfer import Transfer
from rollbus.workers.control.weights import WeightManager
from rollbus.workers.engines.engine import EngineRunner
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.requests.in_flight import InFlightRequests
from rollbus.workers.requests.intake import RequestIntake
from rollbus.workers.requests.links import WorkerLinks
from rollbus.workers.requests.table import Instructions
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import write_adapter, write_checkpoint
from tests.workers.links_support import MAX_PAYLOAD, NOW, Ear

PROMPT = list(range(40))


class Token(NamedTuple):
    """A token that a client received."""

    token_id: int
    weight_version: int
    lora_version: int | None


class IntakeStub:
    """A stand-in for the intake of requests. No request arrives by itself."""

    is_open = True

    def pause(self) -> None:
        """Accept no more requests."""
        self.is_open = False

    def resume(self) -> None:
        """Accept requests again."""
        self.is_open = True

    def nak_incoming(self) -> None:
        """Do nothing, because no request waits here."""


class Rig:
    """The parts of a worker, and the tokens that a client has received."""

    def __init__(self, root: Path, engine: SyntheticEngine, *, prove_reload: bool) -> None:
        self.root = root
        self.own = root / "own"
        self.engine = engine
        worker = WorkerConfig(
            nats_url="",
            model="m",
            worker_id="w",
            weight_version=1,
            model_path=str(self.own),
            prove_reload=prove_reload,
        )
        self.runner = EngineRunner(self.engine, timeout_s=60.0)
        self.links = WorkerLinks(worker, "w1", max_payload=MAX_PAYLOAD)
        self.door = IntakeStub()
        self.flow = InFlightRequests(
            self.runner,
            self.links,
            cast(RequestIntake, self.door),
            cast(QueuePuller, self.door),
            execute=self._carry_out,
        )
        sources = WeightSources(roots=[root], own=self.own, cache=root / "cache", model="m", worker="w1", objects=None)
        self.loras = Loras(self.flow, sources)
        self.weights = WeightManager(worker, self.flow, sources, self.loras)
        self.transfer = Transfer(self.flow, self.weights)
        self.stager = Stager(sources, lambda: self.engine.capabilities)
        self.stages: list[str] = []
        self._ear = Ear(self.links)
        self._heard = asyncio.Event()
        self._tokens: dict[str, list[Token]] = {}
        self._ends: dict[str, Chunk] = {}

    def _carry_out(self, todo: Instructions) -> None:
        self.runner.abort(todo.abort)

    def on_steps(self, steps: Sequence[RequestStep | TokenBatch]) -> None:
        """Add the steps, as a worker does."""
        self.flow.add_steps(steps)
        self._heard.set()

    def report(self, stage: str) -> None:
        """Record the stage."""
        self.stages.append(stage)

    @property
    def standing(self) -> tuple[int, bool]:
        """The version of the weights, and whether they are invalid."""
        return self.weights.version, self.weights.is_poisoned

    async def start(
        self, request_id: str, num_tokens: int = 4, *, prompt: Sequence[int] = PROMPT, **fields: object
    ) -> None:
        """Start a client's greedy request."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling, request_id=request_id, **fields)  # type: ignore[arg-type]
        name = self.links.offer(self._ear.origin(request_id), request, self.engine.capabilities, NOW)
        await self.runner.add(name, request)

    async def begin(self, request_id: str, num_tokens: int, **fields: object) -> None:
        """Start a client's greedy request, and wait until the client has received five tokens."""
        await self.start(request_id, num_tokens, **fields)  # type: ignore[arg-type]
        await self.until_tokens(request_id, 5)

    def hear(self) -> None:
        """Let the client receive and acknowledge all available frames."""
        while frames := self._ear.hear():
            for chunk in (chunk for frame in frames for chunk in frame.chunks):
                self._tokens.setdefault(chunk.request_id, []).extend(
                    Token(int(token_id), chunk.weight_version, chunk.lora_version) for token_id in chunk.token_ids
                )
                if chunk.is_terminal:
                    self._ends[chunk.request_id] = chunk
            self.links.on_link_message("alice", self._ear.message(), NOW)

    def tokens(self, request_id: str) -> list[Token]:
        """Return the tokens of a request that the client has received so far."""
        self.hear()
        return self._tokens.get(request_id, [])[:]

    def end(self, request_id: str) -> Chunk | None:
        """Return the terminal chunk of a request, or None if the client has not received it."""
        self.hear()
        return self._ends.get(request_id)

    def stop(self) -> None:
        """Abort all requests."""
        self.flow.abort(self.links.requests.names)

    async def until_tokens(self, request_id: str, count: int) -> None:
        """Wait until the client has received `count` tokens."""
        self.hear()
        while len(self._tokens.get(request_id, ())) < count:
            self._heard.clear()
            await self._heard.wait()
            self.hear()

    async def until_end(self, request_id: str) -> list[Token]:
        """Wait until the client has received the end of a request, and return its tokens."""
        while self.end(request_id) is None:
            self._heard.clear()
            await self._heard.wait()
        return self.tokens(request_id)

    async def generate(self, request_id: str, **fields: object) -> list[int]:
        """Run a request to its end, and return its token ids."""
        await self.start(request_id, **fields)  # type: ignore[arg-type]
        return [token.token_id for token in await self.until_end(request_id)]

    def adapter(self, name: str, fill: int = 1) -> Path:
        """Write an adapter for this worker's checkpoint, and return its folder."""
        folder = write_adapter(self.root / name)
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + bytes([fill]))
        return folder

    def checkpoint(self, name: str, fill: int) -> Path:
        """Write a checkpoint for this worker, and return its folder."""
        return write_checkpoint(self.root / name, fill=fill)


@contextlib.asynccontextmanager
async def rig(
    root: Path,
    config: SyntheticConfig | None = None,
    *,
    fill: int = 1,
    prove_reload: bool = True,
    engine: type[SyntheticEngine] = SyntheticEngine,
) -> AsyncIterator[Rig]:
    """Start the engine on the checkpoint `fill` as version 1, verify its reload if asked to, and accept requests."""
    made = Rig(root, engine(config, write_checkpoint(root / "own", fill=fill)), prove_reload=prove_reload)
    async with asyncio.TaskGroup() as tasks:
        await made.runner.start()
        running = [
            tasks.create_task(made.runner.run(made.on_steps), name="engine"),
            tasks.create_task(made.runner.run_aborts(), name="aborts"),
            tasks.create_task(made.stager.run(), name="stage"),
        ]
        try:
            await made.weights.verify_reload()
            await made.flow.resume()
            yield made
        finally:
            for task in running:
                task.cancel()
            await made.engine.close()


def source(path: Path) -> WeightSource:
    """Return a folder as source."""
    return WeightSource(path=str(path))


def update(path: Path, version: int, *, expected_canary: Canary | None = None, **fields: object) -> UpdateWeights:
    """Return a command that loads a folder."""
    return UpdateWeights(source=source(path), version=version, expected_canary=expected_canary, **fields)  # type: ignore[arg-type]


def load_lora(name: str, path: Path, version: int, **fields: object) -> LoadLora:
    """Return a command that loads an adapter."""
    return LoadLora(name=name, source=source(path), version=version, **fields)  # type: ignore[arg-type]

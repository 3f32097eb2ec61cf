"""Measures what a trainer gains from rollbus: one HTTP client, with two servers of vLLM and with two workers.

    python -m bench.rollouts [--load 512x64] [--in-flight 64] [--rounds 3] [--json FILE]

Both ways have two real engines of the same build with the same tiny MoE. The client is the same, and does what trainers
do: it reads whole answers of `/inference/v1/generate` with logprobs and routed experts, sends each request to the
address with the fewest of its requests, and sends it again, elsewhere, if the connection is lost. vLLM has two
addresses, rollbus one. A round starts the engines of one way, runs the load five times, the first without measuring,
and stops them; the ways take turns.

1. Undisturbed: `tokens_per_s`, the mean of a run before and one after the update, `cpu_ms` of all processes but the
   client, `rows_share` of the rows that the row rule requires. `kl` and `kl_replay` are the mean k3 estimate of the KL
   divergence between sampler and trainer, in 1e-6 nats a token. The trainer is a forward pass of transformers in
   bfloat16 over `KL_SAMPLES` answers with all rows, without and with replay of the routed experts.
2. New weights in the middle, from a directory: pause with `keep`, load, resume. The call for vLLM is
   `/collective_rpc` with `reload_weights`, for rollbus prime-rl's `/update_weights`. `update_s` is the time that the
   trainer waits for it, `update_lost_s` how much longer the load takes than undisturbed.
3. One of two engines is killed in the middle, with all its processes: `killed_times` is the time of the load relative
   to the undisturbed one, `sent_again` the number of requests whose tokens were lost, so that the client sent them
   again.
"""

import asyncio
import base64
import io
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson
import psutil
import torch
from transformers import AutoModelForCausalLM

from bench.http_memory import running_service
from bench.processes import START_S, worker_process
from bench.real_engine import ENGINE_ARGS
from bench.report import TINY_MOE, Load, Report, cpu_s, parse_loads, program, take_turns
from bench.ways import PATH, PROMPT_TOKENS, Prompts, make_prompts, vllm_server
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import spreads
from rollbus.schemas.options import arg
from rollbus.trainer import replay
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

KL_SAMPLES: Final = 64
RETRY_S: Final = 0.1
LOST: Final = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of an engine, as a trainer keeps it."""

    token_ids: list[int]
    logprobs: list[float]
    rows: npt.NDArray[np.integer[Any]] | None
    """Routed experts of the positions from 0, without those of the last token."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two engines that serve, and how new weights reach them."""

    urls: Sequence[str]
    roots: Sequence[int]
    """Process ids of all processes that were started, without those that they started."""
    engines: Sequence[int]
    """Process ids of the two servers or workers."""
    update: tuple[str, Callable[[Path], dict[str, Any]]]
    """Path and body of the request that loads new weights, sent to each address."""


@asynccontextmanager
async def two_servers(model: Path) -> AsyncIterator[Fleet]:
    """Run two servers of vLLM."""
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    mine = psutil.Process()
    async with AsyncExitStack() as stack:
        urls, pids = [], list[int]()
        for _ in range(2):
            before = {one.pid for one in mine.children()}
            urls.append(
                await stack.enter_async_context(vllm_server(str(model), {**ENGINE_ARGS, "tokens_only": True}, env))
            )
            pids += [one.pid for one in mine.children() if one.pid not in before]
        yield Fleet(
            urls,
            pids,
            pids,
            ("/collective_rpc", lambda path: {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}),
        )


@asynccontextmanager
async def two_workers(model: Path) -> AsyncIterator[Fleet]:
    """Run rollbus's HTTP service with two workers."""
    options = (
        "--model",
        str(model),
        "--engine-args",
        orjson.dumps(ENGINE_ARGS).decode(),
        "--weight-root",
        str(model.parent),
    )
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        _, url = await stack.enter_async_context(running_service(server.url, "--routed-experts-npy"))
        engines = []
        for number in range(2):
            name = ("--worker-id", f"worker-{number}")
            engines.append((await stack.enter_async_context(worker_process(server.url, *options, *name, env=env))).pid)
            await until_serving(url, number + 1)
        others = [one.pid for one in psutil.Process().children() if one.pid not in engines]
        yield Fleet([url], [*engines, *others], engines, ("/update_weights", lambda path: {"weight_dir": str(path)}))


WAYS: Final[dict[str, Callable[[Path], AbstractAsyncContextManager[Fleet]]]] = {
    "vllm": two_servers,
    "rollbus": two_workers,
}


async def until_serving(url: str, count: int) -> None:
    """Wait until this number of workers serve.

    Raises:
        TimeoutError: they do not within `START_S`.
    """
    async with asyncio.timeout(START_S), aiohttp.ClientSession(url) as session:
        serving = 0
        while serving < count:
            await asyncio.sleep(0.2)
            async with session.get("/v1/rl/state") as answer:
                workers = (await answer.json()).get("workers", []) if answer.ok else []
                serving = sum(one["state"] == "serving" for one in workers)


Disturb = Callable[[], Coroutine[Any, Any, float]]
"""Does something to a fleet that answers a load. Returns the seconds that this took."""


class Trainer:
    """The client of a trainer. It balances its requests, and sends those of a lost connection again."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet, self._session = fleet, session
        self._open = dict.fromkeys(fleet.urls, 0)
        self.sent_again = 0

    async def generate(self, prompts: Prompts, max_tokens: int, in_flight: int) -> list[Answer]:
        """Return the answers to all prompts, in their order."""
        answers: list[Answer | None] = [None] * len(prompts)
        waiting = iter(enumerate(prompts))

        async def work() -> None:
            for number, prompt in waiting:
                answers[number] = await self._complete(prompt, max_tokens)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(work())
        return [answer for answer in answers if answer is not None]

    async def _complete(self, prompt: list[int], max_tokens: int) -> Answer:
        sampling = {"max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
        body = orjson.dumps({"token_ids": prompt, "sampling_params": sampling})
        while True:
            url = min(self._open, key=lambda one: self._open[one])
            self._open[url] += 1
            try:
                answer = await self._post(url + PATH, body)
            except LOST:
                # Trainers leave out a server whose connections are lost.
                if len(self._open) > 1:
                    self._open.pop(url, None)
                self.sent_again += 1
                await asyncio.sleep(RETRY_S)
            else:
                if url in self._open:
                    self._open[url] -= 1
                return read(answer)

    async def update(self, path: Path) -> float:
        """Replace the weights at all addresses. Return the seconds that this took."""
        started = time.perf_counter()
        where, body = self._fleet.update
        for step, data in (("/pause?mode=keep", None), (where, orjson.dumps(body(path))), ("/resume", None)):
            async with asyncio.TaskGroup() as tasks:
                for url in self._fleet.urls:
                    tasks.create_task(self._post(url + step, data))
        return time.perf_counter() - started

    async def _post(self, url: str, body: bytes | None) -> bytes:
        async with self._session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            data = await response.read()
            if not response.ok:
                raise RuntimeError(f"{url}: {response.status} {data[:500]!r}")
            return data


def read(data: bytes) -> Answer:
    """Return the tokens, logprobs and rows of an answer of `PATH`."""
    choice = orjson.loads(data)["choices"][0]
    routing = choice["routed_experts"]
    rows = None if routing is None else np.load(io.BytesIO(base64.b64decode(routing)))
    return Answer(choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]], rows)


@dataclass(frozen=True, slots=True)
class Done:
    """A load that was answered."""

    seconds: float
    disturbed_s: float
    """Seconds that the disturbance took."""
    token_ids: list[list[int]]
    """Prompt and sampled tokens of each request."""
    answers: list[Answer]


async def answer_load(trainer: Trainer, prompts: Prompts, max_tokens: int, in_flight: int, disturb: Disturb) -> Done:
    """Let the fleet answer all prompts, and disturb it meanwhile."""
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        disturbing = tasks.create_task(disturb())
        answers = await trainer.generate(prompts, max_tokens, in_flight)
        seconds = time.perf_counter() - started
    if any(len(answer.token_ids) != max_tokens for answer in answers):
        raise RuntimeError(f"an answer has another number of tokens than {max_tokens}")
    token_ids = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    return Done(seconds, disturbing.result(), token_ids, answers)


async def measure(way: str, load: Load, in_flight: int, checkpoints: Sequence[Path]) -> dict[str, float]:
    """Measure one round of one way, with engines of its own."""
    num_requests, max_tokens = load
    num_rows = PROMPT_TOKENS + max_tokens - 1
    whole_s = 0.0
    async with (
        WAYS[way](checkpoints[0]) as fleet,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)) as session,
    ):
        trainer, serials = Trainer(fleet, session), itertools.count()

        async def disturb_not() -> float:
            return 0.0

        async def update() -> float:
            await asyncio.sleep(whole_s / 2)
            return await trainer.update(checkpoints[1])

        async def kill() -> float:
            await asyncio.sleep(whole_s / 2)
            engine = psutil.Process(fleet.engines[0])
            for process in (*engine.children(recursive=True), engine):
                process.kill()
            return 0.0

        async def run(disturb: Disturb) -> Done:
            return await answer_load(trainer, make_prompts(num_requests, next(serials)), max_tokens, in_flight, disturb)

        await run(disturb_not)
        before = spent_s(fleet.roots)
        whole = await run(disturb_not)
        spent, whole_s = spent_s(fleet.roots) - before, whole.seconds
        updated = await run(update)
        whole_s = (whole_s + (await run(disturb_not)).seconds) / 2
        trainer.sent_again = 0
        killed = await run(kill)
    rows = [0 if answer.rows is None else len(answer.rows) for answer in whole.answers]
    complete = [
        pair
        for pair, count in zip(zip(whole.token_ids, whole.answers, strict=True), rows, strict=True)
        if count == num_rows
    ]
    kl, kl_replay = divergence(checkpoints[0], complete[:KL_SAMPLES])
    return {
        "tokens_per_s": num_requests * max_tokens / whole_s,
        "cpu_ms": 1e6 * spent / (num_requests * max_tokens),
        "rows_share": sum(rows) / (num_requests * num_rows),
        "kl": kl,
        "kl_replay": kl_replay,
        "update_s": updated.disturbed_s,
        "update_lost_s": updated.seconds - whole_s,
        "killed_times": killed.seconds / whole_s,
        "sent_again": float(trainer.sent_again),
    }


def spent_s(roots: Sequence[int]) -> float:
    """Return the CPU seconds of these processes and of all that they started."""
    every = [
        one.pid for root in roots for one in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    ]
    return sum(map(cpu_s, every))


@torch.inference_mode()
def divergence(model: Path, samples: Sequence[tuple[list[int], Answer]]) -> tuple[float, float]:
    """Return the mean k3 estimate in 1e-6 nats between sampler and a forward pass, without and with replay."""
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for token_ids, answer in samples:
        ids, sampled = torch.tensor([token_ids[:-1]]), torch.tensor(answer.token_ids)
        rows = None if answer.rows is None else torch.from_numpy(answer.rows.astype(np.int16))[None]
        plain = trained(ids).logits
        with replay(trained, rows):
            replayed = trained(ids).logits
        for logits, each in zip((plain, replayed), found, strict=True):
            own = torch.log_softmax(logits[0, -len(sampled) :].double(), -1).gather(1, sampled[:, None])[:, 0]
            ratio = own - torch.tensor(answer.logprobs, dtype=torch.float64)
            each.append(torch.expm1(ratio) - ratio)
    plain_kl, replayed_kl = (float(torch.cat(each).mean()) * 1e6 for each in found)
    return plain_kl, replayed_kl


async def run(report: Report, load: Load, in_flight: int, rounds: int) -> None:
    """Measure both ways."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    first = make_tiny_moe(TINY_MOE)
    with tempfile.TemporaryDirectory(dir=first.parent) as folder:
        checkpoints = (first, make_tiny_moe(Path(folder) / "next", seed=1))
        found = await take_turns(rounds, WAYS, lambda way: measure(way, load, in_flight, checkpoints))
    for way, figures in found.items():
        report.add(way=way, load=f"{load[0]}x{load[1]}", **spreads(figures))


if __name__ == "__main__":
    program(
        "rollouts",
        "Measure what a trainer's client gets from two servers of vLLM and from two workers of rollbus.",
        lambda args, report: asyncio.run(run(report, parse_loads([args.load])[0], args.in_flight, args.rounds)),
        arg("--load", None, "", default="512x64"),
        arg("--in-flight", None, "", type=int, default=64),
        rounds=3,
    )

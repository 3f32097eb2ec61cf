"""The stage `speed`: tokens per second of the fleet, of its engine alone in a process, and of vLLM's own server.

The three run one after the other on the same device, with the same engine arguments and the same requests: greedy, of
equal length, with a log probability for each token. The fleet's client reads whole results, as the server's does.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.client import HTTPException
from typing import Final

from msgspec.structs import replace

from ....bus import GenerateRequest, SamplingParams
from ....schemas.errors import EngineDead, RollbusError
from ..options import python_env, python_module
from .probe import complete_all
from .stage import ENGINE_ARGS, Proof, Stage, StageRefused
from .verdicts import Finding, Number, Outcome, Verdict

MAX_REQUESTS: Final = 64
MAX_TOKENS: Final = 128
PROMPT_TOKENS: Final = 16
SECONDS: Final = 10.0
"""Each way runs for this time or for its part of the minutes, and at least `MIN_ROUNDS` rounds after a first one."""
MIN_ROUNDS: Final = 3
LOWEST: Final = 0.9
"""Share of the engine's tokens per second that the fleet should reach. Fast small models pay more for each token."""
POLL_S: Final = 0.2
STOP_S: Final = 30.0
"""Seconds in which a process of vLLM may exit by itself before it and its own processes are killed."""
MODULE: Final = "rollbus.workers.engines.vllm.alone"
Prompts = list[list[int]]
Run = Callable[[Prompts, int], Awaitable[int]]
"""Generates so many tokens for each prompt and returns the number of all generated tokens."""


class Speed(Stage):
    """The stage."""

    name = "speed"
    bar = f"the fleet has at least {LOWEST:g} of the tokens/s of its engine alone, and of vLLM's own server"
    measure_share = 1.0
    conclude_share = 2.0

    def __init__(self) -> None:
        self._rates: dict[str, list[float]] = {}

    async def measure(self, proof: Proof) -> Outcome | None:
        """Measure the fleet."""

        async def ask_fleet(prompts: Prompts, max_tokens: int) -> int:
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
            requests = [GenerateRequest(prompt_token_ids=one, sampling=sampling, model=proof.model) for one in prompts]
            return sum(len(result.token_ids) for result in await complete_all(proof.rb, requests))

        await self._time(proof, "fleet", ask_fleet)
        return self._outcome("fleet")

    async def conclude(self, proof: Proof) -> Outcome | None:
        """Measure the engine alone, then vLLM's own server."""
        if not proof.is_own:
            raise StageRefused("engine and server: they need the fleet's devices, so they do not run with --nats")
        if not self._is_comparable(proof):
            raise StageRefused("engine and server: each is one engine of vLLM, so the fleet must be one worker")
        model = str(proof.folder)
        engine_args, failed = {**ENGINE_ARGS, **json.loads(proof.args.engine_args or "{}")}, []
        for name, start in (("engine", engine_alone), ("server", server_alone)):
            try:
                async with start(model, engine_args) as run:
                    await self._time(proof, name, run)
            except (RollbusError, OSError, HTTPException, ValueError, LookupError) as exc:
                # It is no fault of the fleet: a process of vLLM ended, or its release answers in another shape.
                failed.append(Finding(verdict=Verdict.NOT_RUN, what=f"{name}: {exc}"))
        outcome = self._outcome(*(name for name in ("engine", "server") if name in self._rates))
        return replace(outcome, findings=(*outcome.findings, *failed))

    def _is_comparable(self, proof: Proof) -> bool:
        return len(proof.fleet.workers) == 1 and proof.folder is not None and proof.fleet.engine.engine == "vllm"

    async def _time(self, proof: Proof, name: str, run: Run) -> None:
        engine = proof.fleet.engine
        num_requests, max_tokens = min(MAX_REQUESTS, engine.max_num_seqs), min(MAX_TOKENS, engine.max_model_len // 2)
        rates: list[float] = []
        end = time.perf_counter() + min(SECONDS, proof.seconds_left() / 3)
        while len(rates) <= MIN_ROUNDS or time.perf_counter() < end:
            # No round has a prompt of an earlier one, so none profits from a prefix in the cache.
            numbers = range(len(rates) * num_requests, (len(rates) + 1) * num_requests)
            prompts = [
                [(31 * number + 7 * i * i) % engine.vocab_size for i in range(PROMPT_TOKENS)] for number in numbers
            ]
            started = time.perf_counter()
            num_tokens = await run(prompts, max_tokens)
            rates.append(num_tokens / (time.perf_counter() - started))
        # The first round compiles and warms up.
        self._rates[name] = rates[1:]

    def _outcome(self, *names: str) -> Outcome:
        """Return the findings about these ways, each with the fleet's share of its tokens per second."""
        medians = {name: statistics.median(rates) for name, rates in self._rates.items()}
        findings = []
        for name in names:
            share = medians["fleet"] / medians[name]
            slowest, fastest = min(self._rates[name]), max(self._rates[name])
            text = f"{name}: {medians[name]:,.0f} tokens/s ({slowest:,.0f} to {fastest:,.0f})"
            text += "" if name == "fleet" else f"; the fleet has {share:.2f} of it"
            numbers = [Number(name=f"{name}, tokens/s", value=medians[name], unit="tokens/s")]
            numbers += [] if name == "fleet" else [Number(name=f"fleet / {name}", value=share)]
            verdict = Verdict.OK if share >= LOWEST else Verdict.LOOK
            findings.append(Finding(verdict=verdict, what=text, numbers=tuple(numbers)))
        rates = " / ".join(f"{rate:,.0f}" for rate in medians.values())
        return Outcome(findings=tuple(findings), headline=f"{rates} tokens/s", details={"tokens_per_s": self._rates})


@asynccontextmanager
async def engine_alone(model: str, engine_args: dict[str, object]) -> AsyncIterator[Run]:
    """Run the engine in a process without any transport but two pipes."""
    async with _process(model, engine_args, asyncio.subprocess.PIPE) as process:
        if process.stdin is None or process.stdout is None:
            raise StageRefused("the process of the engine has no pipes")
        sent, received = process.stdin, process.stdout

        async def ask() -> dict[str, int]:
            while not (line := await received.readline()).startswith(b"{"):
                # Skip lines that vLLM prints.
                if not line:
                    raise EngineDead(f"the engine alone exited with code {await process.wait()}")
            answer: dict[str, int] = json.loads(line)
            return answer

        async def run(prompts: Prompts, max_tokens: int) -> int:
            sent.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}).encode() + b"\n")
            return (await ask())["tokens"]

        await ask()
        yield run


@asynccontextmanager
async def server_alone(model: str, engine_args: dict[str, object]) -> AsyncIterator[Run]:
    """Run vLLM's own server, and ask it over HTTP as trainers do: whole answers, each request on its own connection."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"

    def post(prompt: list[int], max_tokens: int) -> int:
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        body = json.dumps({"token_ids": prompt, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return len(json.load(answer)["choices"][0]["token_ids"])

    def is_served() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
            return bool(answer.status == 200)
        return False

    with ThreadPoolExecutor(MAX_REQUESTS) as threads:
        async with _process(model, engine_args, asyncio.subprocess.DEVNULL, "--serve", str(port)) as process:

            async def run(prompts: Prompts, max_tokens: int) -> int:
                return await asyncio.to_thread(lambda: sum(threads.map(post, prompts, itertools.repeat(max_tokens))))

            while not await asyncio.to_thread(is_served):
                if process.returncode is not None:
                    raise EngineDead(f"vLLM's own server exited with code {process.returncode}")
                await asyncio.sleep(POLL_S)
            yield run


@asynccontextmanager
async def _process(
    model: str, engine_args: dict[str, object], pipe: int, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the module of vLLM alone. At the end, it and the processes that it started end."""
    command = [*python_module(MODULE), "--model", model, "--engine-args", json.dumps(engine_args), *options]
    # vLLM warns of much that a worker's log does not show either.
    env = {"VLLM_LOGGING_LEVEL": "ERROR", **python_env()}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=env, start_new_session=True, limit=2**20
    )
    # After an error, the process may still have requests, for whose end it would wait.
    stop_s = 0.0
    try:
        yield process
        stop_s = STOP_S
    finally:
        if process.stdin is not None:
            process.stdin.close()
        elif process.returncode is None:
            process.terminate()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), stop_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

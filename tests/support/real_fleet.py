"""vLLM worker processes that several test files share, and requests to them."""

import json
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.schemas.errors import NoWorkers
from tests.support.patience import ENGINE_STARTS_S, SOON_S, patient
from tests.support.processes import RUN

ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": 8192,
    "max_num_seqs": 64,
    # Enough for 131,072 tokens; an engine fills it with zeros when it starts.
    "kv_cache_memory_bytes": 1 << 28,
}
STOP_TIMEOUT_S = SOON_S
WEIGHT_VERSION = 5


class RealWorkers:
    """The vLLM workers of one fleet; tests may kill some of them and start others.

    Args:
        version: version of the weights in `model`.
        cache: folder for fetched objects; None selects the default of users.
        engine_args: engine arguments in addition to `ENGINE_ARGS`.

    Attributes:
        fleet: name of the fleet. `have` chooses a new name if a test has left workers that may not serve.
    """

    def __init__(
        self,
        nats_url: str,
        model: Path,
        *,
        version: int = WEIGHT_VERSION,
        cache: Path | None = None,
        engine_args: Mapping[str, object] | None = None,
    ) -> None:
        self.fleet = _new_name()
        self._nats_url = nats_url
        self._model = model
        self._version = version
        self._cache = () if cache is None else ("--cache-dir", str(cache))
        self._engine_args = {**ENGINE_ARGS, **(engine_args or {})}
        self._processes: dict[str, psutil.Popen] = {}
        self._served: set[str] = set()
        self._added: set[str] = set()

    @property
    def living(self) -> dict[str, psutil.Popen]:
        """The running workers, by worker id."""
        return {name: process for name, process in self._processes.items() if process.poll() is None}

    async def have(self, count: int) -> dict[str, psutil.Popen]:
        """Start or stop workers until exactly `count` serve. One start takes long; several starts run in parallel."""
        if not await self._serve_still():
            self._kill()
            self.fleet = _new_name()
        self._stop(*list(self.living)[count:])
        while len(self.living) < count:
            self._start()
        await self._wait(len(self.living), ENGINE_STARTS_S)
        self._served = {*self.living}
        return self.living

    def add(self) -> str:
        """Start a worker that need not come to serve, and return its id."""
        self._start()
        name = f"w{len(self._processes) - 1}"
        self._added.add(name)
        return name

    async def _serve_still(self) -> bool:
        """Return True if all workers that served before and still run serve soon.

        False means that a test has left a worker paused or without weights, or one that `add` started.
        """
        if self._added & self.living.keys():
            return False
        try:
            await self._wait(len(self._served & self.living.keys()), SOON_S)
        except NoWorkers:
            return False
        return True

    async def _wait(self, count: int, timeout_s: float) -> None:
        if count == 0:
            return
        async with rollbus.connect(self._nats_url, fleet=self.fleet) as rb:
            await rb.fleet.wait_for_workers(count, timeout_s=timeout_s)

    def stop(self) -> None:
        """Stop all workers with SIGTERM, as an operator would."""
        try:
            self._stop(*self.living)
        finally:
            self._kill()

    def _kill(self) -> None:
        for process in self.living.values():
            process.kill()
            process.wait()

    def _start(self) -> None:
        name = f"w{len(self._processes)}"
        arguments = ["--nats", self._nats_url, "--fleet", self.fleet, "--worker-id", name]
        # All checkpoints of weight updates lie in the parent folder of the first checkpoint.
        model = ["--model", str(self._model), "--weight-root", str(self._model.parent)]
        options = ["--weight-version", str(self._version), "--engine-args", json.dumps(self._engine_args)]
        # A killed worker is lost after its lease, so the lease is only as long as a worker may be without a core.
        options += ["--lease-s", f"{patient(5.0):g}", "--listen-s", "0", *self._cache]
        self._processes[name] = psutil.Popen([sys.executable, "-m", "rollbus.workers", *arguments, *model, *options])

    def _stop(self, *names: str) -> None:
        for name in names:
            self._processes[name].terminate()
        assert [self._processes[name].wait(STOP_TIMEOUT_S) for name in names] == [0] * len(names)


def _new_name() -> str:
    return f"real-{os.environ[RUN]}-{uuid.uuid4().hex[:8]}"


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Return random token ids outside the range of special tokens."""
    return np.random.default_rng(seed).integers(10, 500, length)


def greedy(length: int, max_tokens: int, seed: int = 0, **fields: object) -> GenerateRequest:
    """Return a greedy request that does not end early."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt(length, seed), sampling=sampling, **fields)  # type: ignore[arg-type]

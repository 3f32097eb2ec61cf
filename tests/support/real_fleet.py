"""vLLM worker processes behind the bus, which several files of tests share; and requests to them."""

import json
import sys
import uuid
from pathlib import Path

import numpy as np
import psutil

import bus
from bus import GenerateRequest, SamplingParams

__all__ = ["WEIGHT_VERSION", "RealWorkers", "greedy", "prompt"]

ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": 8192,
    "max_num_seqs": 64,
    # Room for 131,072 tokens; it is written with zeros when an engine starts.
    "kv_cache_memory_bytes": 1 << 28,
}
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
WEIGHT_VERSION = 5


class RealWorkers:
    """The vLLM workers of one fleet; some may be killed, and others started.

    Args:
        version: that the weights of `model` have.
    """

    def __init__(self, nats_url: str, model: Path, *, version: int = WEIGHT_VERSION) -> None:
        self.fleet = f"real-{uuid.uuid4().hex[:8]}"
        self._nats_url = nats_url
        self._model = model
        self._version = version
        self._processes: dict[str, psutil.Popen] = {}

    @property
    def living(self) -> dict[str, psutil.Popen]:
        """Those that run, by their ids."""
        return {name: process for name, process in self._processes.items() if process.poll() is None}

    async def have(self, count: int) -> dict[str, psutil.Popen]:
        """Start or stop workers until exactly so many serve; a start takes long, several hardly longer."""
        self._stop(*list(self.living)[count:])
        while len(self.living) < count:
            self._start()
        async with bus.connect(self._nats_url, fleet=self.fleet) as rb:
            await rb.fleet.wait_for_workers(count, timeout_s=START_TIMEOUT_S)
        return self.living

    def stop(self) -> None:
        """End all of them as an operator would."""
        try:
            self._stop(*self.living)
        finally:
            for process in self.living.values():
                process.kill()
                process.wait()

    def _start(self) -> None:
        name = f"w{len(self._processes)}"
        arguments = ["--nats", self._nats_url, "--fleet", self.fleet, "--worker-id", name]
        # All checkpoints that tests update to lie beside the first.
        model = ["--model", str(self._model), "--weight-root", str(self._model.parent)]
        options = ["--weight-version", str(self._version), "--engine-args", json.dumps(ENGINE_ARGS)]
        self._processes[name] = psutil.Popen([sys.executable, "-m", "workers", *arguments, *model, *options])

    def _stop(self, *names: str) -> None:
        for name in names:
            self._processes[name].terminate()
        assert [self._processes[name].wait(STOP_TIMEOUT_S) for name in names] == [0] * len(names)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Token ids without meaning, away from the special ones."""
    return np.random.default_rng(seed).integers(10, 500, length)


def greedy(length: int, max_tokens: int, seed: int = 0, **fields: object) -> GenerateRequest:
    """A greedy request that does not end early."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt(length, seed), sampling=sampling, **fields)  # type: ignore[arg-type]

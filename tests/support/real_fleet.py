"""vLLM worker processes that several test files share, and requests to them.

A worker and its engine core are forked from a process that has imported vLLM: two imports would take twelve seconds.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.schemas.errors import NoWorkers
from rollbus.workers.__main__ import main
from rollbus.workers.engines.vllm.launch import set_environment
from rollbus.workers.engines.vllm.processes import begin_preload
from tests.support.processes import RUN
from tests.support.waits import ENGINE_STARTS_S, SOON_S, patient

ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": 8192,
    "max_num_seqs": 64,
    # Enough for 131,072 tokens; an engine fills it with zeros when it starts.
    "kv_cache_memory_bytes": 1 << 28,
}
STOP_TIMEOUT_S = SOON_S
NOTES, DIES_AFTER = "ROLLBUS_TEST_NOTES", "ROLLBUS_TEST_DIES_AFTER"
"""Variables of a worker process: the arguments of `note_steps`."""
WEIGHT_VERSION = 5


class ForkedWorker(psutil.Process):  # type: ignore[misc]
    """A worker process that was forked from the fork server of this process, with the interface of `psutil.Popen`."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        # The fork server keeps the environment of this moment, also for engine cores.
        set_environment(os.fspath(Path.cwd()), None)
        begin_preload()
        context = multiprocessing.get_context("forkserver")
        given = (arguments, {**os.environ, **(environment or {})})
        self._process = context.Process(target=run_worker, args=given, name="worker")
        self._process.start()
        super().__init__(self._process.pid)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the process, and return its exit code."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process if it still runs. The fork server leaves no zombie, which could be killed again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            super().kill()


def run_worker(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a worker in this forked process."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if NOTES in os.environ:
        # This import loads the engine's module, as the worker does anyway.
        from tests.support.noted_steps import note_steps

        dies_after = os.environ.get(DIES_AFTER)
        worker = arguments[arguments.index("--worker-id") + 1]
        note_steps(Path(os.environ[NOTES]), worker, None if dies_after is None else int(dies_after))
    sys.exit(main(arguments))


class RealWorkers:
    """The vLLM workers of one fleet; tests may kill some of them and start others.

    Args:
        version: version of the weights in `model`.
        cache: folder for fetched objects; None selects the default of users.
        engine_args: engine arguments in addition to `ENGINE_ARGS`.
        forked: False starts the workers as users do, for tests of their processes.

    Attributes:
        notes: folder in which each forked worker notes what its engine samples, for `read_notes`; None: none.
        served_name: name of the model for clients; at first that of the folder.
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
        forked: bool = True,
    ) -> None:
        self.fleet = _new_name()
        self._forked = forked
        self.notes: Path | None = None
        self.served_name = model.name
        self._nats_url = nats_url
        self._model = model
        self._version = version
        self._cache = () if cache is None else ("--cache-dir", str(cache))
        self._engine_args = {**ENGINE_ARGS, **(engine_args or {})}
        self._processes: dict[str, psutil.Popen | ForkedWorker] = {}
        self._served: set[str] = set()
        self._added: set[str] = set()

    @property
    def living(self) -> dict[str, psutil.Popen | ForkedWorker]:
        """The running workers, by worker id."""
        return {name: process for name, process in self._processes.items() if process.poll() is None}

    async def have(self, count: int) -> dict[str, psutil.Popen | ForkedWorker]:
        """Start or stop workers until exactly `count` serve. One start takes long; several starts run in parallel."""
        if not await self._serve_still():
            self.kill()
            self.fleet = _new_name()
        self._stop(*list(self.living)[count:])
        while len(self.living) < count:
            self._start()
        await self._wait(len(self.living), ENGINE_STARTS_S)
        self._served = {*self.living}
        return self.living

    def add(self, *, dies_after: int | None = None) -> str:
        """Start a worker that need not come to serve, and return its id.

        Args:
            dies_after: see `note_steps`.
        """
        self._start({} if dies_after is None else {DIES_AFTER: str(dies_after)})
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
            self.kill()

    def kill(self) -> None:
        """Kill all workers that still run."""
        for process in self.living.values():
            process.kill()
            process.wait()

    def _start(self, environment: Mapping[str, str] | None = None) -> None:
        name = f"w{len(self._processes)}"
        arguments = ["--nats", self._nats_url, "--fleet", self.fleet, "--worker-id", name]
        # All checkpoints of weight updates lie in the parent folder of the first checkpoint.
        model = ["--model", str(self._model), "--weight-root", str(self._model.parent)]
        model += ["--served-model-name", self.served_name]
        options = ["--weight-version", str(self._version), "--engine-args", json.dumps(self._engine_args)]
        # A killed worker is lost after its lease, so the lease is only as long as a worker may be without a core.
        options += ["--lease-s", f"{patient(5.0):g}", "--listen-s", "0", *self._cache]
        arguments += [*model, *options]
        command = [sys.executable, "-m", "rollbus.workers", *arguments]
        if self._forked:
            notes = {} if self.notes is None else {NOTES: str(self.notes)}
            self._processes[name] = ForkedWorker(*arguments, environment={**notes, **(environment or {})})
        else:
            self._processes[name] = psutil.Popen(command)

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

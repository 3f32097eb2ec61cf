"""The Ray actor that verl takes for an inference server: it sends requests to the fleet and loads new weights."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

from ...bus.client.client import Client, connect
from ...bus.client.generation import Generation
from ...bus.protocol.fleet.command_result import CommandIncomplete
from ...schemas.chunk import FinishReason
from ...schemas.errors import InvalidRequest, RollbusError
from ...schemas.presence import WorkerPresence, WorkerState
from ...schemas.request import GenerateRequest
from ..publisher import MAX_TRIES, behind
from ..rows import check_row_dtype
from .options import Options
from .outputs import RolloutFailed, Steps, output_fields, sampling_of, session_of

log = logging.getLogger(__name__)

MAX_STOPS: Final = 100
"""Times that an operator may stop a request, which then continues. It then fails."""
ABORT_WAIT_S: Final = 60.0
"""Seconds in which aborted requests end. They end in this process, without the workers."""
MAX_UPDATES: Final = 16
"""Updates whose end is remembered, so that repeated calls have no effect. verl makes one at a time."""
LOOK_S: Final = 0.05
"""Seconds between two looks at the fleet or at open requests."""


class Commit(NamedTuple):
    """A stored version of the weights."""

    version: int
    objects: str
    step: int | None


class RollbusServer:
    """One connection to the fleet. verl's load balancer spreads requests over one or several of these actors.

    A method raises only `RolloutFailed`, or an exception of Python.
    """

    def __init__(self, options: dict[str, Any], limits: dict[str, Any]) -> None:
        self._options = Options(**options)
        self._limits = limits
        self._stack = AsyncExitStack()
        self._client: Client | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_rejecting = False
        self._open: set[str] = set()
        self._steps = Steps()
        self._ends: dict[str, asyncio.Future[Commit | RolloutFailed]] = {}
        self._max_model_len = 0
        self._largest_id: int | None = None

    @property
    def latest_step(self) -> int | None:
        """The step of the last update that the trainer announced."""
        return self._steps.latest

    async def start(self) -> None:
        """Connect, wait for the first worker, and reject a configuration that this model cannot serve."""
        async with _as_failure(), asyncio.timeout(self._options.start_timeout_s):
            options = {name: getattr(self._options, name) for name in ("fleet", "credentials")}
            settings = {name: value for name, value in options.items() if value is not None}
            client = await self._stack.enter_async_context(connect(self._options.url, **settings))
            await client.fleet.wait_for_workers(1, model=self._options.model, timeout_s=self._options.start_timeout_s)
            self._client = client
            known = [worker.capabilities for worker in self._workers() if worker.capabilities is not None]
            lengths = [found.max_model_len for found in known] + [self._limits["max_model_len"]]
            self._max_model_len = min(length for length in lengths if length)
            if self._limits["rows"]:
                shapes = [found.routed_experts for found in known if found.routed_experts is not None]
                if not shapes:
                    reason = next((found.routing_refusal for found in known if found.routing_refusal), "no experts")
                    raise InvalidRequest(
                        "rollout.enable_rollout_routing_replay",
                        f"is set, but the workers of {self._options.model} return no routed experts: {reason}",
                        "False, or a model with experts",
                    )
                self._largest_id = max(shape.num_experts for shape in shapes) - 1
                check_row_dtype(self._options.rows, self._largest_id)

    async def generate(  # noqa: PLR0913, PLR0917 - the signature is verl's
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """Return verl's `TokenOutput` of one call. While verl updates the weights, calls wait here."""
        from verl.workers.rollout.replica import TokenOutput

        async with _as_failure():
            media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
            for name, value in media.items():
                if value is not None and len(value):
                    raise InvalidRequest(name, "is set", "none: rollbus generates from token ids")
            ids = [int(token) for token in prompt_ids]
            sampling = sampling_of(
                sampling_params,
                default_tokens=min(
                    self._limits["response"], self._limits["prompt"] + self._limits["response"] - len(ids)
                ),
                room=self._max_model_len - len(ids),
                ignore_eos=self._limits["ignore_eos"],
            )
            request = GenerateRequest(
                prompt_token_ids=ids,
                sampling=sampling,
                model=self._options.model,
                return_routed_experts=None if self._limits["rows"] else False,
                priority=priority,
                session_id=session_of(request_id),
                timeout_s=self._options.timeout_s,
            )
            if not self._gate.is_set():
                if self._is_rejecting:
                    return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=self._extra())
                async with asyncio.timeout(self._options.update_timeout_s):
                    await self._gate.wait()
            generation = await self._complete(request)
            rows_dtype = self._options.rows if self._limits["rows"] else None
            found = output_fields(generation, self._steps, rows_dtype=rows_dtype, largest_id=self._largest_id)
            return TokenOutput(**found)

    async def _complete(self, request: GenerateRequest) -> Generation:
        """Return the result of a request. If an operator stops it, it continues; if verl does, it ends."""
        whole: Generation | None = None
        for _ in range(MAX_STOPS):
            self._open.add(request.request_id)
            try:
                part = await self._connected().complete(request)
            finally:
                self._open.discard(request.request_id)
            whole = part if whole is None else whole.joined(part)
            if part.finish_reason is not FinishReason.ABORT or not self._gate.is_set():
                return whole
            request = whole.request.continuing(whole, inexact="continue")
        raise RolloutFailed(f"the request was stopped {MAX_STOPS} times; look for a program that aborts requests")

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End the open requests with their tokens, and hold new ones until `resume_generation`."""
        if self._options.update == "keep" and not reject_request:
            return {"aborted_count": 0, "request_ids": []}
        self._is_rejecting = reject_request
        self._gate.clear()
        aborted: set[str] = set()
        try:
            async with _as_failure(), asyncio.timeout(ABORT_WAIT_S):
                # A request that was about to be sent is not known yet, so ask until none is open.
                while self._open:
                    aborted |= self._open
                    await self._connected().abort(list(self._open))
                    await asyncio.sleep(LOOK_S)
        except BaseException:
            self._gate.set()
            raise
        return {"aborted_count": len(aborted), "request_ids": sorted(aborted)}

    async def resume_generation(self) -> None:
        """Send held and new requests again."""
        self._is_rejecting = False
        self._gate.set()

    async def commit_update(self, update: str, version: int, objects: str, step: int | None) -> None:
        """Announce that the trainer has stored the weights of an update. A repeated call has no effect."""
        if self._settle(update, Commit(version, objects, step)):
            # Before the workers load it: with `update=keep`, their tokens arrive before the update ends.
            self._steps.add(version, step)

    async def fail_update(self, update: str, reason: str) -> None:
        """Announce that the trainer could not store the weights of an update. Generation resumes."""
        if self._settle(update, RolloutFailed(reason)):
            await self.resume_generation()

    async def apply_update(self, update: str, leads: bool) -> int:
        """Wait until the fleet has loaded the weights of an update, and return their version. Generation resumes.

        On failure, it resumes with the weights that the workers have.

        Args:
            update: id of the update.
            leads: True at one of several servers, which orders the update.
        """
        try:
            async with _as_failure(), asyncio.timeout(self._options.update_timeout_s):
                commit = await self._end_of(update)
                if isinstance(commit, RolloutFailed):
                    raise commit
                if leads:
                    await self._load(commit)
                while len(self._with(commit.version)) < (self._options.min or 1):  # noqa: ASYNC110 - a bounded look
                    await asyncio.sleep(LOOK_S)
                return commit.version
        finally:
            await self.resume_generation()

    async def _load(self, commit: Commit) -> None:
        """Make the workers load a stored version. Workers that die meanwhile are left out."""
        fleet = self._connected().fleet
        for tries_left in reversed(range(MAX_TRIES)):
            before = fleet.workers
            try:
                # Held requests compute their KV again, so that a trainer finds the same log probabilities.
                await fleet.update_weights(
                    objects=commit.objects, version=commit.version, model=self._options.model, clear_cache=True
                )
                return
            except CommandIncomplete as error:
                if self._options.min is not None:
                    if len(self._with(commit.version)) >= self._options.min:
                        log.warning("verl_update.applied_partly version=%s error=%s", commit.version, error)
                        return
                # If a worker died in the check before the update, nothing was started.
                elif error.check_of is None and error.ledger.applied:
                    gone_only = not behind(error.ledger, before, fleet.workers)
                    if gone_only:
                        return
                if not tries_left:
                    raise

    async def clear_kv_cache(self) -> None:
        """Clear the prefix caches of the workers."""
        async with _as_failure():
            await self._connected().fleet.flush_cache(model=self._options.model)

    async def start_profile(self, **_options: Any) -> None:
        """Raise `RolloutFailed`: verl's profiler does not reach the workers."""
        raise RolloutFailed("verl's profiler does not reach the workers; allowed: a profile of the trainer only")

    async def stop_profile(self) -> None:
        """Raise `RolloutFailed`, as `start_profile`."""
        await self.start_profile()

    # The memory of the workers' GPUs is not the trainer's, so there is nothing to free or to restore.

    async def wake_up(self) -> None:
        """Do nothing: the fleet has its own GPUs."""

    async def sleep(self) -> None:
        """Do nothing: the fleet has its own GPUs."""

    async def release_kv_cache(self) -> None:
        """Do nothing: the workers clear their caches themselves when they load weights."""

    async def resume_kv_cache(self) -> None:
        """Do nothing, as `release_kv_cache`."""

    def _connected(self) -> Client:
        if self._client is None:
            raise RolloutFailed("the server is not connected to the fleet")
        return self._client

    def _workers(self) -> list[WorkerPresence]:
        return [worker for worker in self._connected().fleet.workers if worker.model == self._options.model]

    def _with(self, version: int) -> list[WorkerPresence]:
        """Return the workers that serve with this version, or with a later one."""
        serving = (worker for worker in self._workers() if worker.state is WorkerState.SERVING)
        return [worker for worker in serving if worker.weight_version >= version]

    def _end_of(self, update: str) -> asyncio.Future[Commit | RolloutFailed]:
        """Return the future of an update's end. The trainer and the replica may ask for it in any order."""
        end = self._ends.setdefault(update, asyncio.get_running_loop().create_future())
        while len(self._ends) > MAX_UPDATES:
            del self._ends[next(iter(self._ends))]
        return end

    def _settle(self, update: str, end: Commit | RolloutFailed) -> bool:
        """End an update, and return True. If it has ended, return False."""
        known = self._end_of(update)
        if known.done():
            return False
        # A failure is a result too: nobody may wait for it.
        known.set_result(end)
        return True

    def _extra(self) -> dict[str, Any]:
        names = ("global_steps", "min_global_steps", "max_global_steps")
        return dict.fromkeys(names, self.latest_step)


@asynccontextmanager
async def _as_failure() -> AsyncIterator[None]:
    """Turn errors of rollbus into `RolloutFailed`, and name a time limit that passed."""
    try:
        yield
    except RollbusError as error:
        raise RolloutFailed(f"{type(error).__name__}: {error}") from None
    except TimeoutError as error:
        raise RolloutFailed(f"a time limit passed: {str(error) or 'no answer in time'}") from None

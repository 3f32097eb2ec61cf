"""Finds requests whose worker offered to run them and sends no tokens.

The worker publishes honest presence, so its lease does not end. The client moves the request to another worker and
avoids the silent worker. A long prefill, a slow machine and a full engine are no silence: see `SilenceWatch.limit_s`.
"""

from collections.abc import Container, Iterable
from typing import Final, NamedTuple, TypeVar

from ....schemas.presence import WorkerPresence
from .machine import AttemptMachine

__all__ = ["AVOID_S", "BUSY_FACTOR", "MAX_MOVES", "SILENT_S", "SilenceWatch", "able_others"]

SILENT_S: Final = 120.0
"""Seconds without a token after which a worker is silent: far above any engine step."""
PROMPT_TOKENS_PER_S: Final = 1000
"""Prompt tokens for each further second: a slow machine computes the prompt before the first token."""
BUSY_FACTOR: Final = 10
"""The limit is this many times as long while the worker sends tokens of other requests of this client. Workers accept
as many requests as the engine has slots. If these need more KV blocks than there are, the engine preempts some, which
wait until others end: for minutes, if outputs are long."""
MAX_MOVES: Final = 2
"""The number of silent workers after which a request stays where it is, until its deadline."""
AVOID_S: Final = 600.0
"""Seconds for which the client avoids a silent worker, unless the worker sends a token or restarts."""

Engine = tuple[str, str]
R = TypeVar("R", bound=AttemptMachine)


class _Avoided(NamedTuple):
    incarnation: str
    until: float


class SilenceWatch:
    """The workers that one client avoids, and the time of the last token of each engine.

    Attributes:
        avoided: the silent workers. Its keys are their names.
    """

    def __init__(self) -> None:
        self.avoided: dict[str, _Avoided] = {}
        self._token_at: dict[Engine, float] = {}

    def __repr__(self) -> str:
        """Return one line with the names of the silent workers."""
        return f"<SilenceWatch avoided={sorted(self.avoided)}>"

    def limit_s(self, request: AttemptMachine) -> float:
        """Return the seconds for which the worker of `request` may send no token of it."""
        limit_s = SILENT_S + request.stream.asked.prompt_len / PROMPT_TOKENS_PER_S
        token_at = self._token_at.get((request.worker or "", request.incarnation or ""), request.heard_at)
        return limit_s * BUSY_FACTOR if token_at > request.heard_at else limit_s

    def check(self, requests: Iterable[R], suspended: Container[str], elapsed_s: float, now: float) -> list[R]:
        """Return the requests to move to another worker. Their workers are avoided from now on.

        Args:
            requests: the open requests that a worker has.
            suspended: workers whose recorded state pauses or updates them or puts them to sleep. The time of their
                requests does not pass.
            elapsed_s: seconds since the last call.
        """
        offered = list(requests)
        seen: dict[Engine, float] = {}
        for request in offered:
            if request.worker in suspended:
                request.heard_at = min(request.heard_at + elapsed_s, now)
            elif request.has_token:
                engine = request.worker or "", request.incarnation or ""
                seen[engine] = max(seen.get(engine, request.heard_at), request.heard_at)
        present = {(request.worker or "", request.incarnation or "") for request in offered}
        self._token_at = {engine: at for engine, at in (self._token_at | seen).items() if engine in present}
        self._forgive(now)
        silent = [
            request
            for request in offered
            if request.num_moves < MAX_MOVES and now - request.heard_at > self.limit_s(request)
        ]
        for request in silent:
            self.avoided[request.worker or ""] = _Avoided(request.incarnation or "", now + AVOID_S)
            request.num_moves += 1
        return silent

    def _forgive(self, now: float) -> None:
        for worker, (incarnation, until) in list(self.avoided.items()):
            marked_at = until - AVOID_S
            if now >= until or self._token_at.get((worker, incarnation), marked_at) > marked_at:
                del self.avoided[worker]

    def forget(self, worker: str, incarnation: str) -> None:
        """Use a worker again that has another incarnation than the silent one."""
        avoided = self.avoided.get(worker)
        if avoided is not None and avoided.incarnation != incarnation:
            del self.avoided[worker]


def able_others(
    request: AttemptMachine, serving: Iterable[WorkerPresence], silent: Container[str]
) -> list[WorkerPresence]:
    """Return the workers that have the weights and the adapter of `request`, without the silent ones."""
    version, lora = request.stream.asked.min_weight_version or 0, request.stream.asked.lora
    return [
        worker
        for worker in serving
        if worker.worker not in silent
        and worker.weight_version >= version
        and (lora is None or lora in (info.name for info in worker.loras))
    ]

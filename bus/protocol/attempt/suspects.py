"""Finds the request or the worker that is at fault: a request that kills engines, and a worker that sends no tokens."""

from collections import OrderedDict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from ....schemas.limits import MAX_ENGINE_DEATHS, MAX_ENGINE_DEATHS_ALONE
from ....schemas.presence import WorkerPresence
from .machine import AttemptMachine

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
"""Worker and incarnation."""
R = TypeVar("R", bound=AttemptMachine)
MAX_DEATHS_REMEMBERED: Final = 1024
"""Deaths of engines whose requests are remembered. Their frames arrive within seconds."""
K = TypeVar("K", bound=Hashable)


class _Avoided(NamedTuple):
    incarnation: str
    until: float


class SilenceWatch:
    """The workers that one client avoids, and the time of the last token of each engine.

    The worker of such a request has offered to run it and publishes honest presence, so its lease does not end. The
    client moves the request to another worker and avoids the silent worker. A long prefill, a slow machine and a full
    engine are no silence: see `limit_s`.

    Attributes:
        avoided: the silent workers. Its keys are their names.
    """

    def __init__(self) -> None:
        self.avoided: dict[str, _Avoided] = {}
        self._token_at: dict[Engine, float] = {}

    def limit_s(self, request: AttemptMachine) -> float:
        """Return the seconds for which the worker of `request` may send no token of it."""
        limit_s = SILENT_S + request.stream.asked.prompt_len / PROMPT_TOKENS_PER_S
        token_at = self._token_at.get(request.engine, request.heard_at)
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
                seen[request.engine] = max(seen.get(request.engine, request.heard_at), request.heard_at)
        present = {request.engine for request in offered}
        self._token_at = {engine: at for engine, at in (self._token_at | seen).items() if engine in present}
        self._forgive(now)
        silent = [
            request
            for request in offered
            if request.num_moves < MAX_MOVES and now - request.heard_at > self.limit_s(request)
        ]
        for request in silent:
            worker, incarnation = request.engine
            self.avoided[worker] = _Avoided(incarnation, now + AVOID_S)
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


class Company(NamedTuple):
    """The client's requests at an engine when it died."""

    num_open: int
    """All of these requests."""
    num_untokened: int
    """The requests without a token from this engine."""


@dataclass(slots=True)
class _Suspect:
    model: str
    deaths: list[Engine]
    is_held: bool = True


class Suspects(Generic[K]):
    """The suspects of one client.

    An engine dies with many requests in it, and usually one of them is the cause. A request with a token has passed the
    phase that kills engines. The requests without a token are the *suspects*. For each model, one suspect at a time is
    *on trial*: the client publishes it and holds back the others until it has a token or has ended. Requests that are
    no suspects continue at once. If the engine dies again and the request on trial was the client's only request there
    without a token, that request is poison. Other requests there weaken this evidence; then a third death is needed.

    Time does not matter here. The caller defines the keys: one for each sample of each request.
    """

    def __init__(self) -> None:
        # In the order of their last change: a death, or the undoing of one.
        self._suspects: dict[K, _Suspect] = {}
        # By model: the suspect that may be published.
        self._on_trial: dict[str, K] = {}
        self._at_death: OrderedDict[Engine, Company] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of requests that may have killed an engine."""
        return len(self._suspects)

    def __contains__(self, key: K) -> bool:
        """Return True if an engine died while it had this request without a token."""
        return key in self._suspects

    def is_held(self, key: K) -> bool:
        """Return True if the client must not publish this request now."""
        return key in self._suspects and self._suspects[key].is_held

    def on_trial(self) -> Iterator[tuple[str, K]]:
        """Iterate over the models that have a request on trial, with that request."""
        return iter(list(self._on_trial.items()))

    def at_death(self, engine: Engine, now: Company) -> Company:
        """Return the requests at `engine` when the client first learned of its death, which several frames may report.

        Args:
            now: the present requests. They are remembered if this is the first call for `engine`.
        """
        company = self._at_death.setdefault(engine, now)
        if len(self._at_death) > MAX_DEATHS_REMEMBERED:
            self._at_death.popitem(last=False)
        return company

    def record_death(self, engine: Engine, model: str, lost: Collection[K], *, was_alone: bool) -> dict[K, int]:
        """Record the death of an engine that had generated no token of the requests in `lost`.

        Args:
            was_alone: True if the engine had exactly one request of the client without a token.

        Returns:
            The poison requests among `lost`, each with the number of its engine deaths. The others are held back until
            `next` returns them.
        """
        poison: dict[K, int] = {}
        for key in lost:
            before = self._suspects[key].deaths if key in self._suspects else []
            self.clear(key)
            deaths = [*before, engine]
            if len(deaths) >= (MAX_ENGINE_DEATHS_ALONE if was_alone else MAX_ENGINE_DEATHS):
                poison[key] = len(deaths)
            else:
                self._suspects[key] = _Suspect(model, deaths)
        return poison

    def next(self, model: str) -> K | None:
        """Put the next suspect of `model` on trial and return it; None if one is on trial or none is left.

        Suspects of fewer deaths go first: innocent requests then do not wait for the restarts that the others cause.
        """
        if model in self._on_trial:
            return None
        first, fewest = None, MAX_ENGINE_DEATHS
        for key, suspect in self._suspects.items():
            if suspect.is_held and suspect.model == model and len(suspect.deaths) < fewest:
                first, fewest = key, len(suspect.deaths)
                if fewest == 1:
                    break
        if first is not None:
            self._suspects[first].is_held = False
            self._on_trial[model] = first
        return first

    def pass_over(self, key: K) -> None:
        """End the trial of a request that no worker can accept now, so that it delays no others. It stays a suspect."""
        model = self._suspects[key].model
        if self._on_trial.get(model) == key:
            del self._on_trial[model]

    def clear(self, key: K) -> None:
        """Remove a request that has a token or has ended; without effect on others."""
        suspect = self._suspects.pop(key, None)
        if suspect is not None and self._on_trial.get(suspect.model) == key:
            del self._on_trial[suspect.model]

    def undo_death(self, engine: Engine) -> list[K]:
        """Undo the death of an engine that was silent for longer than its lease and whose presence arrives again.

        Returns:
            The requests that were held back and are no longer suspects, or are on trial now. The client publishes them.
        """
        released = []
        for key, suspect in list(self._suspects.items()):
            if engine not in suspect.deaths:
                continue
            suspect.deaths.remove(engine)
            if suspect.deaths:
                self._suspects[key] = self._suspects.pop(key)
                continue
            self.clear(key)
            released += [key] if suspect.is_held else []
            # The others waited for the trial of this one.
            if (following := self.next(suspect.model)) is not None:
                released.append(following)
        return released

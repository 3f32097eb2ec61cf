"""Finds the request that killed an engine. A client tries suspects one at a time; its other requests continue at once.

An engine dies with many requests in it, and usually one of them is the cause. A request with a token has passed the
phase that kills engines. The requests without a token are the *suspects*. For each model, one suspect at a time is *on
trial*: the client publishes it and holds back the others until it has a token or has ended. If the engine dies again
and the request on trial was the client's only request there without a token, that request is poison. Other requests
there weaken this evidence; then a third death is needed.

Time does not matter here. The caller defines the keys: one for each sample of each request.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from ....schemas.limits import MAX_ENGINE_DEATHS, MAX_ENGINE_DEATHS_ALONE

__all__ = ["Company", "Engine", "Suspects"]

MAX_DEATHS_REMEMBERED: Final = 1024
"""Deaths of engines whose requests are remembered. Their frames arrive within seconds."""

Engine = tuple[str, str]
"""Worker and incarnation."""
K = TypeVar("K", bound=Hashable)


class Company(NamedTuple):
    """The client's requests at an engine when it died."""

    num_open: int
    """All of these requests."""
    num_untokened: int
    """The requests without a token from this engine."""


@dataclass(slots=True)
class _Suspect:
    model: str
    deaths: list[Engine] = field(default_factory=list)


class Suspects(Generic[K]):
    """The suspects of one client."""

    def __init__(self) -> None:
        self._suspects: dict[K, _Suspect] = {}
        # By model: the suspect that may be published, and those held back, oldest first, by the number of their deaths.
        self._on_trial: dict[str, K] = {}
        self._held: dict[str, dict[int, dict[K, None]]] = {}
        self._at_death: OrderedDict[Engine, Company] = OrderedDict()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<Suspects {len(self._suspects)} on_trial={len(self._on_trial)}>"

    def __len__(self) -> int:
        """Return the number of requests that may have killed an engine."""
        return len(self._suspects)

    def __contains__(self, key: K) -> bool:
        """Return True if an engine died while it had this request without a token."""
        return key in self._suspects

    def is_held(self, key: K) -> bool:
        """Return True if the client must not publish this request now."""
        suspect = self._suspects.get(key)
        return suspect is not None and key in self._held.get(suspect.model, {}).get(len(suspect.deaths), {})

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
            suspect = self._suspects.get(key) or _Suspect(model)
            self.clear(key)
            suspect.deaths.append(engine)
            if len(suspect.deaths) >= (MAX_ENGINE_DEATHS_ALONE if was_alone else MAX_ENGINE_DEATHS):
                poison[key] = len(suspect.deaths)
            else:
                self._suspects[key] = suspect
                self._hold(key, suspect)
        return poison

    def _hold(self, key: K, suspect: _Suspect) -> None:
        self._held.setdefault(suspect.model, {}).setdefault(len(suspect.deaths), {})[key] = None

    def next(self, model: str) -> K | None:
        """Put the next suspect of `model` on trial and return it; None if one is on trial or none is left.

        Suspects of fewer deaths go first: innocent requests then do not wait for the restarts that the others cause.
        """
        held = self._held.get(model)
        if held is None or model in self._on_trial:
            return None
        num_deaths = min(held)
        key = next(iter(held[num_deaths]))
        self._release(key, model, num_deaths)
        self._on_trial[model] = key
        return key

    def pass_over(self, key: K) -> None:
        """End the trial of a request that no worker can accept now, so that it delays no others. It stays a suspect."""
        model = self._suspects[key].model
        if self._on_trial.get(model) == key:
            del self._on_trial[model]

    def clear(self, key: K) -> None:
        """Remove a request that has a token or has ended; without effect on others."""
        suspect = self._suspects.pop(key, None)
        if suspect is None:
            return
        self._release(key, suspect.model, len(suspect.deaths))
        if self._on_trial.get(suspect.model) == key:
            del self._on_trial[suspect.model]

    def _release(self, key: K, model: str, num_deaths: int) -> None:
        held = self._held.get(model, {})
        same = held.get(num_deaths, {})
        same.pop(key, None)
        if not same:
            held.pop(num_deaths, None)
        if not held:
            self._held.pop(model, None)

    def undo_death(self, engine: Engine) -> list[K]:
        """Undo the death of an engine that was silent for longer than its lease and whose presence arrives again.

        Returns:
            The requests that are no longer suspects and were held back. The client publishes them now.
        """
        released = []
        for key, suspect in list(self._suspects.items()):
            if engine not in suspect.deaths:
                continue
            was_held = self.is_held(key)
            if was_held:
                self._release(key, suspect.model, len(suspect.deaths))
            suspect.deaths.remove(engine)
            if was_held and suspect.deaths:
                self._hold(key, suspect)
            elif not suspect.deaths:
                self.clear(key)
                if was_held:
                    released.append(key)
        return released

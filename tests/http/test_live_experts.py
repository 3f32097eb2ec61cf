"""The load of experts in the events that viewers receive."""

import base64
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.frontend.http.live import experts as expert_feeds
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.live_support import watching
from tests.http.support import Serve
from tests.support.requests import greedy

SHAPE = SyntheticConfig(num_layers=3, top_k=2, num_experts=8)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service ask for counts continuously."""
    monkeypatch.setattr(expert_feeds, "PERIOD_S", 0.2)


def counts(event: dict[str, Any], plane: str) -> np.ndarray:
    """Return the counts of a plane."""
    data = base64.b64decode(event["planes"][plane]["counts"], validate=True)
    return np.frombuffer(data, "<u4").reshape(event["num_layers"], event["num_experts"])


async def test_counts_are_those_of_the_rows(serve: Serve) -> None:
    """The counts equal the rows that a client received: by plane with their imbalance."""
    async with serve(config=SHAPE, weight_version=3) as http:
        (worker,) = http.rb.fleet.workers
        got = await http.rb.complete(greedy(1, 20))
        rows = got.routed_experts
        wanted = np.zeros((3, 8), np.int64)
        for layer in range(3):
            np.add.at(wanted[layer], rows[:, layer].ravel(), 1)
        async with watching(http, f"?experts=synthetic&worker={worker.worker}") as one, watching(http) as other:
            event = await one.until("experts", lambda event: event["planes"] and event["planes"]["generated"]["seen"])
            await other.next("fleet")
    found = counts(event, "prompt").astype(np.int64) + counts(event, "generated")
    assert found.tolist() == wanted.tolist()
    assert (event["model"], event["worker"], event["problem"]) == ("synthetic", worker.worker, None)
    assert (event["workers_asked"], event["workers_answered"], event["workers_total"], event["top_k"]) == (1, 1, 1, 2)
    plane, totals = event["planes"]["generated"], counts(event, "generated")
    assert np.allclose(plane["max_over_mean"], totals.max(axis=1) / totals.mean(axis=1), atol=1e-4)
    assert plane["unused"] == (totals == 0).sum(axis=1).tolist()


async def test_counts_that_cannot_be_shown_are_reported_as_a_problem(serve: Serve) -> None:
    """An unknown model, an unknown worker and a model without experts give a problem, and the stream continues."""
    async with serve(config=SyntheticConfig(num_experts=0)) as http:
        (worker,) = http.rb.fleet.workers
        for query, words in (
            ("?experts=other", "other"),
            ("?experts=synthetic&worker=nobody", "nobody"),
            ("?experts=synthetic", f"{worker.worker}: its engine returns no routed experts"),
        ):
            async with watching(http, query) as stream:
                event = await stream.next("experts")
                assert words in event["problem"], event
                assert event["planes"] is None


async def test_viewers_of_the_same_counts_share_the_queries(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers of the same counts share the queries to the workers, and without viewers there are none.

    The number of simultaneous queries is limited.
    """
    asked: list[str | None] = []
    experts = rollbus.Fleet.experts

    async def note(self: rollbus.Fleet, model: str | None = None, **options: Any) -> Any:
        asked.append(model)
        return await experts(self, model, **options)

    monkeypatch.setattr(rollbus.Fleet, "experts", note)
    monkeypatch.setattr(expert_feeds, "PERIOD_S", 1000.0)
    monkeypatch.setattr(expert_feeds, "MAX_FEEDS", 1)
    async with serve(config=SHAPE) as http:
        async with watching(http) as nobody:
            await nobody.next("fleet")
        assert asked == []
        query = "?experts=synthetic"
        async with watching(http, query) as one, watching(http, query) as other:
            assert await one.next("experts") == await other.next("experts")
            async with watching(http, "?experts=another") as third:
                assert (await third.next("experts"))["problem"].endswith("allowed: 1")
                await third.next("fleet")
        assert asked == ["synthetic"] * 2  # one query for the last minute and one by version
        problem = "allowed: 1"
        while problem.endswith("allowed: 1"):
            async with watching(http, "?experts=another") as later:
                problem = (await later.next("experts"))["problem"] or ""

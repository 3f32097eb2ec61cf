"""If the NATS server is away for a while, with or without its store, results of requests do not change."""

import shutil
from pathlib import Path

import pytest

import rollbus
from rollbus.bus.client import dispatch
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.support.disagg import SHAPES, check_legs, shaped, until_paired
from tests.support.invariants import observing
from tests.support.nats_server import require_binary
from tests.support.requests import Load

pytestmark = pytest.mark.slow

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)
"""Few slots, so that many requests wait in the queue."""


@pytest.mark.proves("P5")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("shape", SHAPES)
async def test_no_request_is_repeated_if_the_server_restarts_twice(fleet: str, shape: str) -> None:
    """If the server is killed under load and restarts, links and queue continue, and no request is repeated."""
    require_binary()
    load = await Load.mixed(60, CONFIG)
    async with (
        EmbeddedServer() as server,
        observing(server.url, fleet) as observer,
        shaped(server.url, fleet, shape, CONFIG) as running,
        rollbus.connect(server.url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        await until_paired(rb, *running.workers)
        lives = [worker.presence().incarnation for worker in running.workers.values()]

        async def restart() -> None:
            await server.kill()
            await server.restart()

        results = await load.run(rb, strikes={5: restart, 30: restart}, legs=len(running.workers))
        check_legs(results, shape)
        assert {generation.attempts for generation in results} == {1}
        assert [worker.presence().incarnation for worker in running.workers.values()] == lives
        await observer.check_at_rest()


@pytest.mark.proves("P48")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("shape", SHAPES)
async def test_queued_requests_are_published_again_after_the_store_is_lost(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """If the server restarts with an empty disk, the client publishes the queued requests again as orphans."""
    require_binary()
    monkeypatch.setattr(dispatch, "ORPHAN_AGE_S", 1.0)
    load = await Load.mixed(40, CONFIG)
    store = tmp_path / "store"
    async with (
        EmbeddedServer(store_dir=store) as server,
        observing(server.url, fleet) as observer,
        shaped(server.url, fleet, shape, CONFIG) as running,
        rollbus.connect(server.url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        await until_paired(rb, *running.workers)

        async def lose_store() -> None:
            await server.kill()
            shutil.rmtree(store)
            await server.restart()

        results = await load.run(rb, strikes={5: lose_store}, legs=len(running.workers))
        check_legs(results, shape)
        assert rb.stats().orphans > 0
        await observer.check_at_rest()

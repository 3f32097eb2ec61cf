"""The frame numbers of a link repair frames and acks that are lost, duplicate or reordered."""

import pytest

from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.support.disagg import SHAPES, check_legs, filtered
from tests.support.invariants import observing
from tests.support.load import Load
from tests.support.nats_noise import NatsNoise

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=16, vocab_size=VOCAB_SIZE)


@pytest.mark.proves("P33")
@pytest.mark.parametrize("shape", SHAPES)
async def test_lost_duplicate_or_late_frames_and_acks_cost_no_attempt(nats_url: str, fleet: str, shape: str) -> None:
    """If frames or frame acks are lost, duplicate or late, each request is right in its first attempt."""
    load = await Load.mixed(50, CONFIG)
    frames = NatsNoise(r"\.frame\.", seed=1, drop=0.01, double=0.02, delay=0.01)
    acks = NatsNoise(r"\.link\.", seed=2, drop=0.1, double=0.1)
    async with (
        observing(nats_url, fleet) as observer,
        filtered(nats_url, fleet, shape, CONFIG, client=frames.filter, workers=acks.filter) as (running, rb),
    ):
        results = await load.run(rb, legs=len(running.workers))
        stats = rb.stats()

        check_legs(results, shape)
        assert {generation.attempts for generation in results} == {1}
        assert set(frames.counts) == {"dropped", "doubled", "delayed"}
        assert set(acks.counts) == {"dropped", "doubled"}
        assert stats.missing_frames > 0
        assert stats.duplicate_frames > 0
        await observer.check_at_rest()

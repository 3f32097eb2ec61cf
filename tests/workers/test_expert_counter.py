"""The positions of engine steps that a worker counts. Each row names its position, so the counts show the rows."""

from typing import NamedTuple

import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.bus.protocol.telemetry.experts import PlaneLoad, merge_loads
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.rows import Rows
from rollbus.workers.requests.steps import ExpertCounter
from tests.workers.links_support import NOW, ROUTING, Ear, capabilities, make_links, queued, request_of, step

PROMPT_LEN = 6


class Seen(NamedTuple):
    """The counts of one plane."""

    positions: list[int]
    """The positions whose rows were counted, repeated by their counts."""
    computed: int


class Rig:
    """Links that count, and a client whose request has a prompt of `PROMPT_LEN` tokens."""

    def __init__(self, *, routing: bool = True, gathers: bool = False) -> None:
        self.links = make_links()
        self.counter.begin(ROUTING, NOW)
        self.ear = Ear(self.links)
        self.name, _ = self.ear.offer("r", prompt_len=PROMPT_LEN, routing=routing, gathers=gathers)

    @property
    def counter(self) -> ExpertCounter:
        """The counter of the links."""
        return self.links.dispatcher.experts

    def add(self, *steps: RequestStep | TokenBatch) -> None:
        """Add steps as the engine's next step."""
        self.links.add_steps(steps, NOW)

    def seen(self, later_s: float = 5.0) -> dict[str, Seen]:
        """Return the counts by plane."""
        load = self.counter.load(0, "versions", NOW + later_s)
        assert load is not None
        window, left_out = merge_loads({"w": load})
        assert not left_out
        return {"prompt": _seen(window.prompt), "generated": _seen(window.generated)}


def _seen(plane: PlaneLoad) -> Seen:
    """Return the counts, and assert that every layer and choice has the same."""
    assert (plane.counts == plane.counts[0]).all()
    times = plane.counts[0] // ROUTING.top_k
    assert plane.seen == times.sum()
    return Seen(np.repeat(np.arange(len(times)), times).tolist(), plane.computed)


def rows(first: int, past: int) -> Rows:
    """Return the rows of these positions, each with the expert of its own number."""
    positions = np.arange(first, past, dtype=np.uint8)
    return np.broadcast_to(positions[:, None, None], (past - first, ROUTING.num_layers, ROUTING.top_k)).copy()


def made(
    name: str, num_tokens: int, first: int | None = None, past: int = 0, *, cached: int | None = None, end: bool = False
) -> RequestStep:
    """Return an engine step with the rows of these positions."""
    one = step(name, num_tokens, end=end)
    if first is not None:
        one.routed_experts, one.routed_experts_start = rows(first, past), first
    one.cached_tokens = cached
    return one


def batch_of(names: list[str], positions: list[int] | None) -> TokenBatch:
    """Return a batch with one token of each request, with the rows of these positions."""
    found = None if positions is None else np.concatenate([rows(position, position + 1) for position in positions])
    starts = None if positions is None else np.array(positions, np.int64)
    return TokenBatch(
        keys=names, token_ids=np.full(len(names), 7, np.int32), routed_experts=found, routed_experts_starts=starts
    )


@pytest.fixture(params=[False, True], ids=["streamed", "gathered"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Return a rig with a client that streams, and one whose results are not streamed."""
    return Rig(gathers=request.param)


def test_rows_of_the_prompt_and_of_generated_tokens_are_counted_separately(rig: Rig) -> None:
    """The first step has the rows of the prompt, and each later step has the row of the token before.

    The last token was never computed.
    """
    rig.add(made(rig.name, 1, 0, 6, cached=0))
    rig.add(batch_of([rig.name], [6]))
    rig.add(batch_of([rig.name], [7]))
    rig.add(made(rig.name, 1, 8, 9, end=True))

    assert rig.seen() == {"prompt": Seen([0, 1, 2, 3, 4, 5], 6), "generated": Seen([6, 7, 8], 3)}


def test_cached_prompt_positions_are_not_counted(rig: Rig) -> None:
    """Cached prompt positions are not counted, although the engine returns their rows."""
    rig.add(made(rig.name, 1, 0, 6, cached=4))
    rig.add(batch_of([rig.name], [6]))

    assert rig.seen() == {"prompt": Seen([4, 5], 2), "generated": Seen([6], 1)}


def test_several_tokens_in_a_step_count_each(rig: Rig) -> None:
    """Each token of a step counts, as with speculative decoding, also in the first step."""
    rig.add(made(rig.name, 3, 0, 8, cached=2))
    rig.add(made(rig.name, 2, 8, 10))

    assert rig.seen() == {"prompt": Seen([2, 3, 4, 5], 4), "generated": Seen([6, 7, 8, 9], 4)}


def test_requests_without_routing_count_as_computed_and_not_as_seen() -> None:
    """Requests without routing count as computed and not as seen, which shows the share that the counts cover."""
    rig = Rig()
    declined, _ = rig.ear.offer("declined", prompt_len=PROMPT_LEN, routing=False)
    rig.add(made(declined, 1, cached=1))
    rig.add(batch_of([declined], None))

    assert rig.seen() == {"prompt": Seen([], 5), "generated": Seen([], 1)}


def test_positions_below_start_count_as_computed_and_not_as_seen() -> None:
    """The rows begin with the request's `start`, so positions below it count as computed only."""
    rig = Rig()
    message = queued()
    request = request_of(PROMPT_LEN, request_id="s", routed_experts_prompt_start=4)
    name = rig.links.offer(rig.ear.origin("s", message), request, capabilities(), NOW)
    rig.add(made(name, 1, 4, 6, cached=2))
    rig.add(batch_of([name], [6]))

    assert rig.seen() == {"prompt": Seen([4, 5], 4), "generated": Seen([6], 1)}


def test_positions_recomputed_after_a_preemption_are_counted_again(rig: Rig) -> None:
    """After a preemption, six prompt and two generated positions count as computed again, without rows.

    The third generated position counts normally.
    """
    rig.add(made(rig.name, 1, 0, 6, cached=4))
    rig.add(batch_of([rig.name], [6]))
    rig.add(batch_of([rig.name], [7]))
    again = made(rig.name, 1, 8, 9)
    again.kv_recomputed = True
    rig.add(again)

    assert rig.seen() == {"prompt": Seen([4, 5], 2 + 6), "generated": Seen([6, 7, 8], 2 + 2 + 1)}


def test_a_prompt_is_counted_with_its_first_token(rig: Rig) -> None:
    """A prompt is counted with its first token, because new weights may restart requests before it."""
    rig.add(made(rig.name, 0, 0, 3, cached=1))
    rig.links.requests.restart_unbegun(None)
    rig.add(made(rig.name, 0, 0, 4, cached=2))
    rig.add(made(rig.name, 1, 4, 6))

    assert rig.seen() == {"prompt": Seen([2, 3, 4, 5], 4), "generated": Seen([], 0)}


def test_steps_of_ended_requests_are_not_counted(rig: Rig) -> None:
    """Steps of ended and of unknown requests are not counted."""
    other, _ = rig.ear.offer("other", prompt_len=PROMPT_LEN, routing=True)
    rig.add(made(rig.name, 1, 0, 6, cached=0), made(other, 1, 0, 6, cached=5))
    rig.add(made(rig.name, 1, 6, 7, end=True))
    rig.add(made(rig.name, 1, 7, 8))
    rig.add(batch_of([rig.name, other, "never"], [8, 6, 20]))

    assert rig.seen() == {"prompt": Seen([0, 1, 2, 3, 4, 5, 5], 7), "generated": Seen([6, 6], 2)}


def test_a_version_counts_from_its_first_step_on() -> None:
    """Steps before the first step of a new version count for the old one. A new incarnation begins at 0."""
    rig = Rig()
    rig.add(made(rig.name, 1, 0, 6, cached=0))
    rig.links.versions.weight_version = 7
    rig.add(made(rig.name, 1, 6, 7))
    load = rig.counter.load(0, "recent", NOW + 5.0)

    assert [(counts.weight_version, counts.generated_tokens.seen) for counts in load.counts] == [(7, 1), (0, 0)]
    assert [counts.prompt_tokens.seen for counts in load.counts] == [0, 6]
    rig.links.fence("w2", NOW + 6.0, max_payload=1 << 20)
    load = rig.counter.load(0, "recent", NOW + 12.0)
    assert not load.counts


def test_an_engine_without_routing_has_no_expert_load() -> None:
    """An engine without routing has no load.

    An engine that has not started, or that has too many experts, causes an error with that reason.
    """
    counter = ExpertCounter()
    with pytest.raises(ControlError, match="has not started") as caught:
        counter.load(0, "recent", NOW)
    assert caught.value.code is ControlCode.NOT_SERVING
    counter.begin(None, NOW)
    assert counter.load(0, "recent", NOW) is None
    counter.begin(RoutedExpertsInfo(num_layers=1024, top_k=1, num_experts=1024, dtype="<u2"), NOW)
    with pytest.raises(ControlError, match="1024 layers x 1024 experts; allowed for counting: 262144") as caught:
        counter.load(0, "recent", NOW)
    assert caught.value.code is ControlCode.UNSUPPORTED

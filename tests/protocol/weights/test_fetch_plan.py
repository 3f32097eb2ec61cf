"""The order in which a worker tries to fetch versions: the plan with the fewest bytes first, then all others."""

from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.weights.chain import FetchPlan, fetch_plans
from rollbus.schemas.manifest import Link


def link(number: int, *, delta: int | None = 1, anchor: int | None = None) -> Link:
    """Return a version of a chain whose digest is its number."""
    return Link(objects=f"b/{number}", version=number, digest=f"{number:064d}", delta_bytes=delta, anchor_bytes=anchor)


def digests(*numbers: int) -> set[str]:
    """Return the digests of folders in the worker's cache."""
    return {f"{number:064d}" for number in numbers}


CHAIN = [link(0, delta=None, anchor=100), link(1), link(2, anchor=100), link(3)]


def test_plans_are_in_the_order_of_their_bytes() -> None:
    """Plans start from a cached folder, then the newer anchor, then the older one in case the newer is damaged."""
    assert fetch_plans(CHAIN, digests(1)) == [
        FetchPlan(digests(1).pop(), None, (CHAIN[2], CHAIN[3])),
        FetchPlan(None, CHAIN[2], (CHAIN[3],)),
        FetchPlan(None, CHAIN[0], (CHAIN[1], CHAIN[2], CHAIN[3])),
    ]


def test_if_the_newest_version_is_cached_the_first_plan_fetches_nothing() -> None:
    """If the newest version is cached, the first plan fetches nothing."""
    first = fetch_plans(CHAIN, digests(0, 3))[0]

    assert (first.base, first.deltas, first.fetched_bytes) == (digests(3).pop(), (), 0)


def test_an_anchor_is_fetched_before_deltas_that_are_larger() -> None:
    """If the deltas are larger than an anchor, as after large training steps, the anchor is fetched instead."""
    chain = [link(0, delta=None, anchor=100), link(1, delta=80), link(2, delta=80, anchor=100)]

    assert fetch_plans(chain, digests(0))[0] == FetchPlan(None, chain[2], ())


def test_a_chain_without_an_anchor_and_a_cached_version_has_no_plan() -> None:
    """A chain without an anchor and without a cached version has no plan."""
    assert fetch_plans([link(1), link(2)], set()) == []
    assert fetch_plans([], digests(1)) == []


def test_no_plan_crosses_a_version_without_a_delta() -> None:
    """No plan crosses a version without a delta, because earlier versions belong to another chain."""
    chain = [link(0, delta=None, anchor=10), link(1, delta=None, anchor=100), link(2)]

    assert [plan.anchor for plan in fetch_plans(chain, digests(0))] == [chain[1]]


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)), max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_every_plan_leads_to_the_newest_version(sizes: list[tuple[int | None, int | None]], at_hand: set[int]) -> None:
    """Each plan starts from a cached folder or an anchor, and applies each later delta once and in order."""
    chain = [link(number, delta=delta, anchor=anchor) for number, (delta, anchor) in enumerate(sizes)]
    plans = fetch_plans(chain, digests(*at_hand))

    for plan in plans:
        begin = next(one for one in chain if one.digest == plan.base or one == plan.anchor)
        assert (plan.base is None) != (plan.anchor is None)
        assert list(plan.deltas) == chain[chain.index(begin) + 1 :]
        assert all(delta.delta_bytes is not None for delta in plan.deltas)
    assert [plan.fetched_bytes for plan in plans] == sorted(plan.fetched_bytes for plan in plans)

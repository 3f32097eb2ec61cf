"""Which requests are placed, where, and which are queued."""

from rollbus.bus.protocol.placement.policy import PlacementReason
from tests.protocol.placement.worlds import fleet, loads, presence, prompt, wanted


def test_an_unknown_prompt_is_queued() -> None:
    """Where no worker holds a beginning of a prompt, the queue decides."""
    policy = fleet(presence("a"), presence("b"))

    assert policy.place(wanted(prompt(1)), loads(policy, "a", "b"), 1).worker is None


def test_a_known_prompt_goes_where_it_is_cached() -> None:
    """The worker that admitted a prompt gets the next request that begins with it."""
    policy = fleet(presence("a"), presence("b"))
    policy.admitted(wanted(prompt(1)), "b", 1, was_placed=False)
    placement = policy.place(wanted(prompt(1)), loads(policy, "a", "b"), 2)

    assert placement == ("b", PlacementReason.PLACED_PREFIX, 2048)

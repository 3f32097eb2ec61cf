"""When the messages of a subscription are a flood."""

from rollbus.bus.protocol.fleet.leases import MAX_FROM_ALL, MAX_FROM_ONE, FloodMeter


def test_one_sender_floods_with_more_than_its_messages_in_a_second() -> None:
    """A sender with more than 500 messages in a second floods, and the description names it and its share."""
    meter = FloodMeter()
    for number in range(MAX_FROM_ONE):
        assert not meter.add("ping.mallory", number / 1000)
        assert not meter.add("ping.alice", number / 1000)

    assert meter.add("ping.mallory", 0.9)
    assert meter.is_flooded
    assert "501 of 1001 messages in a second on ping.mallory" in meter.describe("ping.*")

    meter.reset(1.0)
    assert not meter.is_flooded


def test_a_steady_rate_below_the_limit_never_floods() -> None:
    """Messages at the allowed rate never flood, for any time."""
    meter = FloodMeter()

    assert not any(meter.add("ping.alice", number / MAX_FROM_ONE) for number in range(10 * MAX_FROM_ONE))


def test_a_thousand_clients_that_connect_at_once_are_no_flood() -> None:
    """Messages of many senders flood only far above a ping of each of a thousand clients."""
    meter = FloodMeter()
    floods = [meter.add(f"ping.c{number}", 0.0) for number in range(MAX_FROM_ALL + 1)]

    assert floods.index(True) == MAX_FROM_ALL


def test_useful_messages_do_not_count() -> None:
    """A burst of placed requests that the worker accepts is no flood; rejected ones are."""
    accepted = 0
    meter = FloodMeter(lambda: accepted)
    for _ in range(2000):
        assert not meter.add("direct.alice.w", 0.5)
        accepted += 1
    floods = [meter.add("direct.alice.w", 0.5) for _ in range(MAX_FROM_ONE + 1)]

    assert floods.index(True) == MAX_FROM_ONE

"""The noise filter disturbs whole messages on the chosen subjects only."""

import asyncio

from nats.aio.msg import Msg

from rollbus.bus.nats.connection import publish, subscribe
from tests.support.connections import opened
from tests.support.nats_noise import NatsNoise
from tests.support.patience import SOON_S
from tests.support.tcp_proxy import tcp_proxy


async def test_messages_are_dropped_duplicated_and_delayed(nats_url: str, fleet: str) -> None:
    """The filter drops, duplicates and delays messages on its subjects; other messages arrive once and in order."""
    noise = NatsNoise(r"\.noisy$", drop=0.1, double=0.1, delay=0.1)
    received: dict[str, list[int]] = {"noisy": [], "quiet": []}
    has_all = asyncio.Event()

    async def receive(message: Msg) -> None:
        assert len(message.data) > 5000
        received[message.subject.rpartition(".")[2]].append(int(message.data[:5]))
        if received["quiet"][-1:] == [199]:
            has_all.set()

    async with tcp_proxy(nats_url) as proxy:
        proxy.make_filter = noise.filter
        async with opened(proxy.url) as connection:
            await subscribe(connection, f"{fleet}.*", receive)
            for number in range(200):
                for subject in received:
                    await publish(connection, f"{fleet}.{subject}", b"%05d" % number + b"MSG a 1 2\r\n" * 500)
            async with asyncio.timeout(SOON_S):
                await has_all.wait()
    noisy = received["noisy"]

    assert received["quiet"] == list(range(200))
    assert min(noise.counts["dropped"], noise.counts["doubled"], noise.counts["delayed"]) > 10
    assert len(set(noisy)) in range(197 - noise.counts["dropped"], 201 - noise.counts["dropped"])
    assert len(noisy) - len(set(noisy)) == noise.counts["doubled"]
    assert noisy != sorted(noisy)

"""A client and workers of different releases: a proxy rewrites the messages from NATS into those of another release."""

import re
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from rollbus.schemas.messages import (
    decode_ack,
    decode_client_presence,
    decode_command,
    decode_frame,
    decode_link_message,
    decode_presence,
    decode_request_message,
)
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.golden.releases import earlier, later
from tests.support.disagg import SHAPES, filtered
from tests.support.invariants import observing
from tests.support.load import Load

CONFIG = SyntheticConfig(step_s=0.0, max_num_seqs=16, vocab_size=VOCAB_SIZE)
MESSAGE = re.compile(rb"(H?)MSG rb\.v1\.[^.]+\.(\w+)\.\S+ .*?(?:(\d+) )?(\d+)\r\n")
ANY_MESSAGE = re.compile(rb"H?MSG .*?(\d+)\r\n")
DECODERS: dict[str, Callable[[bytes], msgspec.Struct]] = {
    "ack": decode_ack,
    "client": decode_client_presence,
    "control": decode_command,
    "direct": decode_request_message,
    "frame": decode_frame,
    "link": decode_link_message,
    "presence": decode_presence,
    "req": decode_request_message,
}
RELEASES = {"later": later, "earlier": earlier}


class Rewriting:
    """Rewrites the messages that a NATS server delivers to one side, as another release would send them."""

    def __init__(self, release: Callable[[msgspec.Struct], bytes]) -> None:
        self._release = release
        self.counts: Counter[str] = Counter()
        """Number of messages whose bytes changed, by the kind of their subjects."""

    def filter(self) -> Callable[[bytes], bytes]:
        """Return a function that rewrites the bytes of one connection, from its first byte."""
        unread = bytearray()

        def rewrite(data: bytes) -> bytes:
            unread.extend(data)
            written = bytearray()
            while (end := unread.find(b"\r\n")) >= 0:
                line = bytes(unread[: end + 2])
                head = ANY_MESSAGE.fullmatch(line)
                size = len(line) + (int(head[1]) + 2 if head else 0)
                if len(unread) < size:
                    break
                payload = bytes(unread[len(line) : size])
                del unread[:size]
                written += self._rewritten(line, payload[:-2]) + payload[-2:] if head else line
            return bytes(written)

        return rewrite

    def _rewritten(self, line: bytes, payload: bytes) -> bytes:
        found = MESSAGE.fullmatch(line)
        kind = found[2].decode() if found else ""
        if found is None or kind not in DECODERS:
            return line + payload
        num_header_bytes = int(found[3]) if found[1] else 0
        headers, data = payload[:num_header_bytes], payload[num_header_bytes:]
        message = DECODERS[kind](data)
        changed = self._release(message)
        self.counts[kind] += changed != data
        start = line[: found.start(3) if found[1] else found.start(4)]
        sizes = b"%d %d" % (len(headers), len(headers) + len(changed)) if found[1] else b"%d" % len(changed)
        return start + sizes + b"\r\n" + headers + changed


@pytest.mark.proves("P12")
@pytest.mark.parametrize(("release", "shape"), list(zip(RELEASES, reversed(SHAPES), strict=True)))
async def test_a_fleet_of_two_releases_has_the_same_results(
    nats_url: str, fleet: str, release: str, shape: str
) -> None:
    """With workers and a client of other releases, results are the same as without them, and commands are applied."""
    load = await Load.mixed(15, CONFIG)
    for_client, for_worker = Rewriting(RELEASES[release]), Rewriting(RELEASES[release])
    async with (
        observing(nats_url, fleet) as observer,
        filtered(nats_url, fleet, shape, CONFIG, client=for_client.filter, workers=for_worker.filter) as (running, rb),
    ):
        results = await load.run(rb, legs=len(running.workers))
        ledger = await rb.fleet.pause()
        assert ledger.is_complete
        assert (await rb.fleet.resume()).is_complete
        stats = rb.stats()

        assert {generation.attempts for generation in results} == {1}
        assert (stats.bad_messages, observer.history.problems) == (0, [])
        assert {"ack", "frame", "presence"} <= set(for_client.counts)
        assert {"client", "link", "req"} <= set(for_worker.counts)
        assert min((for_client.counts + for_worker.counts).values()) > 0
        await observer.check_at_rest()

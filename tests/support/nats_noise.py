"""A filter that drops, duplicates and delays NATS messages, as a path through several servers may do."""

import random
import re
from collections import Counter
from collections.abc import Callable

MESSAGE = re.compile(rb"H?MSG (\S+) .*?(\d+)\r\n")


class NatsNoise:
    """Disturbs some of the messages that a server sends to a client; `filter` makes the filter of one connection.

    Args:
        subjects: regular expression of the subjects to disturb.
        seed: random seed; the same messages give the same result.
        drop: share of messages to drop.
        double: share of messages to send twice.
        delay: share of messages to send after up to three later messages.
    """

    def __init__(
        self, subjects: str, *, seed: int = 0, drop: float = 0.0, double: float = 0.0, delay: float = 0.0
    ) -> None:
        self._subjects = re.compile(subjects.encode())
        self._random = random.Random(seed)
        self._shares = {"dropped": drop, "doubled": double, "delayed": delay}
        self.counts: Counter[str] = Counter()
        """Number of disturbed messages by kind, over all connections."""

    def filter(self) -> Callable[[bytes], bytes]:
        """Return a filter for the bytes of one new connection."""
        unread = bytearray()
        delayed: list[list[int | bytes]] = []

        def apply(message: bytes) -> bytes:
            """Choose the outcome of one message and append the delayed messages that are due."""
            outcome = self._choose()
            due = b"".join(bytes(late[1]) for late in delayed if late[0] == 0)
            delayed[:] = [[int(late[0]) - 1, late[1]] for late in delayed if late[0] != 0]
            if outcome == "delayed":
                delayed.append([self._random.randrange(3), message])
            return {"dropped": b"", "delayed": b"", "doubled": message * 2}.get(outcome, message) + due

        def rewrite(data: bytes) -> bytes:
            unread.extend(data)
            written = bytearray()
            while (end := unread.find(b"\r\n")) >= 0:
                line = bytes(unread[: end + 2])
                head = MESSAGE.fullmatch(line)
                size = len(line) + (int(head[2]) + 2 if head else 0)
                if len(unread) < size:
                    break
                whole = bytes(unread[:size])
                del unread[:size]
                written += apply(whole) if head and self._subjects.search(head[1]) else whole
            return bytes(written)

        return rewrite

    def _choose(self) -> str:
        number = self._random.random()
        for outcome, share in self._shares.items():
            if number < share:
                self.counts[outcome] += 1
                return outcome
            number -= share
        return "passed"

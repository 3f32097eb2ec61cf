"""Presence with numbers that no table and no metric can hold is rejected."""

import msgspec
import pytest

from rollbus.schemas.limits import MAX_COUNT
from rollbus.schemas.presence import WorkerCounters
from rollbus.schemas.weights import PublishedVersion


@pytest.mark.parametrize(
    ("kind", "field"),
    [(WorkerCounters, "requests"), (PublishedVersion, "used_bytes"), (PublishedVersion, "chain_length")],
)
def test_a_count_too_large_for_a_float_is_refused(kind: type[msgspec.Struct], field: str) -> None:
    """A count too large for a float is rejected.

    JSON integers are unbounded, and one worker could break `/metrics` for all.
    """
    largest = msgspec.json.decode(f'{{"version": 1, "{field}": {MAX_COUNT}}}', type=kind)
    assert float(getattr(largest, field)) > 0
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(f'{{"version": 1, "{field}": 1{"0" * 400}}}', type=kind)

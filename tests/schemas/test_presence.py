"""What a worker announces: numbers that no table and no metric can hold are refused."""

import msgspec
import pytest

from rollbus.schemas.limits import MAX_COUNT
from rollbus.schemas.presence import WorkerCounters
from rollbus.schemas.weights import PublishedVersion


@pytest.mark.parametrize(
    ("kind", "field"),
    [(WorkerCounters, "requests"), (PublishedVersion, "used_bytes"), (PublishedVersion, "chain_length")],
)
def test_a_count_that_becomes_no_float_is_refused(kind: type[msgspec.Struct], field: str) -> None:
    """One worker that lies would make `/metrics` fail for all: JSON integers have no end."""
    largest = msgspec.json.decode(f'{{"version": 1, "{field}": {MAX_COUNT}}}', type=kind)
    assert float(getattr(largest, field)) > 0
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(f'{{"version": 1, "{field}": 1{"0" * 400}}}', type=kind)

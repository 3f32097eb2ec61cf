"""Checks that the buckets of published weights have room for two anchors and the deltas between them."""

from collections.abc import AsyncIterator, Iterable

from ....bus.control.chain_key import ChainKey, read_chain
from ....bus.nats.connection import Connection
from ....bus.protocol.weights.chain import needed_for_chain
from ....schemas.errors import BusBroken, ControlError
from ..byte_counts import size
from .findings import Finding, ok, warn

__all__ = ["examine_published"]


async def examine_published(nats: Connection, fleet: str, models: Iterable[str]) -> AsyncIterator[Finding]:
    """Check the bucket of each model with published weights."""
    for model in sorted(models):
        check = f"published weights of {model}"
        try:
            record = await read_chain(nats, fleet, model)
            if record is None or not record.links:
                continue
            state = await ChainKey(nats, fleet, model).bucket_state()
        except (BusBroken, ControlError) as error:
            yield warn(check, str(error), "run this again with the credentials of an admin or of its publisher")
            continue
        needed = needed_for_chain(record.links)
        found = (
            f"version {record.links[-1].version}, {size(state.used)} used of {size(state.limit)}; two anchors and the "
            f"deltas between them need {size(needed)}"
        )
        if needed <= state.limit:
            yield ok(check, found)
        else:
            yield warn(
                check,
                found,
                f"rollbus make-queue {model} --upload-bytes {needed}; until then all versions are deltas, and a later "
                "publication fails",
            )

"""Formats the published weights of a model as a table and as JSON."""

import math
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import msgspec

from ...bus.protocol.weights.chain import chain_length
from ...schemas.manifest import ChainRecord, Link
from .console import size

COLUMNS = ("version", "kind", "anchor", "delta", "recorded", "workers", "objects")
NONE = "-"


class ModelWeights(NamedTuple):
    """The published weights of one model."""

    record: ChainRecord
    age_s: float
    """Seconds since the record was stored, by the server's clock. Infinite without a record."""
    used: int
    """Bytes in the bucket."""
    limit: int
    """Maximum bytes of the bucket."""
    recorded: Set[str]
    """Folders that the desired state names."""
    workers: Mapping[int, list[str]]
    """Ids of the live workers that serve each version."""


def head_line(weights: ModelWeights) -> str:
    """Return a line with the publisher, the bytes in the bucket and the length of the chain."""
    record = weights.record
    holder = "no publisher"
    if record.holder is not None:
        holder = f"published by {record.holder.publisher} (heard {weights.age_s:.0f} s ago)"
    limit = f" of {size(weights.limit)}" if weights.limit < 2**60 else ""
    length = f"{chain_length(record.links)} versions after the last anchor"
    return f"{record.model}: {holder}, epoch {record.epoch}, {size(weights.used)}{limit} used, {length}"


def weights_rows(weights: ModelWeights) -> list[list[str]]:
    """Return the cells of `COLUMNS` for each version, the newest last."""
    newest = {link.version: link.objects for link in weights.record.links}
    return [
        [
            str(link.version),
            _kind(link),
            NONE if link.anchor_bytes is None else size(link.anchor_bytes),
            NONE if link.delta_bytes is None else size(link.delta_bytes),
            "yes" if link.objects in weights.recorded else NONE,
            # Workers publish only the number of their version. It means the last published version of that number.
            ", ".join(sorted(weights.workers.get(link.version, ()))) or NONE
            if newest[link.version] == link.objects
            else NONE,
            link.objects,
        ]
        for link in weights.record.links
    ]


def weights_as_json(weights: ModelWeights) -> dict[str, Any]:
    """Return the published weights as a JSON object."""
    record = weights.record
    return {
        "model": record.model,
        "epoch": record.epoch,
        "publisher": None if record.holder is None else record.holder.publisher,
        "renewed_s": None if math.isinf(weights.age_s) else round(weights.age_s, 3),
        "used_bytes": weights.used,
        "limit_bytes": weights.limit,
        "chain_length": chain_length(record.links),
        "versions": [
            {
                **msgspec.to_builtins(link),
                "kind": _kind(link),
                "recorded": link.objects in weights.recorded,
                "workers": sorted(weights.workers.get(link.version, ())),
            }
            for link in record.links
        ],
    }


def _kind(link: Link) -> str:
    if link.anchor_bytes is None:
        return "delta"
    return "anchor" if link.delta_bytes is None else "anchor, delta"

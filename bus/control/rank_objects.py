"""Objects that ranks other than 0 have stored, as their lists name them and as the folder describes them."""

from ...schemas.chain import RankObject
from ..objects.layout import ObjectInfo, ObjectOptions

__all__ = ["as_info", "as_rank_object"]


def as_rank_object(info: ObjectInfo) -> RankObject:
    """Return an object as a list names it."""
    return RankObject(
        name=info.name,
        nuid=info.nuid,
        size=info.size,
        chunks=info.chunks,
        digest=info.digest,
        mtime=info.mtime,
        part_bytes=0 if info.options is None else info.options.max_chunk_size,
    )


def as_info(bucket: str, given: RankObject) -> ObjectInfo:
    """Return an object as the folder describes it."""
    return ObjectInfo(
        name=given.name,
        bucket=bucket,
        nuid=given.nuid,
        size=given.size,
        chunks=given.chunks,
        digest=given.digest,
        mtime=given.mtime,
        options=ObjectOptions(max_chunk_size=given.part_bytes),
    )

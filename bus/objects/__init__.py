"""Checkpoints and adapters in NATS's object store, in the layout of `nats object`.

A folder is stored as the objects `<prefix>/<path of the file>` of a bucket. Its source is written `<bucket>/<prefix>`.
"""

from .catalog import NO_LIMIT, BucketState, delete_prefix, ensure_bucket, list_objects
from .layout import ObjectInfo
from .reader import FolderReader, ObjectReader
from .writer import put_folder, sign_folder

__all__ = [
    "NO_LIMIT",
    "BucketState",
    "FolderReader",
    "ObjectInfo",
    "ObjectReader",
    "delete_prefix",
    "ensure_bucket",
    "list_objects",
    "put_folder",
    "sign_folder",
]

"""The ids of a publication's object chunks.

They contain the tag of the folder, which identifies leftovers of a killed publisher.
"""

from typing import Final

from nats.nuid import NUID

__all__ = ["new_part_id", "part_tag"]

TAG: Final = "rb"
"""Prefix of the ids of a publication's object chunks. The tag of the folder follows."""
TAGGED_CHARS: Final = 32
"""Characters of an id with a tag. The ids of other programs have 22."""


def new_part_id(tag: str, nuids: NUID) -> str:
    """Return an id for object chunks of the folder with this tag."""
    return f"{TAG}{tag}{nuids.next().decode()[: TAGGED_CHARS - len(TAG) - 8]}"


def part_tag(nuid: str) -> str | None:
    """Return the tag of the folder that an id belongs to; None: the id is not of a publication."""
    return nuid[len(TAG) : len(TAG) + 8] if len(nuid) == TAGGED_CHARS and nuid.startswith(TAG) else None

"""The ids of a publication's parts: they bear the tag of its folder, so that what a killed publisher left is found."""

from typing import Final

from nats.nuid import NUID

__all__ = ["new_part_id", "part_tag"]

TAG: Final = "rb"
"""Begins the ids of a publication's parts; the tag of its folder follows."""
TAGGED_CHARS: Final = 32
"""Characters of such an id. The ids that other programs make have 22."""


def new_part_id(tag: str, nuids: NUID) -> str:
    """Return an id for parts of the folder with this tag."""
    return f"{TAG}{tag}{nuids.next().decode()[: TAGGED_CHARS - len(TAG) - 8]}"


def part_tag(nuid: str) -> str | None:
    """Return the tag of the folder to which parts belong; None: they are not those of a publication."""
    return nuid[len(TAG) : len(TAG) + 8] if len(nuid) == TAGGED_CHARS and nuid.startswith(TAG) else None

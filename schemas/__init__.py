"""What crosses the wire: structs, codecs, limits, error codes. Needs only the standard library, msgspec and numpy."""

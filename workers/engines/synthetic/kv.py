"""The KV of a prompt between two synthetic engines: what was computed, in place of the computed.

Nothing is kept anywhere: all that a real connector would fetch is in its parameters. So two engines may be in one
process or in two, and nothing is left behind.
"""

import msgspec

from workers.engines.synthetic.cache import BLOCK_TOKENS

__all__ = ["Kv"]


class Kv(msgspec.Struct, frozen=True, kw_only=True):
    """Of one prompt."""

    num_tokens: int
    """Of the prompt."""
    context: int
    """A hash of them, in order."""
    weights: int
    """Of the model, with its adapter, that computed it."""

    def num_loaded(self, prompt_len: int) -> int:
        """How many tokens of a prompt that begins with this one come from it: whole blocks, and never the last."""
        return min(self.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS, prompt_len - 1)

    def encode(self) -> bytes:
        """As a connector's parameters."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, params: bytes) -> "Kv":
        """From a connector's parameters.

        Raises:
            DecodeError, UnicodeDecodeError, RecursionError: they are another connector's; see `MALFORMED`.
        """
        return msgspec.msgpack.decode(params, type=cls)

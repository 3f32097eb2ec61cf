"""The names of a request's fields, and what callers mean by the names of other libraries."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from . import limits
from .checks import describe
from .errors import InvalidRequest
from .explain import nearest

__all__ = ["NamedFields", "check_names"]

MEANT: Final[Mapping[str, str]] = {
    "prompt": "prompt_token_ids",
    "prompts": "prompt_token_ids",
    "input_ids": "prompt_token_ids",
    "token_ids": "prompt_token_ids",
    "messages": "prompt_token_ids of the rendered chat; the HTTP service renders chats",
    "stop": "stop_token_ids; the HTTP service takes stop strings",
    "stop_strings": "stop_token_ids; the HTTP service takes stop strings",
    "eos_token_id": "stop_token_ids",
    "bad_words": "bad_words_token_ids",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, which does not count the prompt",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "do_sample": "temperature, 0 for greedy",
    "structured_outputs": "extra={'structured_outputs': ...}",
    "sampling_params": "sampling",
    "timeout": "timeout_s",
    "lora_request": "lora",
    "adapter": "lora",
}
"""Names of other libraries, each with the name here."""


_kinds: list["NamedFields"] = []


class NamedFields(msgspec.StructMeta):
    """Makes the constructor of a struct reject unknown names as `InvalidRequest`, with the name that was meant."""

    def __init__(self, *args: Any, **config: Any) -> None:
        """Remember the struct, for errors about a field of another one."""
        super().__init__(*args, **config)
        _kinds.append(self)

    def __call__(self, *args: Any, **fields: Any) -> Any:
        """Create the struct.

        Raises:
            InvalidRequest: a field is unknown or has a wrong value.
            TypeError: a field is missing, or is given without its name.
        """
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            check_names("", fields, self.__struct_fields__)
            if args:
                name = self.__struct_fields__[0]
                raise TypeError(f"{self.__name__} takes its fields by name, such as {name}=...") from None
            raise


def check_names(where: str, given: Collection[Any], known: Collection[str]) -> None:
    """Check that all names are known.

    Args:
        where: begins the name of the field in the error, such as `sampling.`.

    Raises:
        InvalidRequest: a name is unknown. The error suggests the name that was meant.
    """
    for name in given:
        if name not in known:
            shown = name if isinstance(name, str) and len(name) <= limits.MAX_NAME_CHARS else describe(name)
            problem = f"is unknown{_advice(shown, known)}"
            raise InvalidRequest(field=f"{where}{shown}", problem=problem, allowed=", ".join(known))


def _advice(name: str, known: Collection[str]) -> str:
    owner = next((kind.__name__ for kind in _kinds if name in kind.__struct_fields__), None)
    if owner is not None:
        return f" (it is a field of {owner})"
    if name in MEANT:
        return f" (use {MEANT[name]})"
    return nearest(name, known)

"""The loaded weights and adapters decide which requests share cached prefixes."""

from typing import TYPE_CHECKING, cast

import pytest

from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.vllm.loads import LoadSerials, VllmAdapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


def salt(loaded: LoadSerials, user: str | None = None, lora: str | None = None) -> str:
    """Return the salt of a request."""
    return loaded.salt_of(GenerateRequest(prompt_token_ids=[1], cache_salt=user, lora=lora))


def load(loaded: LoadSerials, name: str) -> None:
    """Load an adapter."""
    adapter = VllmAdapter(version=1, serial=loaded.new_serial(), lora_request=cast("LoRARequest", None))
    loaded.adapters[name] = adapter


@pytest.mark.proves("P80")
def test_requests_share_a_salt_only_with_equal_weights_adapter_and_user_salt() -> None:
    """Requests share a salt only if they have the same weights, adapter load and user salt.

    This holds for all characters in a user's salt.
    """
    loaded = LoadSerials()
    salts = [salt(loaded), salt(loaded, "a"), salt(loaded, "0:a"), salt(loaded, ":")]
    loaded.replace_weights()
    salts += [salt(loaded), salt(loaded, "a"), salt(loaded, "0:a")]
    load(loaded, "mine")
    salts += [salt(loaded, lora="mine"), salt(loaded, "a", lora="mine")]
    load(loaded, "mine")
    salts += [salt(loaded, lora="mine")]

    assert len(set(salts)) == len(salts)
    assert salt(loaded, "a") == salts[5]


def test_adapter_that_is_not_loaded_is_refused() -> None:
    """A request for an adapter that is not loaded is rejected, with the names of the loaded adapters."""
    loaded = LoadSerials()
    load(loaded, "mine")

    with pytest.raises(InvalidRequest, match="'other' is not loaded on this worker; allowed: mine"):
        salt(loaded, lora="other")

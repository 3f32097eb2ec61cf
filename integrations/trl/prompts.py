"""Converts prompts and sampling options of TRL into those of rollbus."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_SEED
from ...schemas.sampling import SamplingParams

__all__ = ["sampling_of", "seeded", "token_ids_of"]

OWN: Final = frozenset({"n", "logprobs"})
"""Fields that this package sets: TRL repeats the prompt for each sample, and needs a log probability for each token."""


def token_ids_of(
    prompts: Sequence[Any], tokenizer: Any, template: str | None = None, options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the token ids of prompts, as TRL's own trainers compute them.

    Args:
        prompts: only strings, or only conversations, which are lists of messages.
        tokenizer: transformers tokenizer of the model.
        template: chat template. None: the template of the tokenizer.
        options: further arguments of the template.

    Raises:
        InvalidRequest: a message has content other than text, such as an image.
    """
    prompts = list(prompts)
    if isinstance(prompts[0], str):
        return list(tokenizer(text=prompts)["input_ids"])
    for message in (message for prompt in prompts for message in prompt):
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise InvalidRequest(field="prompt", problem="has a message with content other than text", allowed="text")
    rendered = tokenizer.apply_chat_template(
        conversation=prompts,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(options or {}),
    )
    return list(rendered["input_ids"])


def sampling_of(config: Any, eos_token_ids: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters of a `GRPOConfig`, without a seed: with one, answers of a lost worker start over.

    Raises:
        InvalidRequest: a value is out of range, or `generation_kwargs` has a name that is not in `SamplingParams`.
    """
    options: dict[str, Any] = {
        "max_tokens": config.max_completion_length,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or 0,
        "min_p": config.min_p or 0.0,
        "repetition_penalty": config.repetition_penalty,
        "stop_token_ids": list(eos_token_ids),
    }
    options |= config.generation_kwargs or {}
    allowed_names = [name for name in SamplingParams.__struct_fields__ if name not in OWN]
    unknown = sorted(options.keys() - set(allowed_names))
    if unknown:
        allowed = f"these fields of rollbus.SamplingParams: {', '.join(allowed_names)}"
        raise InvalidRequest(field="generation_kwargs", problem=f"has {unknown[0]!r}", allowed=allowed)
    return SamplingParams(**options)


def seeded(sampling: SamplingParams, serial: int) -> SamplingParams:
    """Return `sampling` for one of many requests. If it has a seed, each request gets another seed.

    With the same seed, all answers to a prompt would be equal.
    """
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + serial) % (MAX_SEED + 1))

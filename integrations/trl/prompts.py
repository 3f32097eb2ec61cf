"""What TRL says of prompts and sampling, in rollbus's words."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_SEED
from ...schemas.sampling import SamplingParams

__all__ = ["sampling_of", "seeded", "token_ids_of"]

OWN: Final = frozenset({"n", "logprobs"})
"""Fields that are set here: TRL repeats the prompt for each sample, and takes the logprob of each sampled token."""


def token_ids_of(
    prompts: Sequence[Any], tokenizer: Any, template: str | None = None, options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the token ids of prompts, as TRL's own trainers make them.

    Args:
        prompts: all strings, or all conversations: lists of messages.
        tokenizer: transformers' tokenizer of the model.
        template: of conversations; None: the tokenizer's.
        options: further arguments of the template.

    Raises:
        InvalidRequest: a message has images.
    """
    prompts = list(prompts)
    if isinstance(prompts[0], str):
        return list(tokenizer(text=prompts)["input_ids"])
    for message in (message for prompt in prompts for message in prompt):
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise InvalidRequest(field="prompt", problem="has a message with an image, or the like", allowed="text")
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
    """Return how a `GRPOConfig` samples. There is no seed: with one, a lost worker's answers would start over.

    Raises:
        InvalidRequest: a value is out of range, or `generation_kwargs` has a name that `SamplingParams` has not.
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
    """Return `sampling` for one of many requests: a seed, where one is asked for, is another one for each.

    With the same seed all answers to a prompt would be the same one.
    """
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + serial) % (MAX_SEED + 1))

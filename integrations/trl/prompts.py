"""What TRL says of prompts and sampling, in rollbus's words."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...schemas.errors import InvalidRequest
from ...schemas.sampling import SamplingParams

__all__ = ["sampling_of", "token_ids_of"]


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
        if not isinstance(message.get("content"), str | None):
            raise InvalidRequest(field="prompt", problem="has a message with parts, as images have", allowed="text")
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
    unknown = sorted(options.keys() - set(SamplingParams.__struct_fields__))
    if unknown:
        allowed = f"the fields of rollbus.SamplingParams: {', '.join(SamplingParams.__struct_fields__)}"
        raise InvalidRequest(field="generation_kwargs", problem=f"has {unknown[0]!r}", allowed=allowed)
    return SamplingParams(**options)

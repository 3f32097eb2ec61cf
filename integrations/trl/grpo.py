"""TRL's `GRPOTrainer` with a fleet: a `rollout_func` for completions, and a callback that publishes the policy."""

import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import count, groupby
from types import TracebackType
from typing import Any, Final, Self

from accelerate.utils import broadcast_object_list
from msgspec.structs import replace
from transformers import TrainerCallback

from ... import sync
from ...bus.client.generation import Generation
from ...schemas.checks import check_int
from ...schemas.chunk import FinishReason
from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_SEED
from ...schemas.request import GenerateRequest
from ...schemas.sampling import SamplingParams
from ..publisher import PolicyPublisher

MAX_EVERY = 1_000_000
OWN: Final = frozenset({"n", "logprobs"})
"""Fields that this package sets: TRL repeats the prompt for each sample, and needs a log probability for each token."""
MAX_STOPS: Final = 16
"""Maximum number of interruptions in one step, for example by `pause --mode abort`. After that, an interrupted answer
is kept as it is."""


class PublishPolicy(PolicyPublisher, TrainerCallback):  # type: ignore[misc] # transformers is not read by mypy
    """Publishes the policy at the start of training and after every k-th optimizer step. Training waits for it.

        GRPOTrainer(model, callbacks=[PublishPolicy(url, model="policy", checkpoint=folder)], ...)

    Afterwards the fleet computes with these weights, and every token has their version. Only changes are transferred.
    Rank 0 publishes, and the other ranks wait. If rank 0 cannot publish, training ends on all ranks. The model must be
    whole on rank 0: use one process, or DDP.

    Args:
        url: URL of the NATS server. None: as in `rollbus.connect`.
        every: optimizer steps between two versions (default: 1).
        settings: further arguments of `PolicyPublisher`: `model`, `checkpoint`, and arguments of `rollbus.connect`.

    Attributes:
        version: version of the fleet. None before training, and on ranks other than 0.
    """

    def __init__(self, url: str | None = None, *, every: int = 1, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._every = check_int("every", every, 1, MAX_EVERY)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy at the start of training."""
        self._publish_from(kwargs["model"], state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy after every k-th step."""
        if state.global_step % self._every == 0:
            self._publish_from(kwargs["model"], state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Release the lease."""
        self.close()

    def _publish_from(self, model: Any, state: Any) -> None:
        is_published = False
        try:
            if state.is_world_process_zero:
                self.publish_model(getattr(model, "module", model))
            is_published = True
        finally:
            # Report a failure too, because the other ranks would wait for this rank forever.
            [is_published] = broadcast_object_list([is_published])
        if not is_published:
            raise RuntimeError("rank 0 has not published the policy; see the error of rank 0")


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


class Rollouts:
    """A `rollout_func`: `GRPOTrainer(model, rollout_func=Rollouts("nats://127.0.0.1:4222"), ...)`.

    Equal prompts in a row are one group. The fleet computes their prompt once if a worker has room for the group. Each
    process of a distributed trainer has its own `Rollouts` and sends its own prompts. It connects at the first call. To
    close the connection, use `with`, call `close`, or end the process.

    In addition to the required values, it returns `weight_versions`, a list of ints for each completion. For a model
    with experts, it also returns `routed_experts`, u1|u2[Lp + G - 1, num_layers, top_k]. Reward functions receive both.

    Args:
        url: URL of the NATS server. None: as in `rollbus.connect`.
        model: served name of the model. None: the only model of the fleet.
        lora: name of the adapter. None: no adapter.
        timeout_s: seconds for each completion. None: the default of `GenerateRequest`.
        options: further arguments of `rollbus.connect`.

    Attributes:
        generations: results of the last call, in the order of its prompts.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        lora: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        self._url = url
        self._model = model
        self._lora = lora
        self._timeout_s = timeout_s
        self._options = options
        self._lock = threading.Lock()
        self._exits = ExitStack()
        self._client: sync.BlockingClient | None = None
        self._serials = count()
        self.generations: Sequence[Generation] = ()

    def __repr__(self) -> str:
        """Return one line with the state."""
        return f"<Rollouts model={self._model} {'not connected' if self._client is None else repr(self._client)}>"

    def __enter__(self) -> Self:
        """Connect now. Without `with`, the first call connects."""
        self._connected()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection. The next call opens a new connection."""
        with self._lock:
            self._client = None
            self._exits.close()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return completions in the form that `GRPOTrainer` requires.

        Raises:
            InvalidRequest: a prompt has images, the trainer has tools, or its configuration is not supported.
            RequestError: a completion failed.
            BusBroken: no server answers.
        """
        if trainer.tools:
            allowed = "none: TRL's tool loop generates without this function"
            raise InvalidRequest(field="tools", problem="are set", allowed=allowed)
        prompt_ids = token_ids_of(
            prompts, trainer.processing_class, trainer.chat_template, trainer.chat_template_kwargs
        )
        sampling = sampling_of(trainer.args, trainer.eos_token_ids)
        ranks = trainer.accelerator
        requests = [
            GenerateRequest(
                prompt_token_ids=ids,
                # The samples of a group may be on several ranks.
                sampling=seeded(sampling, next(self._serials) * ranks.num_processes + ranks.process_index),
                model=self._model,
                lora=self._lora,
                timeout_s=self._timeout_s,
                group_id=group_id,
            )
            for ids, group_id in _groups(prompt_ids)
        ]
        self.generations = self._whole(self._answers(requests))
        return _as_trl(prompt_ids, self.generations)

    def _answers(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return the answers to requests, in the order of the requests."""
        found: dict[str, Generation] = {}
        # Close the iterator here, so that a failed step leaves no request open: its error keeps the iterator alive.
        with closing(self._connected().complete_many(requests, max_in_flight=len(requests))) as generations:
            for generation in generations:
                if generation.error is not None:
                    raise generation.error
                found[generation.request_id] = generation
        return [found[request.request_id] for request in requests]

    def _whole(self, answers: list[Generation]) -> list[Generation]:
        """Return complete answers. Answers that an operator interrupted are continued."""
        for _ in range(MAX_STOPS):
            stopped = [i for i, answer in enumerate(answers) if answer.finish_reason is FinishReason.ABORT]
            if not stopped:
                break
            rests = [answers[i].request.continuing(answers[i], inexact="continue") for i in stopped]
            for i, rest in zip(stopped, self._answers(rests), strict=True):
                answers[i] = answers[i].joined(rest)
        return answers

    def _connected(self) -> sync.BlockingClient:
        with self._lock:
            if self._client is None:
                self._client = self._exits.enter_context(sync.connect(self._url, **self._options))
            return self._client


def _groups(prompt_ids: Sequence[list[int]]) -> list[tuple[list[int], str]]:
    """Return each prompt with its group id. Equal prompts in a row are samples of one group."""
    groups = ((list(equal), uuid.uuid4().hex) for _, equal in groupby(prompt_ids))
    return [(ids, group_id) for equal, group_id in groups for ids in equal]


def _as_trl(prompt_ids: list[list[int]], generations: Sequence[Generation]) -> dict[str, list[Any]]:
    logprobs = [generation.logprobs for generation in generations]
    answer: dict[str, list[Any]] = {
        "prompt_ids": prompt_ids,
        "completion_ids": [generation.token_ids.tolist() for generation in generations],
        "logprobs": [[] if found is None else found.tolist() for found in logprobs],
        "weight_versions": [generation.weight_versions.tolist() for generation in generations],
    }
    if all(generation.routed_experts is not None for generation in generations):
        answer["routed_experts"] = [generation.routed_experts for generation in generations]
    return answer

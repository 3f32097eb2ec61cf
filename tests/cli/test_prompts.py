import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.cli.exits import CommandFailed, ExitCode
from rollbus.frontend.cli.generate.inputs import Input, open_input
from rollbus.frontend.cli.generate.rows import Defaults, PromptLine, check_input, parse_prompt, read_prompts
from rollbus.schemas.errors import InvalidRequest


class Letters:
    """A tokenizer that makes one token of each letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: object) -> str:
        return "".join(message["content"] for message in messages)


def parse(line: object, defaults: Defaults | None = None, index: int = 0) -> PromptLine:
    """Parse one line of the input."""
    return parse_prompt(index, json.dumps(line).encode(), defaults or Defaults())


def write(path: Path, *lines: object) -> Input:
    """Write an input file. Strings are written as they are, other values as JSON."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return open_input(str(path))


def test_sampling_parameters_are_beside_the_prompt_or_under_sampling() -> None:
    """Sampling parameters have the same meaning beside the prompt, under `sampling`, or mixed."""
    beside = parse({"prompt_token_ids": [1, 2], "max_tokens": 5, "temperature": 0})
    nested = parse({"prompt_token_ids": [1, 2], "sampling": {"max_tokens": 5, "temperature": 0}})
    mixed = parse({"prompt_token_ids": [1, 2], "max_tokens": 5, "sampling": {"temperature": 0}})

    assert beside.request(None).sampling == nested.request(None).sampling == mixed.request(None).sampling
    assert beside.fingerprint == nested.fingerprint == mixed.fingerprint


def test_text_is_tokenized_when_the_request_is_made() -> None:
    """A text prompt needs a tokenizer, and its request has the token ids."""
    prompt = parse({"prompt": "ab", "routed_experts_prompt_start": 2})

    assert prompt.request(Letters()).prompt_token_ids.tolist() == [97, 98]  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="prompt is text"):
        prompt.request(None)


def test_a_start_of_the_rows_beyond_the_prompt_is_rejected() -> None:
    """A start of the rows beyond a text prompt passes parsing.

    It is rejected with the allowed range after tokenization.
    """
    prompt = parse({"prompt": "ab", "routed_experts_prompt_start": 3})

    with pytest.raises(InvalidRequest, match="routed_experts_prompt_start is 3; allowed: an integer from 0 to 2"):
        prompt.request(Letters())


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        ("{", "the line", "is not JSON"),
        ('{"prompt": "\xff', "the line", "is not JSON"),
        ([1], "the line", "is a list"),
        ("null", "the line", "is None"),
        ({}, "the row", "has no prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids", "are both set"),
        ({"prompt": ""}, "prompt", "is ''"),
        ({"prompt": 5}, "prompt", "is 5"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "has 0 entries"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids[1]", "is -1"),
        ({"prompt": "a", "max_token": 5}, "max_token", "is not an option (did you mean max_tokens?); allowed: "),
        (
            {"prompt": "a", "sampling": {"max_token": 5}},
            "sampling.max_token",
            "is unknown (did you mean max_tokens?); allowed: ",
        ),
        ({"prompt": "a", "sampling": []}, "sampling", "is a list"),
        ({"prompt": "a", "seed": 1, "sampling": {"seed": 1}}, "seed", "is set both beside and under sampling"),
        ({"prompt": "a", "top_p": 0}, "sampling.top_p", "is 0"),
        ({"prompt": "a", "routed_experts_prompt_start": -1}, "routed_experts_prompt_start", "is -1"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: object, field: str, problem: str) -> None:
    """Each mistake is a usage error that names file, line, field and problem."""
    path = tmp_path / "in.jsonl"
    source = write(path, {"prompt": "fine"}, line)

    with pytest.raises(CommandFailed) as caught:
        list(read_prompts(source, Defaults()))

    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).startswith(f"{path} line 2: {field} {problem}")


def test_the_value_of_a_line_takes_precedence_over_its_default() -> None:
    """The value of a line takes precedence over its default, and the other defaults still apply."""
    defaults = Defaults({"model": "m", "timeout_s": 5.0}, {"max_tokens": 7, "seed": 3})
    request = parse({"prompt_token_ids": [1], "max_tokens": 9, "model": "other"}, defaults).request(None)

    assert (request.model, request.timeout_s) == ("other", 5.0)
    assert (request.sampling.max_tokens, request.sampling.seed) == (9, 3)


def test_routed_experts_are_refused_if_the_command_writes_none() -> None:
    """return_routed_experts true in a line is refused if the command writes no routed experts."""
    defaults = Defaults({"return_routed_experts": False})

    assert parse({"prompt_token_ids": [1]}, defaults).request(None).return_routed_experts is False
    with pytest.raises(InvalidRequest, match="return_routed_experts is true"):
        parse({"prompt_token_ids": [1], "return_routed_experts": True}, defaults)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "b"},
        {"max_tokens": 6},
        {"seed": 1},
        {"request_id": "x"},
        {"model": "m"},
        {"cache_salt": "s"},
        {"routed_experts_prompt_start": 1},
        {"return_routed_experts": False},
    ],
)
def test_the_fingerprint_depends_on_fields_that_change_the_result(change: dict[str, object]) -> None:
    """The fingerprint changes with prompt, sampling, model, request id, cache salt and routed experts."""
    line = {"prompt": "a", "max_tokens": 5}

    assert parse(line).fingerprint != parse({**line, **change}).fingerprint


@pytest.mark.parametrize("change", [{"timeout_s": 9}, {"priority": 2}, {"session_id": "s"}, {"group_id": "g"}])
def test_the_fingerprint_ignores_fields_that_do_not_change_the_result(change: dict[str, object]) -> None:
    """The fingerprint ignores time limit, priority, session and group, so that finished results remain usable."""
    line = {"prompt": "a", "max_tokens": 5}

    assert parse(line).fingerprint == parse({**line, **change}).fingerprint


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    """The index of a prompt is the number of its line, and blank lines count."""
    path = write(tmp_path / "in.jsonl", {"prompt": "a"}, "", {"prompt_token_ids": [1]}, "  ")

    assert [prompt.index for prompt in read_prompts(path, Defaults())] == [0, 2]
    assert check_input(path, Defaults(), {}).num_prompts == 2
    assert check_input(path, Defaults(), {}).needs_tokenizer


@pytest.mark.parametrize("given", ["a", "a ", 7, None, ["x", 1], {"k": 1}, "é" * 2000, ""])
def test_ids_of_any_form_are_kept_and_may_repeat(tmp_path: Path, given: object) -> None:
    """A row keeps its id in any of JSON's types. Ids that repeat are counted and are no error."""
    source = write(tmp_path / "in.jsonl", *({"prompt": text, "request_id": given} for text in "abc"))
    prompts = list(read_prompts(source, Defaults()))

    assert [prompt.request_id for prompt in prompts] == (
        ["input-0", "input-1", "input-2"] if given is None else [given] * 3
    )
    assert check_input(source, Defaults(), {}).repeated_ids == (0 if given is None else 2)
    assert len({prompt.fingerprint for prompt in prompts}) == 3


def test_results_of_another_input_are_refused(tmp_path: Path) -> None:
    """A changed or missing line of the input is found before any request is sent."""
    old = write(tmp_path / "old.jsonl", {"prompt": "a"}, {"prompt": "b"})
    finished = {prompt.index: prompt.fingerprint for prompt in read_prompts(old, Defaults())}
    changed = write(tmp_path / "changed.jsonl", {"prompt": "a"}, {"prompt": "c"})
    shorter = write(tmp_path / "shorter.jsonl", {"prompt": "a"})
    longer = write(tmp_path / "longer.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})

    with pytest.raises(CommandFailed, match="line 2 differs from the row of its result"):
        check_input(changed, Defaults(), finished)
    with pytest.raises(CommandFailed, match="lacks 1 of the rows"):
        check_input(shorter, Defaults(), finished)
    assert check_input(longer, Defaults(), finished).num_prompts == 3

# ruff: noqa: RUF001, E501 - the special tokens of DeepSeek have wide characters
"""Small chat templates in the formats of nine families of models, and what their models write."""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from rollbus.frontend.http.chat import template_message
from rollbus.frontend.sessions.joining import ChatTemplate
from rollbus.frontend.tokenization import Tokenizer, load_tokenizer
from tests.http.support import make_byte_level

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class Family:
    """The format of one family."""

    name: str
    specials: tuple[str, ...]
    end: str
    """Token that ends an answer."""
    call: Callable[[str, str], str]
    """Returns the text of a call with a function's name and its arguments as JSON."""
    end_of_call: str = ""
    """Token that ends an answer with a call; empty: `end`."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    opening: str = ""
    """What a model writes before the text of an answer."""
    think: tuple[str, str] = ("", "")
    """Texts around reasoning; empty: the template has none."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    moves_tools: bool = False
    """True if the tools stand before the last message of the user, so that a join differs from the template."""

    @property
    def ends(self) -> tuple[str, str]:
        """The tokens that end an answer without and with a call."""
        return self.end, self.end_of_call or self.end

    def template(self, tools: list[dict[str, Any]] | None = None) -> ChatTemplate:
        """Return the family's template with its tokenizer."""
        return ChatTemplate(
            tokenizer_of(self.name), tools, dict(self.variables), functools.partial(template_message, "messages")
        )

    def writes(self, answer: Mapping[str, Any], *, canonical: bool = True) -> str:
        """Return the text that a model writes for an answer, with the token that ends it.

        Args:
            canonical: False: the JSON of calls has other blanks than the template writes, and text has blanks around.
        """
        reasoning = answer.get("reasoning")
        text = "" if not reasoning else f"{self.think[0]}{reasoning}{self.think[1]}"
        calls = answer.get("tool_calls") or []
        content = answer["content"] or ""
        text += (self.opening if not calls or content else "") + content + ("" if canonical else " ")
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            separators = (", ", ": ") if canonical else (",", ":")
            written = json.dumps(arguments, separators=separators, ensure_ascii=False)
            called = self.call(call["function"]["name"], written)
            text += called if text.strip() or self.name == "gemma" else called.removeprefix("\n")
        return text + self.ends[bool(calls)]


def _arguments_of_glm(name: str, arguments: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
        for key, value in json.loads(arguments).items()
    )
    return f"\n<tool_call>{name}\n{pairs}</tool_call>"


def _chatml_call(name: str, arguments: str) -> str:
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


FAMILIES = (
    Family(
        "qwen3", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", _chatml_call,
        added=("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
        think=("<think>\n", "\n</think>\n\n"),
    ),
    Family("hermes", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", _chatml_call, added=("<tool_call>", "</tool_call>")),
    Family(
        "llama3",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"), "<|eot_id|>",
        lambda name, arguments: f'{{"name": "{name}", "parameters": {arguments}}}', end_of_call="<|eom_id|>",
    ),
    Family(
        "mistral",
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "</s>",
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}", moves_tools=True,
    ),
    Family(
        "deepseek",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
         "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>",
         "<｜tool▁output▁end｜>"), "<｜end▁of▁sentence｜>",
        lambda name, arguments: (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        added=("<think>", "</think>"), think=("", "</think>"), variables={"thinking": True},
    ),
    Family(
        "glm", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), "<|user|>",
        _arguments_of_glm, end_of_call="<|observation|>",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
               "</arg_value>"),
        opening="\n", think=("\n<think>", "</think>"),
    ),
    Family(
        "gemma", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>",
        lambda name, arguments: f"\n```tool_code\n{name}({arguments})\n```",
    ),
    Family(
        "harmony",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"), "<|return|>",
        lambda name, arguments: (
            f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}"
        ),
        end_of_call="<|call|>", opening="<|channel|>final<|message|>",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    Family(
        "kimi",
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
         "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
         "<|tool_calls_section_end|>"), "<|im_end|>",
        lambda name, arguments: (
            f"<|tool_calls_section_begin|><|tool_call_begin|>call-{name}<|tool_call_argument_begin|>{arguments}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
        think=("◁think▷", "◁/think▷"),
    ),
)  # fmt: skip

NAMED = {family.name: family for family in FAMILIES}


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    """Return a byte-level tokenizer with the special tokens of a family, and its template."""
    family, tokenizer = NAMED[name], make_byte_level()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in family.specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        template = (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.end, "chat_template": template}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(Path(folder))

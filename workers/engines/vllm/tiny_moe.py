"""Make a tiny but real mixture-of-experts model on the spot.

    python -m rollbus.workers.engines.vllm.tiny_moe --output DIR

The result is an ordinary Hugging Face checkpoint, a Qwen3-MoE of 2 million random parameters with its tokenizer.
What it writes is noise; how it routes is not: every expert is used and the most likely token is well apart from the
next, so that routing and greedy tokens can be compared between engines.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["VOCAB_SIZE", "Dtype", "make_tiny_moe", "make_tokenizer"]

Dtype = Literal["bfloat16", "float32"]

RECIPE = 2
"""Rises when the same arguments make other files, so that a folder made before is not taken for the current one."""
VOCAB_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16_384,
    # The usual 0.02 makes nearly uniform logits at this width: ties in bfloat16, and experts chosen by rounding.
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "intermediate_size": 256,
}
EMBEDDING_SCALE = 10.0
"""Embeddings of size 1, as in trained models: else what a token is drowns in what the layers add, all tokens of a
text look alike in the last ones, and a few experts get everything."""
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "The river turns north below the old bridge, and the town has followed it for six hundred years.",
    "How many apples are left when three children share a basket of twenty-seven?",
    "A router looks at every token and sends it to a few experts; the others rest.",
    "If the train leaves at 9:45 and the journey takes 130 minutes, when does it arrive?",
    "She wrote the number 4096 on the board, then asked why it was the same as 2 to the power of 12.",
    "Please explain, step by step, what happens to water when it freezes.",
    "The answer is not known, but there are three good reasons to think that it is smaller than one hundred.",
    "def area(width, height):\n    return width * height\n",
    "for index in range(10):\n    print(index, values[index])\n",
    "It rained all night; in the morning the garden was green again and the birds were loud.",
    "What is the capital of the country whose flag has a red circle on a white ground?",
    "The weights of the model change while the questions keep coming, and each answer says which weights it saw.",
    "To make bread you need flour, water, salt and time, and most of all time.",
    "First we count the things that we can see. Then we estimate the things that we cannot.",
    "A message that is sent twice must be read once; a message that is lost must be sent again.",
    "The teacher said that the shortest proof is often the one that nobody tries.",
)


def make_tiny_moe(path: str | Path, *, seed: int = 0, dtype: Dtype = "bfloat16", dense: bool = False) -> Path:
    """Make the model in the folder `path`, which appears complete or not at all; returns it as a `Path`.

    The same arguments make the same bytes. A folder made before with the same arguments is left as it is.

    Args:
        dense: make a tiny Qwen3 without experts instead.

    Raises:
        FileExistsError: `path` holds something else.
    """
    target = Path(path)
    made_with = {"recipe": RECIPE, "seed": seed, "dtype": dtype, "dense": dense}
    # Looked at first: another process may be about to finish the same model.
    is_taken = _is_taken(target)
    if _is_made_with(target, made_with):
        return target
    if is_taken:
        raise FileExistsError(f"{target} exists and is not the model asked for")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make_tokenizer(scratch)
        _save_model(scratch, seed=seed, dtype=dtype, dense=dense)
        _marker(scratch).write_text(json.dumps(made_with))
        _make_readable(scratch)
        try:
            scratch.rename(target)
        except OSError as exc:
            # Another process may have been faster with the same model; anything else that is there stays untouched.
            if not _is_made_with(target, made_with):
                raise FileExistsError(f"{target} exists and is not the model asked for") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def make_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files into `folder`."""
    _save_tokenizer(_train_tokenizer(), folder)


def _marker(folder: Path) -> Path:
    return folder / "tiny_moe.json"


def _make_readable(folder: Path) -> None:
    """Undo the private modes of `mkdtemp` and of safetensors: other users may serve the model."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _is_taken(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def _is_made_with(folder: Path, made_with: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads(_marker(folder).read_text()) == made_with)
    except (OSError, ValueError):
        return False


def _train_tokenizer() -> "Tokenizer":
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens; any bytes can be encoded and come back unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _save_tokenizer(tokenizer: "Tokenizer", folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The name that every release of transformers since 4.0 knows.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": SHAPE["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _save_model(folder: Path, *, seed: int, dtype: Dtype, dense: bool) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    ids = {"eos_token_id": SPECIAL_TOKENS.index(TURN_END), "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT)}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any
        if dense:
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **ids, bos_token_id=None))
        else:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, **ids, bos_token_id=None))
        model.model.embed_tokens.weight.mul_(EMBEDDING_SCALE)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    program = "python -m rollbus.workers.engines.vllm.tiny_moe"
    parser = argparse.ArgumentParser(program, description="Make a tiny MoE model.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="to make; left alone if made before")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--dense", action="store_true", help="a model of the same size without experts")
    options = parser.parse_args(arguments)
    try:
        path = make_tiny_moe(options.output, seed=options.seed, dtype=options.dtype, dense=options.dense)
    except FileExistsError as exc:
        sys.stderr.write(f"tiny_moe: {exc}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

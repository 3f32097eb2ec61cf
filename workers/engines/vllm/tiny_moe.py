"""Creates a tiny but real mixture-of-experts model without a download.

    python -m rollbus.workers.engines.vllm.tiny_moe --output DIR

The result is an ordinary Hugging Face checkpoint: a Qwen3-MoE with 2 million random parameters and a tokenizer. Its
text is noise, but its routing is realistic: it uses every expert. The most likely token is clearly more likely than the
second one. Routed experts and greedy tokens can therefore be compared between engines.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

Dtype = Literal["bfloat16", "float32"]
DTYPES: dict[Dtype, str] = {"bfloat16": "BF16", "float32": "F32"}
"""Dtypes in the notation of safetensors."""

RECIPE = 3
"""Version of the recipe. It increases when the same arguments produce other files, so that an older folder is not
mistaken for the current model."""
MARKER = "tiny_moe.json"
"""File that records the arguments."""
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
    # At this width, the usual 0.02 gives nearly uniform logits: ties in bfloat16, and experts selected by rounding.
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "intermediate_size": 256,
}
EMBEDDING = "model.embed_tokens"
EMBEDDING_SCALE = 10.0
"""Factor for embeddings of size 1, as in trained models. With smaller embeddings, the output of the layers dominates.
All tokens of a text would then be similar in the last layers, and a few experts would receive all of them."""
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
    """Create the model in the folder `path`, and return it as a `Path`. The folder appears complete or not at all.

    The same arguments produce the same bytes. If the folder already has the model of these arguments, it stays
    unchanged.

    Args:
        dense: True: create a tiny Qwen3 without experts.

    Raises:
        FileExistsError: `path` has other content.
    """
    target = Path(path)
    made_with = {"recipe": RECIPE, "seed": seed, "dtype": dtype, "dense": dense}
    if _is_made_with(target, made_with):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make_tokenizer(scratch)
        _save_model(scratch, seed=seed, dtype=dtype, dense=dense)
        (scratch / MARKER).write_text(json.dumps(made_with))
        # Other users can serve the model, whose folder `mkdtemp` made private, with any umask.
        for file in (scratch, *scratch.iterdir()):
            file.chmod(0o755 if file is scratch else 0o644)
        try:
            scratch.rename(target)
        except OSError as exc:
            # Another process may have created the same model first. Only an empty folder is replaced.
            if not _is_made_with(target, made_with):
                raise FileExistsError(f"{target} exists and is not the requested model; choose another folder") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _is_made_with(folder: Path, made_with: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text()) == made_with)
    except (OSError, ValueError):
        return False


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with `VOCAB_SIZE` tokens. It encodes any bytes and decodes them unchanged."""
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
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # Every release of transformers since 4.0 supports this name.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": SHAPE["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _save_model(folder: Path, *, seed: int, dtype: Dtype, dense: bool) -> None:
    """Write the files that transformers would write for a new model. Importing it would take several seconds."""
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if not dense:
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **EXPERTS}
    ids = {"eos_token_id": SPECIAL_TOKENS.index(TURN_END), "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT)}
    (folder / "config.json").write_text(json.dumps({**kind, **SHAPE, **ids, "dtype": dtype}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))
    draws = np.random.default_rng(seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    contents, end = [], 0
    for name, shape in _list_weights(dense).items():
        weight = draws.standard_normal(shape, np.float32) * SHAPE["initializer_range"]
        if name == EMBEDDING:
            weight *= EMBEDDING_SCALE
        elif len(shape) == 1:
            weight = np.ones(shape, np.float32)
        bits = weight.view("<u4")
        if dtype == "bfloat16":
            # The nearest number with the upper half of the bits, and of two the even one.
            bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        contents.append(bits.tobytes())
        begin, end = end, end + bits.nbytes
        header[f"{name}.weight"] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    # The format of safetensors.
    (folder / "model.safetensors").write_bytes(b"".join((len(encoded).to_bytes(8, "little"), encoded, *contents)))


def _list_weights(dense: bool) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights, as in checkpoints of transformers."""
    hidden, head = SHAPE["hidden_size"], SHAPE["head_dim"]
    queries, keys = (head * SHAPE[name] for name in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
        **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (head,)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, hidden)),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    mlps = {"mlp": SHAPE["intermediate_size"]}
    if not dense:
        layer["mlp.gate"] = (EXPERTS["num_experts"], hidden)
        mlps = {f"mlp.experts.{i}": EXPERTS["moe_intermediate_size"] for i in range(EXPERTS["num_experts"])}
    for mlp, width in mlps.items():
        layer |= dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (width, hidden))
        layer[f"{mlp}.down_proj"] = (hidden, width)
    layers = range(SHAPE["num_hidden_layers"])
    return {
        **dict.fromkeys((EMBEDDING, "lm_head"), (VOCAB_SIZE, hidden)),
        **{f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()},
        "model.norm": (hidden,),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    program = "python -m rollbus.workers.engines.vllm.tiny_moe"
    parser = argparse.ArgumentParser(program, description="Create a tiny MoE model.")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder of the model (unchanged if it has this model)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: 0)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the weights (default: bfloat16)"
    )
    parser.add_argument("--dense", action="store_true", help="model of the same size without experts")
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

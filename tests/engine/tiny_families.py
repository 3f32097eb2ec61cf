"""Tiny checkpoints of several model families, with random weights."""

from pathlib import Path
from typing import Any

from rollbus.workers.engines.vllm.tiny_moe import VOCAB_SIZE, make_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
}
GPT2: dict[str, Any] = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}
OPT: dict[str, Any] = {
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 256,
    "init_std": 0.1,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "tie_word_embeddings": True,
}
LATENT: dict[str, Any] = {
    # vLLM's CPU kernel accepts only these sizes.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
SIGMOID: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 2,
    "routed_scaling_factor": 2.5,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied-biases": (
        "Llama",
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2-tied": ("Qwen2", LLAMA | {"tie_word_embeddings": True}),
    "gemma": ("Gemma", LLAMA | {"head_dim": 32, "num_key_value_heads": 1}),
    "gpt2": ("GPT2", GPT2),
    "opt": ("OPT", OPT),
    "phi": ("Phi", LLAMA | {"num_key_value_heads": 4, "intermediate_size": 512}),
    "gpt_neox": ("GPTNeoX", LLAMA | {"num_key_value_heads": 4}),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", LLAMA | EXPERTS | {"intermediate_size": 64}),
    "qwen2_moe-tied": (
        "Qwen2Moe",
        LLAMA | EXPERTS | SHARED,
    ),
    # The experts' inner size is not a multiple of 32, so their kernel pads it.
    "qwen3_moe-padded": ("Qwen3Moe", LLAMA | EXPERTS | {"head_dim": 32, "moe_intermediate_size": 48}),
    # The model copies experts and sinks into its parameters by itself. Each token uses all experts, because rounding to
    # bfloat16 changes the chosen experts.
    "gpt_oss": ("GptOss", LLAMA | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 4}),
    # The mixers read a buffer with the weight of a convolution, which vLLM packs.
    "falcon_h1": (
        "FalconH1",
        LLAMA | {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32},
    ),
    "deepseek_v2": ("DeepseekV2", LLAMA | LATENT),
    "deepseek_v3": ("DeepseekV3", LLAMA | LATENT | SIGMOID),
}
"""Class prefix in transformers and settings, by family."""
HALF = frozenset({"falcon_h1", "gpt_oss"})
"""Families whose CPU kernels accept only bfloat16; tests run the other families in float32."""


def make_family(folder: Path, family: str, *, seed: int) -> Path:
    """Make a checkpoint in `folder` and return it. The same arguments make the same weights."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    prefix, settings = FAMILIES[family]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        config = getattr(transformers, f"{prefix}Config")(**COMMON | settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                # Otherwise all biases would be 0 and all norms 1.
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.to(torch.bfloat16 if family in HALF else torch.float32).save_pretrained(folder)
    make_tokenizer(folder)
    return folder

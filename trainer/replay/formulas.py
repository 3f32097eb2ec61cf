"""The formulas with which routers weigh their chosen experts, by class name. transformers is never imported.

Each router here returns `(logits, weights, ids)`. Its weights are a function of only its logits and ids.
"""

from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from torch import Tensor, nn

__all__ = ["SUPPORTED", "TRANSFORMERS", "Formula", "formula_of"]

TRANSFORMERS: Final = "5.21.1"
"""Oldest tested release for replay. Some earlier releases, such as 5.5, return probabilities in place of logits."""


@dataclass(frozen=True, slots=True)
class Formula:
    """Computes the weights of chosen experts from a router's logits."""

    scores: Literal["softmax", "sigmoid", "softmax of chosen"]
    """Function of a logit: softmax over all experts, sigmoid, or softmax over the chosen experts."""
    renormalise: bool | None = None
    """True: divide by the sum over the chosen experts. None: use the router's `norm_topk_prob`."""
    epsilon: float = 0.0
    """Number added to that sum."""
    scaled: bool = False
    """True: multiply by the router's `routed_scaling_factor`."""

    def weights(self, router: nn.Module, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the weights f[N, K] of experts `ids` i64[N, K] for `logits` f[N, E], as `router` would compute them.

        The result is differentiable in the logits. The operations are those of the routers, so the router's own ids
        give its own weights bit for bit.
        """
        if self.scores == "softmax of chosen":
            chosen = logits.gather(1, ids)
            return torch.softmax(chosen, dim=-1, dtype=chosen.dtype)
        if self.scores == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
        weights = scores.gather(1, ids)
        if router.norm_topk_prob if self.renormalise is None else self.renormalise:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + self.epsilon if self.epsilon else total)
        return weights * cast(float, router.routed_scaling_factor) if self.scaled else weights


_BY_FORMULA: Final[dict[Formula, str]] = {
    Formula("softmax"): "FlexOlmoTopKRouter MellumTopKRouter OlmoeTopKRouter Qwen2MoeTopKRouter Qwen3MoeTopKRouter "
    "Qwen3NextTopKRouter Qwen3OmniMoeThinkerTextTopKRouter Qwen3OmniMoeTalkerTextTopKRouter Qwen4ExpTextTopKRouter",
    Formula("softmax", renormalise=True): "MiniMaxTopKRouter MixtralTopKRouter Qwen3OmniMoeTextTopKRouter "
    "Qwen3VLMoeTextTopKRouter Qwen3_5MoeTopKRouter",
    Formula("softmax", renormalise=False, scaled=True): "DeepseekOcr2TextTopkRouter DeepseekV2TopkRouter "
    "UnlimitedOcrTextTopkRouter",
    Formula("sigmoid", renormalise=True): "MiniMaxM2TopKRouter MiniMaxM3VLTopKRouter Step3p7TopKRouter",
    Formula("sigmoid", epsilon=1e-20, scaled=True): "AXK1TopkRouter BailingHybridTopkRouter DeepseekV32TopkRouter "
    "DeepseekV3TopkRouter Dots1TopkRouter Dots3NoteTextTopkRouter ExaoneMoeTopkRouter Glm4MoeLiteTopkRouter "
    "Glm4MoeTopkRouter Glm4vMoeTextTopkRouter Glm5NextTextTopkRouter GlmMoeDsaTopkRouter HYV4TopkRouter "
    "KimiLinearTopkRouter MiMoV2FlashTopkRouter NemotronHTopkRouter SolarOpenTopkRouter",
    Formula("softmax of chosen"): "GptOssTopKRouter GraniteMoeHybridTopKRouter GraniteMoeSWATopKRouter "
    "GraniteMoeSharedTopKRouter GraniteMoeTopKRouter",
}

SUPPORTED: Final[dict[str, Formula]] = {
    name: formula for formula, names in _BY_FORMULA.items() for name in names.split()
}
"""Formulas of the routers that can be replayed, by class name in transformers."""


def formula_of(kind: type[nn.Module]) -> Formula | None:
    """Return the formula of a router's class, or None for any other class.

    The class that defines `forward` decides, because FSDP and parametrizations put their own class before it.
    """
    return SUPPORTED.get(next(base for base in kind.__mro__ if "forward" in vars(base)).__name__)

"""How each kind of router weighs the experts that it chose, by class name: transformers is never imported.

Every router here returns `(logits, weights, ids)`, and its weights are a function of its logits and ids alone.
"""

from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from torch import Tensor, nn

__all__ = ["SUPPORTED", "TRANSFORMERS", "Formula", "formula_of"]

TRANSFORMERS: Final = "5.21.1"
"""The oldest release that replay is tested with. Some before it, as 5.5, return shares where these return logits."""


@dataclass(frozen=True, slots=True)
class Formula:
    """The weights of chosen experts from a router's logits."""

    scores: Literal["softmax", "sigmoid", "softmax of chosen"]
    """What a logit becomes: its share among all experts, on its own, or its share among the chosen ones."""
    renormalise: bool | None = None
    """Divide by the sum over the chosen experts; None: as the router's `norm_topk_prob` says."""
    epsilon: float = 0.0
    """Added to that sum."""
    scaled: bool = False
    """Times the router's `routed_scaling_factor`."""

    def weights(self, router: nn.Module, logits: Tensor, ids: Tensor) -> Tensor:
        """The weights f[N, K] of experts `ids` i64[N, K] by `logits` f[N, E], as `router` itself would compute them.

        Differentiable in the logits. The operations are the routers' own, so that own ids give own weights to the bit.
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
"""The routers that can be replayed, as transformers names them."""


def formula_of(kind: type[nn.Module]) -> Formula | None:
    """The formula of a router's class, None for any other class.

    What counts is the class that has the `forward`: FSDP and parametrizations put a class of their own before it.
    """
    return SUPPORTED.get(next(base for base in kind.__mro__ if "forward" in vars(base)).__name__)

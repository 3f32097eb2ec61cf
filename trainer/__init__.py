"""Prepares the results of rollbus for training: stitching, packing and router replay. It needs no NATS.

    from rollbus.trainer import Stitcher, pack, replay

    stitcher = Stitcher()
    stitcher.add(prompt_token_ids, generation)
    for batch in pack([stitcher.sample(advantage=1.0)], max_tokens=8192):
        with replay(model, batch.routed_experts):
            logits = model(**batch.model_inputs()).logits

docs/trainer.md shows a whole training step.
"""

from .errors import CheckpointMismatch, PackError, ReplayError, StitchError
from .losses import drop_stale, group_advantages, has_signal, importance_weights, mask_stale, sampler_kl
from .packing import NO_EXPERT, PADDING, MicroBatch, attention_mask, check_packing, pack, segment_indices
from .replay import replay
from .stitching import NOT_SAMPLED, Sample, Stitcher, Turn, stitch_rows

__all__ = [
    "NOT_SAMPLED",
    "NO_EXPERT",
    "PADDING",
    "CheckpointMismatch",
    "MicroBatch",
    "PackError",
    "ReplayError",
    "Sample",
    "StitchError",
    "Stitcher",
    "Turn",
    "attention_mask",
    "check_packing",
    "drop_stale",
    "group_advantages",
    "has_signal",
    "importance_weights",
    "mask_stale",
    "pack",
    "replay",
    "sampler_kl",
    "segment_indices",
    "stitch_rows",
]

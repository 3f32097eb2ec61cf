"""Builds the JSON object that `rollbus experts --json` prints."""

from typing import Any

from ...bus import ExpertAnswers
from ...bus.protocol.telemetry.expert_window import PlaneLoad, imbalance

__all__ = ["answers_as_json"]


def answers_as_json(answers: ExpertAnswers) -> dict[str, Any]:
    """Return all counts and the imbalance of each layer.

    Without a usable answer, return only the asked workers and the reason why each answer is missing.
    """
    window = answers.window
    found: dict[str, Any] = {
        "model": answers.model,
        "workers_total": answers.num_workers,
        "workers_asked": list(answers.asked),
        "workers_answered": [] if window is None else list(window.workers),
        "left_out": answers.left_out,
    }
    if window is None:
        return found
    num_layers, num_experts, top_k = window.shape
    return {
        **found,
        "seconds": window.seconds,
        "num_layers": num_layers,
        "num_experts": num_experts,
        "top_k": top_k,
        "planes": {"prompt": _plane(window.prompt, top_k), "generated": _plane(window.generated, top_k)},
        "versions": [
            {
                "weight_version": version.weight_version,
                "prompt": _plane(version.prompt, top_k),
                "generated": _plane(version.generated, top_k),
            }
            for version in window.versions
        ],
    }


def _plane(plane: PlaneLoad, top_k: int) -> dict[str, Any]:
    found = imbalance(plane.counts, top_k)
    return {
        "computed": plane.computed,
        "seen": plane.seen,
        "counts": plane.counts.tolist(),
        "max_over_mean": found.max_over_mean.round(6).tolist(),
        "entropy": found.entropy.round(6).tolist(),
        "unused": found.unused.tolist(),
        "routes": found.routes.tolist(),
    }

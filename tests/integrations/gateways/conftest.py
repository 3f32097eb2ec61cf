"""Workers that a test may kill and update, and the log probabilities of a checkpoint by Hugging Face."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.real_fleet import RealWorkers

LogProbs = Callable[[Path, list[int]], np.ndarray]


@pytest.fixture
def workers(nats_url: str, callers: tuple[Path, Path], tmp_path: Path) -> Iterator[RealWorkers]:
    """VLLM workers of a fleet that starts with the first of `callers` as version 0."""
    fleet = RealWorkers(nats_url, callers[0], version=0, cache=tmp_path / "cache")
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def logprobs() -> LogProbs:
    """Return a function that computes the log probability of each token of a sequence after the first."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    models = {}

    def compute(checkpoint: Path, token_ids: list[int]) -> np.ndarray:
        if checkpoint not in models:
            models[checkpoint] = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.no_grad():
            logits = models[checkpoint](torch.tensor([token_ids])).logits[0, :-1]
        sampled = torch.tensor(token_ids[1:])[:, None]
        return np.asarray(logits.log_softmax(-1).gather(1, sampled)[:, 0].numpy())

    return compute

from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import ignore, write_adapter, write_checkpoint

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def sources(tmp_path: Path, *, is_own_known: bool = True) -> WeightSources:
    """Sources that allow `tmp_path / "root"`."""
    own = write_checkpoint(tmp_path / "own") if is_own_known else None
    return WeightSources(
        roots=[tmp_path / "root"], own=own, cache=tmp_path / "cache", model="m", worker="w1", objects=None
    )


async def refusal(checked: WeightSources, path: Path) -> ControlError:
    """Return the error for an adapter that must be rejected."""
    with pytest.raises(ControlError) as raised:
        await checked.adapter(WeightSource(path=str(path)), ignore)
    return raised.value


async def test_a_valid_adapter_is_accepted_with_its_real_path(tmp_path: Path) -> None:
    """An adapter is accepted if its pairs fit weights of the base model."""
    folder = write_adapter(tmp_path / "root" / "lora")

    assert await sources(tmp_path).adapter(WeightSource(path=str(folder)), ignore) == folder


async def test_an_adapter_outside_the_roots_is_refused(tmp_path: Path) -> None:
    """The roots of weights apply to adapters too."""
    (tmp_path / "root").mkdir()

    error = await refusal(sources(tmp_path), write_adapter(tmp_path / "lora"))

    assert error.code is ControlCode.PATH_REFUSED


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {f"{Q.replace('q_proj', 'x.q_proj')}.lora_{side}.weight": (2, 2) for side in "AB"},
            "is for another base: it has 'model.layers.0.self_attn.x.q_proj', which the worker's model does not have",
        ),
        (
            {f"{Q}.lora_A.weight": (2, 4), f"{Q}.lora_B.weight": (7, 2)},
            "'model.layers.0.self_attn.q_proj' makes [7, 4]; expected: [6, 4], as the worker's model",
        ),
    ],
)
async def test_an_adapter_of_another_base_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    """Modules that the base lacks or has in another shape are named.

    Without a checkpoint of the worker, they are accepted.
    """
    folder = write_adapter(tmp_path / "root" / "lora", shapes=shapes)

    error = await refusal(sources(tmp_path), folder)

    assert error.code is ControlCode.BAD_SOURCE
    assert said in error.message
    unknown = sources(tmp_path, is_own_known=False)
    assert await unknown.adapter(WeightSource(path=str(folder)), ignore) == folder


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({f"{Q}.lora_A.weight": (2, 4)}, "has only lora_A of 'model.layers.0.self_attn.q_proj'"),
        ({f"{Q}.lora_A.weight": (2, 4), f"{Q}.lora_B.weight": (6, 1)}, "their ranks differ"),
        ({f"{Q}.lora_A.weight": (3, 4), f"{Q}.lora_B.weight": (6, 3)}, "with the rank 3; expected: 2"),
        ({f"{Q}.lora_A.weight": (2, 4, 1), f"{Q}.lora_B.weight": (6, 2)}, "expected: a matrix of floats"),
        ({f"{Q}.weight": (2, 4)}, f"has the tensor '{Q}.weight'; expected: names that end in .lora_A.weight"),
        (
            {"base_model.model.model.norm.lora_A.weight": (2, 4), "base_model.model.model.norm.lora_B.weight": (4, 2)},
            "has 'model.norm', which is none of the target_modules",
        ),
        ({}, "has no tensors"),
    ],
)
async def test_an_adapter_that_contradicts_itself_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    """Incomplete pairs, different ranks, and tensors that are no LoRA are named, also if the base is unknown."""
    folder = write_adapter(tmp_path / "root" / "lora", shapes=shapes)

    assert said in (await refusal(sources(tmp_path, is_own_known=False), folder)).message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "has peft_type='IA3'; expected: 'LORA'"),
        ({"r": 0}, "adapter_config.json does not decode"),
        ({"r": 513}, "adapter_config.json does not decode"),
        ({"r": "2"}, "adapter_config.json does not decode"),
        ({"target_modules": []}, "has no target_modules"),
        ({"target_modules": None}, "adapter_config.json does not decode"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save=['lm_head']"),
        ({"use_dora": True}, "has use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern={'q_proj': 2}; expected: plain LoRA without it"),
        ({"alpha_pattern": {"q_proj": 8}}, "has alpha_pattern={'q_proj': 8"),
        ({"bias": "all"}, "has bias='all'"),
    ],
)
async def test_an_adapter_of_another_kind_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """Settings that engines do not support, or would apply wrongly, are rejected. The error names the setting."""
    folder = write_adapter(tmp_path / "root" / "lora", **config)

    assert said in (await refusal(sources(tmp_path), folder)).message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_missing_file_of_an_adapter_is_named(tmp_path: Path, name: str) -> None:
    """An adapter needs both of its files."""
    folder = write_adapter(tmp_path / "root" / "lora")
    (folder / name).unlink()

    assert f"{name} is missing" in (await refusal(sources(tmp_path), folder)).message

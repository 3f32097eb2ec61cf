"""SkyRL's own client, with `rollbus.integrations.skyrl`, on synthetic workers."""

import functools
from pathlib import Path

from tests.http.support import control_http
from tests.integrations.support import find_python, needs, run_program

pytestmark = needs("skyrl")
PROGRAM = Path(__file__).parent / "programs" / "client.py"
MEMBERS = (
    *("chat_completion", "completion", "finish_session", "generate", "get_endpoint_url", "get_world_size"),
    *("load_lora_adapter", "model_name", "pause_generation", "render_chat_completion", "reset_prefix_cache"),
    *("resume_generation", "sleep", "teardown", "update_named_weights", "wake_up"),
)
"""Abstract members of the released interface. If it differs, look at each new member before the bound is raised."""


async def test_the_client_with_versions_implements_the_released_interface(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """Its answers have rows, log probabilities and the version of each token, and its commands succeed."""
    serve = functools.partial(control_http, nats_url, fleet, tmp_path)
    async with serve(2) as c:
        seen = await run_program(*(PROGRAM, c.http.url, "synthetic", c.root / "adapter"), python=find_python("skyrl"))

    assert seen["members"] == list(MEMBERS)
    assert seen["missing"] == []
    lengths = [len(ids) for ids in seen["ids"]]
    assert [shape[0] for shape in seen["shapes"]] == [4 + lengths[0] - 1, 3 - 1 + lengths[1] - 1]
    assert seen["dtypes"] == ["uint8", "uint8"]
    assert [len(each) for each in seen["logprobs"]] == lengths
    assert [[len(turn) for turn in turns] for turns in seen["versions"]] == [
        [a, len(b)] for a, b in zip(lengths, seen["adapted"], strict=True)
    ]
    assert {version for turns in seen["versions"] for version in turns[0]} == {1}
    assert (seen["world"], seen["is_sleeping"]) == ([2, 2], False)

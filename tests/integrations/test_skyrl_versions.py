"""Weight versions in the answers to SkyRL's client, without SkyRL."""

from typing import Any

import numpy as np
import pytest

from rollbus.integrations.skyrl_versions import SessionVersions, read_versions
from rollbus.schemas.errors import InvalidRequest


def test_each_token_has_its_version() -> None:
    """The versions are those of the tokens, in their order."""
    found = read_versions({"choices": [{"token_ids": [5, 6, 7], "weight_versions": [1, 1, 2]}]})
    assert found.tolist() == [1, 1, 2]
    assert found.dtype == np.int32


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"token_ids": [1]},
        {"token_ids": [1], "weight_versions": []},
        {"token_ids": [1], "weight_versions": [-1]},
        {"token_ids": [1], "weight_versions": [True]},
        {"token_ids": [1], "weight_versions": [1 << 31]},
        {"token_ids": [1], "weight_versions": ["1"]},
        {"weight_versions": [1]},
    ],
)
def test_an_answer_without_a_version_for_each_token_is_an_error(choice: dict[str, Any]) -> None:
    """Missing or wrong versions are an error, never a default."""
    with pytest.raises(InvalidRequest, match="weight_versions"):
        read_versions({"choices": [choice]})


def test_sessions_and_turns_are_bounded() -> None:
    """At a limit the oldest session or turn is dropped and counted. A session is forgotten when it is popped."""
    kept = SessionVersions(max_sessions=2, max_turns=2)
    for turn in range(3):
        kept.record("a", np.array([turn], np.int32))
    kept.record("b", np.array([7], np.int32))
    assert (kept.dropped, [turn.tolist() for turn in kept.pop("a")], kept.pop("a")) == (1, [[1], [2]], [])
    for session in ("c", "d"):
        kept.record(session, np.array([8], np.int32))
    assert (kept.dropped, kept.pop("b"), len(kept.pop("c"))) == (2, [], 1)

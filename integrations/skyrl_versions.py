"""The weight versions in the answers to SkyRL's client, by session. Imports nothing of SkyRL."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..schemas.errors import InvalidRequest
from ..schemas.rows import Int32s

MAX_SESSIONS: Final = 65_536
"""Sessions whose versions are kept: more than a trainer has between two steps. The oldest are dropped first."""
MAX_TURNS: Final = 4_096
"""Turns of one session that are kept. A trainer that never pops the versions would otherwise keep all."""
FIELD: Final = "weight_versions"


def read_versions(answer: Mapping[str, Any]) -> Int32s:
    """Return i4[G], the version of each token of the first choice.

    Raises:
        InvalidRequest: the answer has no versions, or another number of them than tokens: it is not from rollbus.
    """
    choices = answer.get("choices") or [{}]
    versions, ids = choices[0].get(FIELD), choices[0].get("token_ids")
    if not isinstance(versions, list) or not isinstance(ids, list) or len(versions) != len(ids):
        found = len(versions) if isinstance(versions, list) else "no"
        raise InvalidRequest(
            field=FIELD,
            problem=f"has {found} versions for {len(ids) if isinstance(ids, list) else 'no'} tokens",
            allowed="one version for each token; set external_proxy_url to the HTTP service of rollbus",
        )
    if not all(type(version) is int and 0 <= version < 1 << 31 for version in versions):
        raise InvalidRequest(field=FIELD, problem="has a version that is not i4", allowed="0 to 2147483647")
    return np.array(versions, np.int32)


class SessionVersions:
    """The versions of the turns of each session, in the order of their answers.

    Attributes:
        dropped: number of sessions and turns that were dropped at the limits.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_turns: int = MAX_TURNS) -> None:
        self._max_sessions, self._max_turns = max_sessions, max_turns
        self._turns: OrderedDict[str, list[Int32s]] = OrderedDict()
        self.dropped = 0

    def record(self, session_id: str, versions: Int32s) -> None:
        """Add a turn. Above a limit, drop the oldest session or the oldest turn."""
        turns = self._turns.setdefault(session_id, [])
        self._turns.move_to_end(session_id)
        turns.append(versions)
        if len(turns) > self._max_turns:
            del turns[0]
            self.dropped += 1
        if len(self._turns) > self._max_sessions:
            self._turns.popitem(last=False)
            self.dropped += 1

    def pop(self, session_id: str) -> list[Int32s]:
        """Return the versions of a session's turns and forget them; an empty list if there are none."""
        return self._turns.pop(session_id, [])

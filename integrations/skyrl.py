"""SkyRL's own client of the HTTP service, which also keeps the weight version of each token.

Rows, log probabilities, commands and weights need no code: SkyRL's `RemoteInferenceClient` reads them from the service.
It ignores the versions. Inject this class to read them:

    class Experiment(BasePPOExp):
        def get_inference_client(self):
            return with_versions(super().get_inference_client())

Written for SkyRL 0.4.
"""

from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any, Final
from warnings import warn

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteGenerateClient,
    RemoteGenerateResult,
    RemoteInferenceClient,
)

from ..schemas.rows import Int32s
from .skyrl_versions import SessionVersions, read_versions

WRITTEN_FOR: Final = "0.4"
if version("skyrl").rpartition(".")[0] != WRITTEN_FOR:
    warn(f"rollbus.integrations.skyrl is for SkyRL {WRITTEN_FOR}, not {version('skyrl')}", stacklevel=2)


@dataclass
class _GenerateClient(RemoteGenerateClient):  # type: ignore[misc]
    versions: SessionVersions = field(default_factory=SessionVersions, repr=False)

    async def generate(self, **given: Any) -> RemoteGenerateResult:
        """Generate as SkyRL does, and keep the versions of the answer if the request has a session."""
        result = await super().generate(**given)
        if given.get("session_id"):
            self.versions.record(str(given["session_id"]), read_versions(result.raw_response))
        return result


@dataclass
class VersionedClient(RemoteInferenceClient):  # type: ignore[misc]
    """SkyRL's `InferenceEngineInterface` over HTTP, with the weight version of each token."""

    def _get_generate_client(self) -> _GenerateClient:
        found: _GenerateClient | None = self.__dict__.get("_generate_client")
        if found is None:
            found = self.__dict__["_generate_client"] = _GenerateClient(proxy_url=self.proxy_url)
        return found

    def pop_versions(self, session_id: str) -> list[Int32s]:
        """Return i4[G] for each turn of a session, and forget them.

        Args:
            session_id: for `SkyRLGymGenerator`, `f"{instance_id}_{repetition_id}"` of the trajectory.
        """
        return self._get_generate_client().versions.pop(session_id)

    @property
    def dropped_versions(self) -> int:
        """Number of sessions and turns whose versions were dropped because no caller popped them."""
        return self._get_generate_client().versions.dropped


def with_versions(client: RemoteInferenceClient) -> VersionedClient:
    """Return a client with the settings of SkyRL's client. Call this before its first request."""
    settings = {each.name: getattr(client, each.name) for each in fields(client) if not each.name.startswith("_")}
    return VersionedClient(**settings)

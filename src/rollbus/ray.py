"""A fleet on a Ray cluster: `rollbus.ray.Fleet(...)`. Needs the extra `ray`; see docs/operate/ray.md."""

from .workers.ray import Fleet, FleetSpec

__all__ = ["Fleet", "FleetSpec"]

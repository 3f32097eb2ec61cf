"""A fleet on a Ray cluster: each worker is an actor in a placement group of its own."""

from .fleet import Fleet as Fleet
from .plan import FleetSpec as FleetSpec

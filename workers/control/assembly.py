"""Creates the parts of a worker that execute commands."""

from pathlib import Path

from ...bus.control.store import DesiredStore
from ...bus.nats.connection import Connection
from ...bus.objects.reader import ObjectReader
from ...bus.subjects import Subjects
from ..config import WorkerConfig
from ..lifecycle.lifecycle import WorkerLifecycle
from ..lifecycle.peers import StartPeers
from ..requests.in_flight import InFlightRequests
from ..requests.publisher import OutboundPublisher
from ..sources.quiet_threads import NICE
from ..sources.sources import WeightSources
from .ack_publisher import AckPublisher
from .command_handler import CommandHandler
from .loras import Loras
from .one_off import OneOffCommands
from .pending import PendingSources
from .reading import DesiredReader
from .reads import TelemetryReads
from .reconcile import Reconciler
from .registers import Registers
from .staging import Stager
from .transfer import Transfer
from .weights import WeightManager

__all__ = ["make_control", "make_sources"]


def make_sources(config: WorkerConfig) -> WeightSources:
    """Return the sources of weights and adapters that this worker may use."""
    return WeightSources(
        roots=[Path(root) for root in config.weight_roots],
        own=None if config.model_path is None else Path(config.model_path),
        cache=Path(config.cache_dir) / config.fleet,
        model=config.model,
        worker=config.worker_id,
        objects=ObjectReader(
            config.server, name=f"rollbus worker {config.worker_id}", fetch_rate=config.fetch_rate, nice=NICE
        ),
        stage_bytes=config.stage_bytes,
    )


def make_control(
    config: WorkerConfig,
    nats: Connection,
    lifecycle: WorkerLifecycle,
    in_flight: InFlightRequests,
    publisher: OutboundPublisher,
    sources: WeightSources,
) -> CommandHandler:
    """Create the parts that execute commands, without starting them."""
    versions = in_flight.links.versions
    loras = Loras(in_flight, sources, versions)
    weights = WeightManager(config, in_flight, sources, loras, versions)
    weights.start.peers = StartPeers(config, nats)
    transfer = Transfer(in_flight, weights, config.transfer_idle_s, in_flight.links.leases.heard_at)
    registers = Registers(in_flight, weights, loras, transfer)
    store = DesiredStore(nats, Subjects(config.fleet))
    # A worker with credentials may write no state: an admin creates the first one with the queue.
    reader = DesiredReader(
        store,
        model=config.model,
        worker=config.worker_id,
        max_age_s=config.lease_s,
        may_begin=config.credentials is None,
    )
    lifecycle.knows_target = lambda: reader.is_fresh
    stager = Stager(sources, lambda: in_flight.runner.engine.capabilities)
    reconciler = Reconciler(
        reader, PendingSources(registers, stager), lifecycle, in_flight, publisher, config.engine_timeout_s
    )
    acks = AckPublisher(config, nats, lifecycle, in_flight, publisher)
    reads = TelemetryReads(in_flight.links.dispatcher.experts, in_flight.links.requests)
    one_off = OneOffCommands(lifecycle, in_flight, reconciler, reads)
    return CommandHandler(config, nats, lifecycle, acks, reconciler, one_off)

"""What a trainer uses to publish weights, with asyncio or without."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from types import TracebackType
from typing import Final, Self, TypeVar, Unpack

from ....schemas.checks import check_int, check_name
from ....schemas.errors import BusClosed, InvalidRequest
from ...nats.server import Server
from ..call_registry import CallRegistry
from ..client import Client, connect, registry_of
from ..loop_thread import LoopThread
from ..runtime import ClientRuntime
from ..sync.client import BlockingClient
from .arguments import (
    Adapter,
    AdapterSettings,
    ConnectOptions,
    PublishSettings,
    adapter_options,
    publish_options,
    read_adapter,
)
from .checkpoint import Checkpoint, read_checkpoint_folder
from .feed import NamedTensors, TensorFeed
from .options import AdapterOptions
from .results import PublishedWeights
from .version_publisher import VersionPublisher

__all__ = ["WeightPublisher"]

R = TypeVar("R")

MAX_RANKS: Final = 4096
"""Each has some of the numbers that name a delta's objects."""


class WeightPublisher:
    """Publishes a model's weights: compares them with what it published before, and stores what changed.

        async with rollbus.WeightPublisher(client, model="policy") as weights:
            result = await weights.publish(named_tensors, version=7)

    Without asyncio, over a connection of its own:

        with rollbus.WeightPublisher("nats://127.0.0.1:4222", model="policy") as weights:
            weights.publish_blocking(named_tensors, version=7)

    The publisher holds what was committed last in memory, as many bytes as the model has. A model has one publisher at
    a time: it holds a lease, which it renews on the client's own thread. The first version of a publisher is an anchor,
    the whole checkpoint.

    Entering raises `ControlError` with `publisher_busy` if another publisher holds the lease.

    Args:
        client: connected (one of `rollbus.sync` for `with`), or the URL of the NATS server, or a `Server`; None: as in
            `rollbus.connect`.
        model: whose weights these are.
        checkpoint: folder of the checkpoint with which training began. Published tensors must have its names, shapes
            and dtypes, and its other files (config.json, tokenizer ...) go into anchors.
        base: folder with the content of the version that was published last. Its hashes must be those of the manifest;
            then the first version of this publisher may be a delta.
        rank: of this process among `num_ranks` that publish together. Each gives whole tensors, no tensor comes from
            two, and all call `publish` with the same version. Rank 0 has the lease, commits, and updates the fleet.
        num_ranks: processes that publish together.
        options: for a URL, as in `rollbus.connect`.

    Raises:
        InvalidRequest: an argument is wrong.
    """

    def __init__(
        self,
        client: Client | BlockingClient | Server | str | None = None,
        *,
        model: str,
        checkpoint: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        **options: Unpack[ConnectOptions],
    ) -> None:
        self._model = check_name("model", model)
        self._is_own = not isinstance(client, Client | BlockingClient)
        self._is_blocking = isinstance(client, BlockingClient)
        if isinstance(client, Client | BlockingClient):
            if options:
                allowed = "nothing of it beside a client, which has its own"
                raise InvalidRequest(field=", ".join(options), problem="is set", allowed=allowed)
            self._client = client.with_asyncio if isinstance(client, BlockingClient) else client
        else:
            self._client = connect(client, **options)
        self._folder = checkpoint
        self._base = base
        self._num_ranks = check_int("num_ranks", num_ranks, 1, MAX_RANKS)
        self._rank = check_int("rank", rank, 0, num_ranks - 1)
        self._exits: contextlib.ExitStack | contextlib.AsyncExitStack | None = None
        # Set while entered.
        self._thread: LoopThread[ClientRuntime] | None = None
        self._publisher: VersionPublisher

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<WeightPublisher {self._model} {'closed' if self._thread is None else repr(self._publisher)}>"

    @property
    def last_version(self) -> int | None:
        """Of what was published last for this model, by whichever publisher, while entered. None: nothing was."""
        return None if self._thread is None else self._publisher.last_version

    async def __aenter__(self) -> Self:
        """Take the lease; connect before, if there is no client."""
        self._check_not_entered()
        if self._is_blocking:
            raise InvalidRequest(field="client", problem="is one of `rollbus.sync`", allowed="it with `with` alone")
        async with contextlib.AsyncExitStack() as stack:
            if self._is_own:
                await stack.enter_async_context(self._client)
            folder = None if self._folder is None else await asyncio.to_thread(read_checkpoint_folder, self._folder)
            registry = registry_of(self._client)
            publisher = self._make(registry, folder)
            await registry.thread.run(publisher.open(self._base))
            self._publisher, self._thread = publisher, registry.thread
            self._exits = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lease back."""
        thread, self._thread = self._connected, None
        stack, self._exits = self._exits, None
        if not isinstance(stack, contextlib.AsyncExitStack):
            raise BusClosed("this publisher was entered with `with`; leave it so")
        async with stack:
            with contextlib.suppress(BusClosed):  # the client was closed before
                await thread.run(self._publisher.close())

    def __enter__(self) -> Self:
        """Take the lease; connect before, if there is no client. Blocks."""
        self._check_not_entered()
        with contextlib.ExitStack() as stack:
            if self._is_own:
                stack.enter_context(BlockingClient(self._client))
            folder = None if self._folder is None else read_checkpoint_folder(self._folder)
            registry = registry_of(self._client)
            publisher = self._make(registry, folder)
            _wait(registry.thread.submit(publisher.open(self._base)))
            self._publisher, self._thread = publisher, registry.thread
            self._exits = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lease back. Blocks."""
        thread, self._thread = self._connected, None
        stack, self._exits = self._exits, None
        if not isinstance(stack, contextlib.ExitStack):
            raise BusClosed("this publisher was entered with `async with`; leave it so")
        with stack, contextlib.suppress(BusClosed):
            _wait(thread.submit(self._publisher.close()))

    async def publish(
        self, named_tensors: NamedTensors, *, version: int, **settings: Unpack[PublishSettings]
    ) -> PublishedWeights:
        """Publish a version, and have the fleet load it.

        Args:
            named_tensors: all tensors of the model as (name, tensor), in the names of the checkpoint: torch tensors of
                any device, numpy arrays or `RawTensor`. They are drawn once, on a thread of their own, and must not
                change until this returns.
            version: of the weights, which every token sampled from them bears; higher than the present one.

        Cancellation: before the commit nothing stays stored; after it the version stays, and the workers go on.

        Raises:
            InvalidRequest: an argument is wrong, or a tensor is not what was published before or is in the checkpoint:
                the message names the first one. Nothing is published.
            ControlError: the version, the lease or the store refuses it. Nothing is published.
            NoWorkers: the version is stored, and there is no worker that could load it.
            CommandIncomplete: the version is stored, and not all workers have it.
            BusBroken: the connection or JetStream failed.
            BusClosed: the client was closed.
        """
        thread, options = self._connected, publish_options(self._model, version, settings)
        feed = TensorFeed(named_tensors)
        drawing = threading.Thread(target=feed.draw, name="rollbus-tensors", daemon=True)
        drawing.start()
        try:
            return await thread.run(self._publisher.publish(feed, options))
        finally:
            feed.halt()

    def publish_blocking(
        self, named_tensors: NamedTensors, *, version: int, **settings: Unpack[PublishSettings]
    ) -> PublishedWeights:
        """Do what `publish` does, for callers without an event loop: the tensors are drawn on the caller's thread."""
        thread, options = self._connected, publish_options(self._model, version, settings)
        feed = TensorFeed(named_tensors)
        return self._draw_here(feed, thread.submit(self._publisher.publish(feed, options)))

    async def publish_adapter(
        self, name: str, adapter: Adapter, *, version: int, **settings: Unpack[AdapterSettings]
    ) -> PublishedWeights:
        """Publish a whole LoRA adapter for the model, and have the fleet load it; as `publish` otherwise.

        Args:
            name: what requests call it.
            adapter: folder with `adapter_model.safetensors` and `adapter_config.json`, as PEFT writes it; or the
                tensors, with `config`.
            version: of the adapter, which every token sampled with it bears.
        """
        thread, options = self._connected, self._adapter_options(name, version, settings)
        feed, files = await asyncio.to_thread(read_adapter, adapter, settings.get("config"))
        drawing = threading.Thread(target=feed.draw, name="rollbus-tensors", daemon=True)
        drawing.start()
        try:
            return await thread.run(self._publisher.publish_adapter(feed, files, options))
        finally:
            feed.halt()

    def publish_adapter_blocking(
        self, name: str, adapter: Adapter, *, version: int, **settings: Unpack[AdapterSettings]
    ) -> PublishedWeights:
        """Do what `publish_adapter` does, for callers without an event loop."""
        thread, options = self._connected, self._adapter_options(name, version, settings)
        feed, files = read_adapter(adapter, settings.get("config"))
        return self._draw_here(feed, thread.submit(self._publisher.publish_adapter(feed, files, options)))

    @staticmethod
    def _draw_here(feed: TensorFeed, publishing: concurrent.futures.Future[R]) -> R:
        publishing.add_done_callback(lambda _: feed.halt())
        try:
            feed.draw()
            return _wait(publishing)
        finally:
            publishing.cancel()

    def _adapter_options(self, name: str, version: int, settings: AdapterSettings) -> AdapterOptions:
        if self._rank:
            raise InvalidRequest(field="rank", problem=f"is {self._rank}", allowed="0: adapters come from one rank")
        return adapter_options(self._model, name, version, settings)

    def _make(self, registry: CallRegistry, checkpoint: Checkpoint | None) -> VersionPublisher:
        return VersionPublisher(registry, self._model, checkpoint, rank=self._rank, num_ranks=self._num_ranks)

    def _check_not_entered(self) -> None:
        if self._thread is not None:
            raise BusClosed("this publisher is entered already")

    @property
    def _connected(self) -> LoopThread[ClientRuntime]:
        if self._thread is None:
            raise BusClosed("this publisher is not entered; use it inside `async with` or `with`")
        return self._thread


def _wait(future: concurrent.futures.Future[R]) -> R:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise BusClosed("the client was closed") from None

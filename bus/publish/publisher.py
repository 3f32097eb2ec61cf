"""The publisher of weights for trainers, with asyncio or without."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, Self, TypeVar, Unpack

from ...schemas.checks import check_int, check_name
from ...schemas.control import LoadLora
from ...schemas.errors import BusBroken, BusClosed, InvalidRequest
from ..client.client import Client, connect, runtime_of
from ..client.runtime import Runtime
from ..client.sync import BlockingClient
from ..client.thread import LoopThread
from ..nats.server import Server
from .draft import NamedTensors, TensorFeed
from .options import (
    Adapter,
    AdapterSettings,
    ConnectOptions,
    PublishedWeights,
    PublishOptions,
    PublishSettings,
    adapter_options,
    publish_options,
    read_adapter,
)
from .tensors import read_checkpoint_folder
from .version_publisher import VersionPublisher

R = TypeVar("R")

MAX_RANKS: Final = 4096
"""Maximum number of ranks: each rank needs its own share of the object numbers of a delta."""


class WeightPublisher:
    """Publishes a model's weights: compares them with the last published version, and stores the changes.

        async with rollbus.WeightPublisher(client, model="policy") as weights:
            result = await weights.publish(named_tensors, version=7)

    Without asyncio, over its own connection:

        with rollbus.WeightPublisher("nats://127.0.0.1:4222", model="policy") as weights:
            weights.publish_blocking(named_tensors, version=7)

    The publisher keeps the last committed version in memory, which takes as many bytes as the model has. A model has
    one publisher at a time, which holds a lease. The publisher renews the lease on the client's own thread. The first
    version of a publisher is an anchor, the whole checkpoint.

    Entering raises `ControlError` with `publisher_busy` if another publisher holds the lease.

    Args:
        client: connected client (of `rollbus.sync` for `with`), URL of the NATS server, or `Server`. None: the default
            server of `rollbus.connect`.
        model: name of the model.
        checkpoint: folder of the checkpoint with which training began. Published tensors must have the same names,
            shapes and dtypes. Anchors include its other files (config.json, tokenizer and others). None (default): the
            first publication defines the tensors.
        base: folder with the content of the last published version. Its hashes must match the manifest. With it, the
            first version of this publisher may be a delta. None (default): the first version is an anchor.
        rank: rank of this process among `num_ranks` (default: 0). Each rank gives whole tensors, no two ranks give the
            same tensor, and all call `publish` with the same version. Rank 0 holds the lease, commits, and updates the
            fleet.
        num_ranks: number of processes that publish together, 1 to 4096 (default: 1).
        options: options of the connection if `client` is a URL or None, as in `rollbus.connect`.

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
                allowed = "no connection options together with a client"
                raise InvalidRequest(", ".join(options), "is set", allowed)
            # A blocking client that is not referenced closes itself.
            self._given = client
            self._client = client.with_asyncio if isinstance(client, BlockingClient) else client
        else:
            self._client = connect(client, **options)
        self._folder = checkpoint
        self._base = base
        self._num_ranks = check_int("num_ranks", num_ranks, 1, MAX_RANKS)
        self._rank = check_int("rank", rank, 0, num_ranks - 1)
        self._exits: contextlib.ExitStack | contextlib.AsyncExitStack | None = None
        # Set while open.
        self._thread: LoopThread[None] | None = None
        self._publisher: VersionPublisher

    def __repr__(self) -> str:
        """Return one line with the state."""
        return f"<WeightPublisher {self._model} {'closed' if self._thread is None else 'open'}>"

    @property
    def last_version(self) -> int | None:
        """Last published version of this model, by any publisher. None if there is none, or while not open."""
        return None if self._thread is None else self._publisher.last_version

    async def __aenter__(self) -> Self:
        """Connect if there is no client, and acquire the lease.

        Raises:
            ControlError: `publisher_busy` if another publisher holds the lease, or the bucket is not usable.
            InvalidRequest: the client is of `rollbus.sync`, or a folder does not have the expected content.
            BusBroken: JetStream or the connection failed.
        """
        self._check_not_entered()
        if self._is_blocking:
            raise InvalidRequest("client", "is of `rollbus.sync`", "that client with `with`")
        async with contextlib.AsyncExitStack() as stack:
            if self._is_own:
                await stack.enter_async_context(self._client)
            runtime = runtime_of(self._client)
            self._publisher = await runtime.thread.run(self._open(runtime))
            self._thread, self._exits = runtime.thread, stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Release the lease."""
        thread, self._thread = self._connected, None
        stack, self._exits = self._exits, None
        if not isinstance(stack, contextlib.AsyncExitStack):
            raise BusClosed("this publisher was entered with `with`; leave it with `with`")
        async with stack:
            with contextlib.suppress(BusClosed):  # the client was already closed
                await thread.run(self._publisher.close())

    def __enter__(self) -> Self:
        """Connect if there is no client, and acquire the lease. This blocks. Errors are those of `async with`."""
        self._check_not_entered()
        with contextlib.ExitStack() as stack:
            if self._is_own:
                stack.enter_context(BlockingClient(self._client))
            runtime = runtime_of(self._client)
            self._publisher = runtime.thread.submit(self._open(runtime)).result()
            self._thread, self._exits = runtime.thread, stack.pop_all()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Release the lease. This blocks."""
        thread, self._thread = self._connected, None
        stack, self._exits = self._exits, None
        if not isinstance(stack, contextlib.ExitStack):
            raise BusClosed("this publisher was entered with `async with`; leave it with `async with`")
        # The error of the block says more than that the client has failed.
        with stack, contextlib.suppress(BusClosed, *(() if error is None else (BusBroken,))):
            thread.submit(self._publisher.close()).result()

    async def publish(
        self, named_tensors: NamedTensors, *, version: int, **settings: Unpack[PublishSettings]
    ) -> PublishedWeights:
        """Publish a version, and make the fleet load it.

        Args:
            named_tensors: (name, tensor) pairs of all tensors of the model, named as in the checkpoint. A tensor is a
                torch tensor on any device, a numpy array or a `RawTensor`. A separate thread draws the pairs once. Do
                not change the tensors until this method returns.
            version: version of the weights, higher than the present one. Every token sampled from them has this
                version.

        Cancellation: before the commit, nothing stays stored. After the commit, the version stays, and the workers
        still load it.

        Raises:
            InvalidRequest: an argument is wrong, or a tensor differs in kind from the last published version or the
                checkpoint. The message names the first such tensor. Nothing is published.
            ControlError: the desired state, the lease or the store rejects the version. Nothing is published.
            NoWorkers: the version is stored, and no worker can load it.
            CommandIncomplete: the version is stored, and not all workers have loaded it.
            BusBroken: the connection or JetStream failed.
            BusClosed: the client was closed.
        """
        thread, options = self._connected, publish_options(self._model, version, settings)
        feed = TensorFeed(named_tensors)
        return await _draw_beside(feed, thread, self._publisher.publish(feed, options))

    def publish_blocking(
        self, named_tensors: NamedTensors, *, version: int, **settings: Unpack[PublishSettings]
    ) -> PublishedWeights:
        """Publish a version as `publish` does, without an event loop. The caller's thread draws the tensors."""
        thread, options = self._connected, publish_options(self._model, version, settings)
        feed = TensorFeed(named_tensors)
        return _draw_here(feed, thread.submit(self._publisher.publish(feed, options)))

    async def publish_adapter(
        self, name: str, adapter: Adapter, *, version: int, **settings: Unpack[AdapterSettings]
    ) -> PublishedWeights:
        """Publish a whole LoRA adapter for the model, and make the fleet load it. Errors are those of `publish`.

        Args:
            name: name of the adapter in requests.
            adapter: folder with `adapter_model.safetensors` and `adapter_config.json`, as PEFT writes it, or the
                tensors, together with `config`.
            version: version of the adapter. Every token sampled with it has this version.

        Cancellation: as in `publish`.
        """
        thread, options = self._connected, self._adapter_options(name, version, settings)
        feed, files = await asyncio.to_thread(read_adapter, adapter, settings.get("config"))
        return await _draw_beside(feed, thread, self._publisher.publish_adapter(feed, files, options))

    def publish_adapter_blocking(
        self, name: str, adapter: Adapter, *, version: int, **settings: Unpack[AdapterSettings]
    ) -> PublishedWeights:
        """Publish an adapter as `publish_adapter` does, without an event loop, on the caller's thread."""
        thread, options = self._connected, self._adapter_options(name, version, settings)
        feed, files = read_adapter(adapter, settings.get("config"))
        return _draw_here(feed, thread.submit(self._publisher.publish_adapter(feed, files, options)))

    def _adapter_options(self, name: str, version: int, settings: AdapterSettings) -> PublishOptions[LoadLora]:
        if self._rank:
            raise InvalidRequest("rank", f"is {self._rank}", "0: only rank 0 publishes adapters")
        return adapter_options(self._model, name, version, settings)

    async def _open(self, runtime: Runtime) -> VersionPublisher:
        """Return a publisher with the lease. Runs on the client's thread."""
        folder = None if self._folder is None else await asyncio.to_thread(read_checkpoint_folder, self._folder)
        publisher = VersionPublisher(runtime, self._model, folder, rank=self._rank, num_ranks=self._num_ranks)
        await publisher.open(self._base)
        return publisher

    def _check_not_entered(self) -> None:
        if self._thread is not None:
            raise BusClosed("this publisher is already open; enter it only once")

    @property
    def _connected(self) -> LoopThread[None]:
        if self._thread is None:
            raise BusClosed("this publisher is not open; use it inside `async with` or `with`")
        return self._thread


async def _draw_beside(feed: TensorFeed, thread: LoopThread[Any], publishing: Coroutine[Any, Any, R]) -> R:
    """Run a publication on the bus thread while another thread draws its tensors."""
    threading.Thread(target=feed.draw, name="rollbus-tensors", daemon=True).start()
    try:
        return await thread.run(publishing)
    finally:
        feed.halt()


def _draw_here(feed: TensorFeed, publishing: Future[R]) -> R:
    """Draw the tensors of a publication on the thread of the caller."""
    publishing.add_done_callback(lambda _: feed.halt())
    try:
        feed.draw()
        return publishing.result()
    finally:
        publishing.cancel()

"""`bench.weights` is realistic: its trainer changes as much as a real trainer, and its link has the given rate."""

import asyncio
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file

from bench.processes import running
from bench.weights_trainer import FILE, INIT_STD, MEASURED, Trainer

NEAR = 0.15
"""The tolerance relative to the measured share, which comes from one run and is rounded to 0.1 %."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with half a million random weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(512, 1024).normal_(0, INIT_STD, generator=generator).bfloat16()
    save_file({"weights": weights, "norm": torch.ones(64, dtype=torch.bfloat16)}, folder / FILE)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("rate", list(MEASURED))
def test_the_measured_share_of_elements_changes_in_each_step(rate: float, checkpoint: Path) -> None:
    """In each measured step, the measured share of elements changes."""
    trainer = Trainer(checkpoint, rate=rate)
    shares = {step: trainer.step() for step in range(1, 25)}

    assert {step: shares[step] for step in MEASURED[rate]} == {
        step: pytest.approx(share, rel=NEAR) for step, share in MEASURED[rate].items()
    }


def test_a_saved_checkpoint_has_the_tensors_of_the_trainer(checkpoint: Path, tmp_path: Path) -> None:
    """A saved checkpoint has the trainer's tensors, and the other files of the checkpoint before."""
    trainer = Trainer(checkpoint, rate=3e-6)
    before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    share = trainer.step()
    folder = trainer.save(tmp_path / "saved")
    saved = load_file(folder / FILE)

    assert (folder / "config.json").read_text() == "{}"
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], trainer.tensors[name]) for name in saved)
    num_changed = sum(int((saved[name] != before[name]).sum()) for name in saved)
    assert share == pytest.approx(100 * num_changed / (512 * 1024 + 64))


async def test_a_link_passes_all_bytes_within_its_rate() -> None:
    """A link passes all bytes in both directions, within its rate. If one side closes, the other side closes too."""
    sent, rate = bytes(range(256)) * 8192, 8
    received = asyncio.Queue[bytes]()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(len(sent))
        writer.write(data)
        await received.put(data)
        await received.put(await reader.read())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, running("link", "bench.weights_link", _url(server.sockets[0].getsockname()), rate) as link:
        answer = await link.ask("url")
        host, port = str(answer["url"]).removeprefix("nats://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        began = time.monotonic()
        writer.write(sent)
        there = await received.get()
        back = await reader.readexactly(len(sent))
        seconds = time.monotonic() - began
        writer.close()
        rest = await received.get()

    assert there == back == sent
    # The link allows an immediate burst of a hundredth of a second.
    assert seconds > 2 * len(sent) / (rate * 10**6) - 0.05
    assert rest == b""


def _url(address: tuple[str, int]) -> str:
    return f"nats://{address[0]}:{address[1]}"

"""Three processes train one classifier on the same digits, and no tensor is ever sent.

    python examples/digits_slice.py

The owner maps scikit-learn's handwritten digits into files and calls two readers by RPC. The
arguments are mapped tensors, so that what travels is where they are. Then the same is measured
against torch's own RPC, and a file is removed to show what the caller gets.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from plain_rpc import PlainPair, idle_share, read_all
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import mmrpc.rpc as rpc
from mmrpc import MemoryMappedTensor
from mmrpc.errors import PathError

READERS = ["reader1", "reader2"]
STEPS = 200
BATCH = 64
LEARNING_RATE = 0.3
HELD_OUT = 360
IDLE_S = 0.5
LARGE_NUMEL = 64 * 1024 * 1024  # 256 MiB of float32


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def place(model: nn.Module, weights: torch.Tensor) -> None:
    """Moves a model's parameters into a flat tensor that others map too."""
    nn.utils.vector_to_parameters(weights, model.parameters())


# What the owner asks the readers to do.


def fingerprint(x: torch.Tensor) -> str:
    return hashlib.sha256(x.numpy()).hexdigest()


class Learner:
    """A reader's part: its rows of the data, the weights of all, and a place for its gradient."""

    def __init__(
        self,
        pixels: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        self.pixels, self.labels, self.gradient = pixels, labels, gradient
        self.model = classifier()
        place(self.model, weights)
        parameters = list(self.model.parameters())
        parts = gradient.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)

    def backward(self) -> float:
        """Writes the gradient of one batch where the owner sees it; gives the loss."""
        rows = torch.randint(len(self.pixels), (BATCH,))
        loss = nn.functional.cross_entropy(self.model(self.pixels[rows]), self.labels[rows])
        self.gradient.zero_()
        loss.backward()
        return loss.item()


def join(name: str, rank: int, directory: str) -> None:
    torch.manual_seed(rank)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rendezvous")
    rpc.init_rpc(name, rank=rank, world_size=1 + len(READERS), rpc_backend_options=options)


def serve(name: str, rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    join(name, rank, directory)
    rpc.shutdown()  # serves until the owner comes here too


# The owner.


def load_digits(directory: Path) -> dict[str, MemoryMappedTensor]:
    """Maps the digits in files: pixels in 0..1 and labels, to train on and held out."""
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    pixels = (torch.from_numpy(pixels).float() / 16)[order]
    labels = torch.from_numpy(labels)[order]
    tensors = {
        "pixels": pixels[HELD_OUT:],
        "labels": labels[HELD_OUT:],
        "test_pixels": pixels[:HELD_OUT],
        "test_labels": labels[:HELD_OUT],
    }
    return {
        name: MemoryMappedTensor.from_tensor(tensor, filename=directory / f"{name}.mm")
        for name, tensor in tensors.items()
    }


def prove_same_bytes(x: MemoryMappedTensor, console: Console) -> None:
    """Compares digests, changes a byte, and compares again: a copy would not follow."""
    for note in ("as it is", "after the owner changed one element"):
        mine = fingerprint(x)
        for reader in READERS:
            theirs = rpc.rpc_sync(reader, fingerprint, (x,))
            if theirs != mine:
                raise SystemExit(f"{reader} reads other bytes: {theirs} instead of {mine}")
        console.print(f"  sha256 {mine[:16]}…  owner = {' = '.join(READERS)}, {note}")
        x[0, 0] = 1 - x[0, 0]


def train(data: dict[str, MemoryMappedTensor], directory: Path, console: Console) -> float:
    """Trains on both readers' halves; gives the accuracy on what they never saw."""
    model = classifier()
    weights = MemoryMappedTensor.from_tensor(
        nn.utils.parameters_to_vector(model.parameters()).detach(),
        filename=directory / "weights.mm",
    )
    place(model, weights)
    gradients = MemoryMappedTensor.zeros(
        len(READERS), len(weights), filename=directory / "gradients.mm"
    )
    halves = zip(data["pixels"].chunk(2), data["labels"].chunk(2), gradients, strict=True)
    learners = [
        rpc.remote(reader, Learner, (pixels, labels, weights, gradient))
        for reader, (pixels, labels, gradient) in zip(READERS, halves, strict=True)
    ]
    with progress(console) as bar:
        task = bar.add_task("training", total=STEPS)
        for _ in range(STEPS):
            pending = [learner.rpc_async().backward() for learner in learners]
            losses = [future.wait() for future in pending]
            weights.sub_(gradients.mean(0), alpha=LEARNING_RATE)
            bar.update(task, advance=1, description=f"training, loss {statistics.mean(losses):.3f}")
    with torch.no_grad():
        guesses = model(data["test_pixels"]).argmax(1)
    return (guesses == data["test_labels"]).float().mean().item()


def compare(
    x: MemoryMappedTensor, rounds: int, pairs: dict[str, PlainPair], console: Console
) -> Table:
    """Sends x to be read: by reference, and in turn as a plain tensor through torch's own RPC."""

    def by_reference() -> tuple[float, int]:
        elapsed_s = timed(lambda: rpc.rpc_sync("reader1", read_all, (x,)))
        return elapsed_s, rpc.message_nbytes(read_all, (x,))

    senders: dict[str, Callable[[], tuple[float, int]]] = {"mmrpc,\nby reference": by_reference}
    for label, pair in pairs.items():
        senders[label] = lambda pair=pair: pair.send(x.numel())
    columns = {label: Measured() for label in senders}
    with progress(console) as bar:
        for _ in bar.track(range(rounds), description=f"measuring {size(x.nbytes)}"):
            for label, send in senders.items():
                before = loopback_bytes()
                elapsed_s, columns[label].message_bytes = send()
                columns[label].loopback_bytes.append(loopback_bytes() - before)
                columns[label].elapsed_s.append(elapsed_s)

    table = Table(title=f"A tensor of {size(x.nbytes)}, read by another process")
    table.add_column("")
    for label in columns:
        table.add_column(label, justify="right")
    measured = columns.values()
    table.add_row("bytes of tensor data", *[f"{x.nbytes:,}"] * len(columns))
    table.add_row("bytes in the message", *(f"{m.message_bytes:,}" for m in measured))
    # The least: other programs use the interface too.
    table.add_row("bytes on the loopback", *(f"{min(m.loopback_bytes):,}" for m in measured))
    medians = [statistics.median(m.elapsed_s) for m in measured]
    table.add_row(f"ms, median of {rounds}", *(f"{median * 1e3:.2f}" for median in medians))
    return table


@dataclass
class Measured:
    """What one way to send was found to take."""

    message_bytes: int = 0
    loopback_bytes: list[int] = field(default_factory=list)
    elapsed_s: list[float] = field(default_factory=list)


def send_a_removed_file(directory: Path, console: Console) -> None:
    """Shows the failure that mmrpc exists for."""
    x = MemoryMappedTensor.zeros(1000, filename=directory / "removed.mm")
    os.unlink(x.filename)
    try:
        rpc.rpc_sync("reader1", read_all, (x,))
    except PathError as error:
        console.print(f"  {type(error).__name__}: {error}")
        console.print(f"  node: {error.node}, file made by the reader: {Path(x.filename).exists()}")
    else:
        raise SystemExit("reading a removed file gave no error")


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())


def size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"


def progress(console: Console) -> Progress:
    columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=console)


def tell(
    readers: list[BaseProcess], directory: Path, pairs: dict[str, PlainPair], console: Console
) -> None:
    data = load_digits(directory)
    console.print(f"\nThe readers read the owner's digits: {tuple(data['pixels'].shape)}")
    prove_same_bytes(data["pixels"], console)

    console.print("\nEach reader has one half; gradients and weights are shared as well")
    accuracy = train(data, directory, console)
    console.print(f"  held-out accuracy {accuracy:.1%}\n")
    if accuracy < 0.9:
        raise SystemExit("the held-out accuracy should be above 90%")

    large = MemoryMappedTensor.from_tensor(torch.randn(LARGE_NUMEL), filename=directory / "large")
    tables = compare(data["pixels"], 50, pairs, console), compare(large, 5, pairs, console)
    console.print(*tables, sep="\n")
    idle = {"mmrpc": idle_share([process.pid for process in readers], IDLE_S)}
    idle |= {label.replace("\n", " "): pair.idle_share(IDLE_S) for label, pair in pairs.items()}
    console.print("While it has nothing to do, a process takes of a core:")
    for label, share in idle.items():
        console.print(f"  {share:4.0%}  {label}")

    console.print("\nA file is removed, and its tensor sent")
    send_a_removed_file(directory, console)


def main() -> None:
    console = Console(highlight=False, soft_wrap=True)
    # All of it on this machine, whatever its name resolves to.
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")  # it imports torch once for all
    with tempfile.TemporaryDirectory(prefix="mmrpc-demo-") as name:
        console.print("Starting an owner and two readers, and two pairs to compare with")
        readers = [
            context.Process(target=serve, args=(reader, rank, name), daemon=True)
            for rank, reader in enumerate(READERS, start=1)
        ]
        for process in readers:
            process.start()
        starting = PlainPair(name, "uv"), PlainPair(name)
        join("owner", 0, name)
        with starting[0] as same, starting[1] as default:
            pairs = {
                "torch RPC, plain,\nsame transport": same,
                "torch RPC, plain,\ndefault transport": default,
            }
            tell(readers, Path(name), pairs, console)
        rpc.shutdown()
        for process in readers:
            process.join()


if __name__ == "__main__":
    main()

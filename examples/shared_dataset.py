"""One dataset on disk, read by several RPC workers; each trains on its shard.

    python examples/shared_dataset.py

The first worker writes the dataset, batch by batch, and sends it to the others by RPC: what
travels is a few hundred bytes. They map the same pages, so that all of them together hold it in
memory once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator

import torch
from torch import nn

import mmrpc.rpc as rpc
from mmrpc.data import MappedDataset, ResumableLoader
from mmrpc.testing import free_port

CLASSES, FEATURES, BATCH_ROWS = 10, 256, 512


def batches(rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Noisy points around one centre for each class; never all of them in memory."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    for start in range(0, rows, BATCH_ROWS):
        label = torch.randint(CLASSES, (min(BATCH_ROWS, rows - start),), generator=generator)
        noise = torch.randn(len(label), FEATURES, generator=generator)
        yield {"point": centres[label] + noise, "label": label}


def train(dataset: MappedDataset, epochs: int) -> tuple[int, float]:
    """Runs on each worker: trains on its shard; gives its rows and its last loss."""
    shard = dataset.shard()
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # The rows of this rank are chosen already: the loader has them to itself.
    loader = ResumableLoader(shard, 64, shuffle=True, rank=0, world_size=1)
    loss = torch.tensor(0.0)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["point"]), batch["label"])
            loss.backward()
            optimizer.step()
    return len(shard), loss.item()


def work(rank: int, workers: int, port: int, rows: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=workers)
    if rank == 0:
        dataset = MappedDataset.from_batches(
            f"{directory}/points", batches(rows), progress=True, total_rows=rows
        )
        message_bytes = rpc.message_nbytes(train, (dataset, 2))
        print(f"{dataset.nbytes / 1e6:.0f} MB on disk, {message_bytes} bytes in each call")
        calls = [rpc.rpc_async(f"w{other}", train, (dataset, 2)) for other in range(workers)]
        for other, call in enumerate(calls):
            shard_rows, loss = call.wait()
            print(f"w{other}: {shard_rows} rows, loss {loss:.3f}")
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        arguments = (options.workers, free_port(), options.rows, directory)
        processes = [
            context.Process(target=work, args=(rank, *arguments), daemon=True)
            for rank in range(options.workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()

"""One learner publishes its weights, and actors act with the newest, as in reinforcement learning.

    python examples/weight_sync.py

No RPC is needed: what they share is a directory. An actor takes a new version between two
episodes, which costs a mapping and no copy, and never sees half a one.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from multiprocessing.synchronize import Event

import torch
from torch import nn

from mmrpc.train import Publisher, follow

ACTORS = 2
UPDATES = int(sys.argv[1]) if len(sys.argv) > 1 else 200
TARGET = torch.tensor([0.5, -1.0, 2.0])


def make_policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False)


def tell(line: str) -> None:
    """Prints a line with its end in one write, since the processes share their output."""
    print(f"{line}\n", end="", flush=True)


def learn(directory: str, done: Event) -> None:
    """Stands for a learner: it moves the policy to a target, and publishes each update."""
    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    publisher = Publisher(policy, directory, keep=2)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        (policy.weight[0] - TARGET).square().sum().backward()
        optimizer.step()
        publisher.publish()
    # All actors are to end with the last version.
    if not publisher.wait_for_followers(ACTORS, timeout_s=60):
        raise SystemExit(f"not all actors follow: {publisher.followers()}")
    done.set()


def act(number: int, directory: str, done: Event) -> None:
    policy = make_policy()
    episodes, versions = 0, 0
    with follow(directory, policy) as follower:
        while follower.current is None or follower.current.number < UPDATES - 1:
            versions += follower.update()
            with torch.no_grad():
                policy(torch.randn(100, 3))
            episodes += 1
        error = (policy.weight[0] - TARGET).abs().max().item()
        tell(
            f"actor {number}: {episodes} episodes, {versions} of {UPDATES} versions, "
            f"ends at version {follower.current.number}, {error:.4f} from the target"
        )
        if error > 0.01:
            raise SystemExit("the policy did not get there")
        done.wait(60)  # a follower that leaves is not counted


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        done = context.Event()
        processes = [context.Process(target=learn, args=(directory, done))]
        processes += [context.Process(target=act, args=(n, directory, done)) for n in range(ACTORS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(1)


if __name__ == "__main__":
    main()

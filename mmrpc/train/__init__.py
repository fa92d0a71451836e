"""Training on mapped memory: a parameter server, and weights that others follow."""

from __future__ import annotations

from mmrpc.train.coordinator import Progress
from mmrpc.train.follower import Follower, follow
from mmrpc.train.messages import Link, Pushed
from mmrpc.train.publisher import Publisher
from mmrpc.train.server import ParameterServer
from mmrpc.train.trainer import Trainer
from mmrpc.train.version import Version, latest

__all__ = [
    "Follower",
    "Link",
    "ParameterServer",
    "Progress",
    "Publisher",
    "Pushed",
    "Trainer",
    "Version",
    "follow",
    "latest",
]

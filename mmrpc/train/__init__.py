"""Training on mapped memory: a parameter server, and weights that others follow."""

from __future__ import annotations

from mmrpc.train.messages import Link, Pushed
from mmrpc.train.server import ParameterServer, Progress
from mmrpc.train.trainer import Trainer
from mmrpc.train.versions import Version, latest

__all__ = [
    "Link",
    "ParameterServer",
    "Progress",
    "Pushed",
    "Trainer",
    "Version",
    "latest",
]

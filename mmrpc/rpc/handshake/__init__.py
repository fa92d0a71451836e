"""What nodes prove to each other before RPC begins, and the report of it."""

from __future__ import annotations

from mmrpc.rpc.handshake.joining import Joined, join, make_resolver, survey
from mmrpc.rpc.handshake.report import MountReport, NodeReport, PathReport, Problem

__all__ = [
    "Joined",
    "MountReport",
    "NodeReport",
    "PathReport",
    "Problem",
    "join",
    "make_resolver",
    "survey",
]

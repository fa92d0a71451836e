"""A cluster as one checked description: nodes, mounts, roles, and how they talk."""

from mmrpc.config.cluster import ClusterConfig, Worker, config_hash
from mmrpc.config.models import (
    LaunchConfig,
    LogsConfig,
    MasterConfig,
    MountConfig,
    NodeConfig,
    RoleConfig,
    RpcConfig,
    SshConfig,
)

__all__ = [
    "ClusterConfig",
    "LaunchConfig",
    "LogsConfig",
    "MasterConfig",
    "MountConfig",
    "NodeConfig",
    "RoleConfig",
    "RpcConfig",
    "SshConfig",
    "Worker",
    "config_hash",
]

"""A cluster as one checked description: nodes, mounts, roles, and how they talk."""

from mmrpc.config.cluster import ClusterConfig, Worker, config_hash
from mmrpc.config.loading import dump_config, load_config, parse_config
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
from mmrpc.config.node import resolve_node
from mmrpc.config.show import Setting, json_schema, settings

__all__ = [
    "ClusterConfig",
    "LaunchConfig",
    "LogsConfig",
    "MasterConfig",
    "MountConfig",
    "NodeConfig",
    "RoleConfig",
    "RpcConfig",
    "Setting",
    "SshConfig",
    "Worker",
    "config_hash",
    "dump_config",
    "json_schema",
    "load_config",
    "parse_config",
    "resolve_node",
    "settings",
]

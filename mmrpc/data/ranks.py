"""Which rank this process has, of how many: from RPC, or from a process group."""

from __future__ import annotations

from mmrpc.errors import LayoutError


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Completes a rank and a world size.

    Args:
        rank: None for this process's own.
        world_size: None for the number of all.

    Raises:
        LayoutError: If neither RPC nor a process group runs, or there is no such rank.
    """
    if rank is None or world_size is None:
        own = _of_rpc() or _of_process_group()
        if own is None:
            raise LayoutError(
                "no RPC and no process group runs here, so the rank is unknown",
                hint="Pass rank= and world_size=.",
            )
        rank = own[0] if rank is None else rank
        world_size = own[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise LayoutError(f"there is no rank {rank} among {world_size}")
    return rank, world_size


def _of_rpc() -> tuple[int, int] | None:
    from mmrpc.rpc import torchrpc

    if not torchrpc.is_initialized():
        return None
    agent = torchrpc.agent()
    return agent.get_worker_info().id, len(agent.get_worker_infos())


def _of_process_group() -> tuple[int, int] | None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()

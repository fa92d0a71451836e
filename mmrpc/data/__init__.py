"""Datasets of mapped tensors: written once, mapped by every process, sent by reference."""

from __future__ import annotations

from mmrpc.data.dataset import MappedDataset
from mmrpc.data.loading import ResumableLoader, ShardSampler
from mmrpc.data.ranges import RangeWriter, missing_rows, plan
from mmrpc.data.schema import Column
from mmrpc.data.sharing import RemoteDataset, SharedDataset
from mmrpc.data.writer import DatasetWriter

__all__ = [
    "Column",
    "DatasetWriter",
    "MappedDataset",
    "RangeWriter",
    "RemoteDataset",
    "ResumableLoader",
    "ShardSampler",
    "SharedDataset",
    "missing_rows",
    "plan",
]

"""Hazards of queues and data loaders: everything mapped goes by reference, and writes arrive."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from mmrpc import MemoryMappedTensor, errors
from mmrpc.core import lease

M = MemoryMappedTensor
METHODS = ["spawn", "forkserver", "fork"]
TIMEOUT_S = 60

WAYS: dict[str, Callable[[MemoryMappedTensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "row": lambda x: x[2],
    "view": lambda x: x.view(-1),
    "t": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "slice of a view": lambda x: x.view(-1)[3:9:2],
    "parameter": lambda x: torch.nn.Parameter(x.detach(), requires_grad=False),
}


def serve(requests: Any, answers: Any) -> None:
    """Overwrites each tensor that comes, after telling what it was."""
    for tensor in iter(requests.get, None):
        answers.put((type(tensor).__name__, tensor.tolist(), tensor.stride()))
        tensor.fill_(-7)
        answers.put("written")


@pytest.fixture(scope="module", params=METHODS)
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Queues to and from a process that was started in one of the three ways."""
    context = torch.multiprocessing.get_context(request.param)
    requests, answers = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(requests, answers), daemon=True)
    process.start()
    yield requests, answers
    requests.put(None)
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    requests.close()
    answers.close()


def mapped(place: str, directory: Path) -> MemoryMappedTensor:
    name = directory / "x" if place == "file" else None
    return M.from_tensor(torch.arange(24.0).view(6, 4), filename=name)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("way", WAYS)
def test_views_go_by_reference(
    way: str, place: str, worker: tuple[Any, Any], tmp_path: Path
) -> None:
    """Any view, plain ones too, arrives as it is, and what the receiver writes arrives here."""
    requests, answers = worker
    x = mapped(place, tmp_path)
    sent = WAYS[way](x)
    expected = (type(sent).__name__, sent.tolist(), sent.stride())
    requests.put(sent)
    assert answers.get(timeout=TIMEOUT_S) == expected
    assert answers.get(timeout=TIMEOUT_S) == "written"
    assert (sent == -7).all()
    assert (x == -7).sum() == sent.numel()


def test_what_is_sent_and_dropped_arrives(worker: tuple[Any, Any]) -> None:
    """Anonymous memory whose last tensor here went into the queue is still there to be opened."""
    requests, answers = worker
    requests.put(M.full(5, fill_value=3))
    assert answers.get(timeout=TIMEOUT_S) == ("MemoryMappedTensor", [3.0] * 5, (1,))
    assert answers.get(timeout=TIMEOUT_S) == "written"


class Rows(Dataset[list[torch.Tensor]]):
    """Gives views of a mapped tensor in every form, and a plain tensor."""

    def __init__(self, x: MemoryMappedTensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> list[torch.Tensor]:
        x = self.x
        return [x[i], x.view(-1)[4 * i : 4 * i + 2], x.t()[:, i], x.detach()[i], torch.ones(2)]


def only(batch: list[Any]) -> Any:
    return batch[0]


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("method", METHODS)
def test_data_loader(method: str, place: str, tmp_path: Path) -> None:
    """Workers get the dataset and give its views by reference; default batches are plain copies."""
    x = mapped(place, tmp_path)
    loader = DataLoader(
        Rows(x), batch_size=1, num_workers=1, collate_fn=only, multiprocessing_context=method
    )
    rows = list(loader)
    for i, (whole, view, column, detached, plain) in enumerate(rows):
        assert type(whole) is M
        assert whole.tolist() == column.tolist() == detached.tolist() == x[i].tolist()
        assert view.tolist() == x[i, :2].tolist()
        assert plain.tolist() == [1, 1]
    rows[2][1].fill_(-1)
    rows[3][2].fill_(-2)
    rows[4][3].fill_(-3)
    assert x[2:5, 0].tolist() == [-1, -2, -3]


@pytest.mark.parametrize("place", ["file", "memory"])
def test_default_batches(place: str, tmp_path: Path) -> None:
    """The default collation gives batches of ordinary tensors."""
    x = mapped(place, tmp_path)
    loader = DataLoader(Rows(x), batch_size=3, num_workers=1, multiprocessing_context="forkserver")
    batches = [batch[0] for batch in loader]
    assert torch.equal(torch.cat(batches), x)
    assert {type(batch) for batch in batches} == {torch.Tensor}


def test_dropped_memory_frees_its_lease() -> None:
    """What no process will open does not stay for ever."""
    M.ones(3).ref()
    assert lease.end_all()
    assert not lease.end_all()


def test_simple_queue_refuses_at_the_caller(tmp_path: Path) -> None:
    """What cannot be sent is an error where it is put, if the queue pickles there."""
    M.zeros(3, filename=tmp_path / "x")
    private = M.from_filename(tmp_path / "x", torch.float32, (3,), mode="r")
    private[0] = 1
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with pytest.raises(errors.NotSharedError, match="clone"):
        queue.put(private)
    with pytest.raises(errors.NotSharedError, match="clone"):
        queue.put([private.view(-1).untyped_storage()])
    queue.put(private.clone())
    assert queue.get().tolist() == [1, 0, 0]
    queue.close()


def test_plain_pickle_of_a_plain_view(tmp_path: Path) -> None:
    """Plain pickle, which knows no references, copies a plain view rather than lose it."""
    x = mapped("file", tmp_path)
    assert pickle.loads(pickle.dumps(x.t())).tolist() == x.t().tolist()

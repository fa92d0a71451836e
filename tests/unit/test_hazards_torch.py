"""Hazards of what torch does to tensors: none sends anything but what the sender holds."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrpc import MemoryMappedTensor, errors, ref
from mmrpc.core.storage import mapped_storage
from tests.needs import needs
from tests.peers import as_both_users
from tests.unit.core.tensors import PLACES, bits

M = MemoryMappedTensor
F32 = torch.float32


def file(directory: str | Path, name: str = "x") -> MemoryMappedTensor:
    return M.from_tensor(torch.arange(24.0).view(2, 3, 4), filename=f"{directory}/{name}")


def round_trip(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


# In-place changes of what a tensor is, rather than of its values.
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "t_": lambda x: x.resize_(4, 6).t_(),
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "as_strided_": lambda x: x.as_strided_((3, 2), (1, 5), 2),
    "resize_ smaller": lambda x: x.resize_(2, 2),
    "resize_ larger": lambda x: x.resize_(99),
    "resize_ to nothing": lambda x: x.resize_(0),
    "set_ plain": lambda x: x.set_(torch.full((3,), 5.0)),
    "set_ mapped": lambda x: x.set_(M.full(3, fill_value=5.0)),
    "set_ storage": lambda x: x.set_(torch.full((3,), 5.0).untyped_storage(), 0, (3,), (1,)),
    "set_ own storage": lambda x: x.set_(x.untyped_storage(), 4, (2,), (3,)),
    "data plain": lambda x: setattr(x, "data", torch.full((3,), 5.0)),
    "data mapped": lambda x: setattr(x, "data", M.full(3, fill_value=5.0)),
    "storage resize": lambda x: x.untyped_storage().resize_(400),
    "swap": lambda x: torch.utils.swap_tensors(x, torch.full((3,), 5.0)),
}


@pytest.mark.parametrize("place", ["file", "memory", "private"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_in_place(change: str, place: str, tmp_path: Path) -> None:
    """After it, what is sent is what the sender holds, or sending is refused."""
    x = PLACES[place](torch.arange(24.0).view(2, 3, 4), tmp_path)
    plain = torch.arange(24.0).view(2, 3, 4)
    if change in ("resize_ larger", "storage resize"):
        with pytest.raises(RuntimeError, match="not resizable"):
            CHANGES[change](x)
    else:
        CHANGES[change](x)
        CHANGES[change](plain)
    assert bits(x) == bits(plain)
    for send in (round_trip, lambda x: ref(x).open(), copy.deepcopy, copy.copy):
        try:
            sent = send(x)
        except errors.NotSharedError:
            assert "plain" in change or change in ("set_ storage", "swap")
        else:
            assert bits(sent) == bits(x)


@given(
    changes=st.lists(
        st.sampled_from([name for name in CHANGES if name not in ("swap", "set_ storage")]),
        max_size=3,
    ),
    place=st.sampled_from(["file", "memory"]),
)
def test_changes_one_after_another(changes: list[str], place: str, tmp_path: Path) -> None:
    """Nor does any series of them send something else."""
    x = PLACES[place](torch.arange(24.0).view(2, 3, 4), tmp_path)
    for change in changes:
        try:
            CHANGES[change](x)
        except (RuntimeError, IndexError):  # too large, or without such a dimension
            continue
    try:
        assert bits(round_trip(x)) == bits(x)
    except errors.NotSharedError:
        assert mapped_storage(x) is None


@as_both_users
def test_data_of_a_plain_view(directory: str) -> None:
    """A plain tensor that gets other data is no longer mapped, and is sent as what it is."""
    x = file(directory)
    view = x.view(-1)
    view.data = torch.ones(3)
    assert round_trip(view).tolist() == [1, 1, 1]
    with pytest.raises(errors.NotSharedError):
        ref(view)
    view.data = x[0]
    assert ref(view).open().tolist() == x[0].tolist()


@as_both_users
def test_lazy_views(directory: str) -> None:
    """Conjugates and negatives, which are bits of a tensor and not bytes, arrive."""
    x = M.from_tensor(torch.randn(3, 4, dtype=torch.complex64), filename=f"{directory}/x")
    for view in (x.conj(), x.conj().imag, x.mH, x[1].conj(), torch._neg_view(x.real), x.imag):
        same = ref(view).open()
        assert same.tolist() == view.tolist()
        same.fill_(2)
        assert (view == 2).all()


@as_both_users
def test_saved_reference(directory: str) -> None:
    """torch.save writes a reference, which loads by default and is checked when it does."""
    x = file(directory)
    torch.save({"x": x, "rows": [x[0], x[1]]}, f"{directory}/saved")
    assert os.path.getsize(f"{directory}/saved") < 4000
    loaded = torch.load(f"{directory}/saved", weights_only=True)
    loaded["rows"][1].zero_()
    assert loaded["x"][1].sum() == x[1].sum() == 0
    os.truncate(x.filename, 95)
    for weights_only in (True, False):
        with pytest.raises(errors.FileTooShortError):
            torch.load(f"{directory}/saved", weights_only=weights_only)


@as_both_users
def test_saved_data(directory: str) -> None:
    """A clone, a plain view and a state_dict are saved as data."""
    x = file(directory)
    torch.save([x.clone(), x.view(-1), x.detach()], f"{directory}/saved")
    os.unlink(x.filename)
    for loaded in torch.load(f"{directory}/saved"):
        assert torch.equal(loaded.view(-1), x.view(-1))
        assert type(loaded) is torch.Tensor


class Net(torch.nn.Module):
    """A module with a mapped buffer, and a parameter on mapped memory."""

    def __init__(self, directory: str | Path, name: str = "") -> None:
        super().__init__()
        self.register_buffer("table", file(directory, f"table{name}"))
        self.weight = torch.nn.Parameter(file(directory, f"weight{name}").detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.table * x).sum()


class TestModules:
    """A module whose buffers and parameters are mapped."""

    def test_buffer(self, tmp_path: Path) -> None:
        """A buffer stays mapped, a loaded state is written to it, and gradients flow."""
        net, other = Net(tmp_path), Net(tmp_path, "2")
        other.table.fill_(3)
        assert type(net.table) is M
        net.load_state_dict(other.state_dict())
        assert (M.from_filename(tmp_path / "table", F32, (2, 3, 4)) == 3).all()
        net(torch.ones(4)).backward()
        assert (net.weight.grad == 3).all()
        with torch.no_grad():
            net.weight -= net.weight.grad
        assert M.from_filename(tmp_path / "weight", F32, (24,))[0] == -3

    def test_saved_state(self, tmp_path: Path) -> None:
        """A saved state_dict is data, and loads anywhere."""
        net, buffer = Net(tmp_path), io.BytesIO()
        torch.save(net.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        net.table.zero_()
        assert net.load_state_dict(state).missing_keys == []
        assert net.table.sum() == 276

    def test_deepcopy(self, tmp_path: Path) -> None:
        """A deep copy is independent of the file."""
        net = Net(tmp_path)
        twin = copy.deepcopy(net)
        twin.table.zero_()
        with torch.no_grad():
            twin.weight.zero_()
        assert net.table.sum() == net.weight.sum() == 276

    def test_moves(self, tmp_path: Path) -> None:
        """Sharing is nothing to do, another dtype is a plain copy."""
        net = Net(tmp_path).share_memory()
        assert type(net.table) is M
        assert net.double().table.dtype is torch.float64
        assert type(net.table) is torch.Tensor

    def test_pickled(self, tmp_path: Path) -> None:
        """A pickled module's buffer is a reference."""
        net = Net(tmp_path)
        again = round_trip(net)
        again.table.zero_()
        assert net.table.sum() == 0

    def test_parameter_of_the_class(self, tmp_path: Path) -> None:
        """The class itself is no parameter: the way is a parameter on its plain view."""
        with pytest.raises(RuntimeError, match="detach"):
            torch.nn.Parameter(file(tmp_path))
        parameter = torch.nn.Parameter(file(tmp_path, "y").detach())
        assert ref(parameter).open().tolist() == parameter.tolist()


class Record(pydantic.BaseModel):
    """A model with a tensor in it."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    x: MemoryMappedTensor
    any: torch.Tensor


def test_pydantic(tmp_path: Path) -> None:
    """A field keeps the very tensor, a deep copy of the model has its own."""
    x = file(tmp_path)
    record = Record(x=x, any=x)
    assert record.x is record.any is x
    twin = record.model_copy(deep=True)
    twin.x.zero_()
    assert x.sum() == 276
    assert round_trip(record).x.sum() == 276
    with pytest.raises(pydantic.ValidationError):
        Record(x=torch.ones(2), any=x)


@as_both_users
def test_no_gradients(directory: str) -> None:
    """A mapped tensor cannot be made to require gradients."""
    x = file(directory)
    for tensor in (x, x[0], M.ones(3)):
        with pytest.raises(RuntimeError, match="cannot require gradients"):
            tensor.requires_grad_()
        assert not tensor.requires_grad


@as_both_users
def test_default_device(directory: str) -> None:
    """Inside `with torch.device("meta")` all that makes or opens a tensor works."""
    x = file(directory)
    expected = x.tolist()
    data, text = pickle.dumps([x, x[1:], x.view(-1).untyped_storage()]), x.ref().to_json()
    with torch.device("meta"):
        made = [
            M.ones(2),
            M.full(2, fill_value=1),
            M.zeros(0),
            M.zeros(2, filename=f"{directory}/y"),
        ]
        made += [M.from_tensor(x), M.from_filename(x.filename, F32, (2, 3, 4))]
        made += [M.from_storage(x.untyped_storage(), dtype=F32), M.zeros_like(x)]
        made += [*pickle.loads(data)[:2], x.ref().open(), copy.deepcopy(x), copy.copy(x)]
        made += [type(x.ref()).from_json(text).open()]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[-1].tolist() == expected


@as_both_users
def test_copies_share_one_map(directory: str) -> None:
    """However often a file is opened or a tensor copied, it is mapped once in each mode."""
    x = file(directory)
    data = pickle.dumps(x)
    held = [pickle.loads(data) for _ in range(100)] + [copy.copy(x), x.ref().open(), x[0]]
    assert {tensor.untyped_storage().data_ptr() for tensor in held} == {x.data_ptr()}
    with open("/proc/self/maps") as maps:
        inode = str(os.stat(x.filename).st_ino)
        assert sum(line.split()[4] == inode for line in maps) == 1


def test_sent_in_another_process_without_torch_functions() -> None:
    """Unpickling imports what it needs by itself."""
    x = M.ones(3)
    code = (
        "import sys, pickle; x = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print(type(x).__name__, float(x.sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(x).hex()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split() == ["MemoryMappedTensor", "3.0"]


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[0] + 1, *x.unbind(0), *x.split(1), *x.chunk(2), x.split([1, 2], 1)[1], x[1]]


@needs("compiler")
@pytest.mark.timeout(600)
def test_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under torch.compile, with inductor, the parts of a tensor are regular tensors."""
    caplog.set_level(logging.WARNING)
    x = file(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        results = torch.compile(parts)(x)
    assert {type(result) for result in results} == {torch.Tensor}
    assert [bits(result) for result in results] == [bits(result) for result in parts(x.clone())]


def test_error_texts_are_sentences() -> None:
    """What a user meets most says what is wrong, and what to do."""
    for fails in (lambda: ref(torch.ones(2)), lambda: M.ones(2).requires_grad_()):
        with pytest.raises(errors.MmrpcError) as caught:
            fails()
        assert re.fullmatch(r".+\. [A-Z].+\.", str(caught.value), re.DOTALL)

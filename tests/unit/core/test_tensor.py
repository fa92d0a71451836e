"""MemoryMappedTensor is a torch.Tensor: which results keep the class, and what it adds."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrpc import MemoryMappedTensor, errors
from tests.unit.core.tensors import ORDINARY, bits, random_tensor

Make = Callable[..., MemoryMappedTensor]


@pytest.fixture(params=["file", "memory"])
def m(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryMappedTensor:
    """A float32 tensor of 2 by 3 by 4."""
    source = torch.arange(24.0).view(2, 3, 4)
    name = tmp_path / "m" if request.param == "file" else None
    return MemoryMappedTensor.from_tensor(source, filename=name)


class Sub(MemoryMappedTensor):
    """A subclass, as users make them."""


class Index:
    def __index__(self) -> int:
        return 1


KEEP = {
    "int": lambda m: m[0],
    "negative int": lambda m: m[-1],
    "__index__": lambda m: m[Index()],
    "0-d tensor": lambda m: m[torch.tensor(1)],
    "numpy int": lambda m: m[np.int64(1)],
    "slice": lambda m: m[:1],
    "step": lambda m: m[:, ::2],
    "nothing in it": lambda m: m[5:],
    "None": lambda m: m[None],
    "Ellipsis": lambda m: m[...],
    "empty tuple": lambda m: m[()],
    "tuple": lambda m: m[0, :, None, 1],
    "element": lambda m: m[0, 1, 2],
    "unbind": lambda m: m.unbind(0)[1],
    "unbind last": lambda m: m.unbind(-1)[1],
    "chunk": lambda m: m.chunk(2)[1],
    "chunk dim": lambda m: m.chunk(3, 1)[1],
    "split": lambda m: m.split(1)[1],
    "split sizes": lambda m: m.split([1, 2], dim=1)[1],
    "torch.split": lambda m: torch.split(m, 1)[1],
    "iteration": lambda m: list(m)[1],
    "in place": lambda m: m.add_(1),
    "out": lambda m: torch.add(torch.ones(2, 3, 4), 1, out=m),
    "as_tensor": torch.as_tensor,
    "to": lambda m: m.to("cpu"),
    "contiguous": lambda m: m.contiguous(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "share_memory_": lambda m: m.share_memory_(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}

VIEWS = {
    "view": lambda m: m.view(-1),
    "reshape": lambda m: m.reshape(4, 6),
    "t": lambda m: m[0].t(),
    "transpose": lambda m: m.transpose(0, 2),
    "permute": lambda m: m.permute(2, 0, 1),
    "squeeze": lambda m: m[:1].squeeze(0),
    "unsqueeze": lambda m: m.unsqueeze(0),
    "expand": lambda m: m[:1].expand(5, 3, 4),
    "flatten": lambda m: m.flatten(),
    "narrow": lambda m: m.narrow(0, 0, 1),
    "select": lambda m: m.select(0, 1),
    "diagonal": lambda m: m.diagonal(),
    "detach": lambda m: m.detach(),
    "unfold": lambda m: m.unfold(2, 2, 1),
    "torch.unbind": lambda m: torch.unbind(m)[0],
    "torch.chunk": lambda m: torch.chunk(m, 2)[0],
    "as dtype": lambda m: m.view(torch.int32),
}

COPIES = {
    "mask": lambda m: m[m > 3],
    "tensor": lambda m: m[torch.tensor([0, 1])],
    "list": lambda m: m[[0]],
    "range": lambda m: m[range(1)],
    "True": lambda m: m[True],
    "False": lambda m: m[False],
    "math": lambda m: m + 1,
    "clone": lambda m: m.clone(),
    "dtype": lambda m: m.double(),
    "reduction": lambda m: m.sum(),
    "stack": lambda m: torch.stack([m, m]),
}


class TestClass:
    """Which results are a MemoryMappedTensor."""

    @pytest.mark.parametrize("name", KEEP)
    def test_kept(self, name: str, m: MemoryMappedTensor) -> None:
        """Indexing that gives a view, and what gives the tensor itself, keeps the class."""
        expected = KEEP[name](m.clone())
        result = KEEP[name](m)
        assert type(result) is MemoryMappedTensor
        assert bits(result) == bits(expected)
        if result.numel() and name != "deepcopy":
            result.fill_(-7)
            assert (m == -7).any()

    @pytest.mark.parametrize("name", KEEP)
    def test_subclass_kept(self, name: str) -> None:
        """A subclass stays what it is."""
        assert type(KEEP[name](Sub.from_tensor(torch.arange(24.0).view(2, 3, 4)))) is Sub

    @pytest.mark.parametrize("name", VIEWS)
    def test_plain_views(self, name: str, m: MemoryMappedTensor) -> None:
        """Torch's views are plain tensors on the same storage: writes reach the file."""
        expected = VIEWS[name](m.clone())
        view = VIEWS[name](m)
        assert type(view) is torch.Tensor
        assert bits(view) == bits(expected)
        assert view.untyped_storage().data_ptr() == m.untyped_storage().data_ptr()
        view.zero_()
        assert (m == 0).sum() > 1

    @pytest.mark.parametrize("name", COPIES)
    def test_copies(self, name: str, m: MemoryMappedTensor) -> None:
        """Everything else is a plain tensor in plain memory."""
        result, expected = COPIES[name](m), COPIES[name](m.clone())
        assert type(result) is torch.Tensor
        assert bits(result) == bits(expected)
        assert result.untyped_storage().data_ptr() != m.untyped_storage().data_ptr()

    def test_inference_mode(self) -> None:
        """Also where torch keeps no record of views."""
        with torch.inference_mode():
            m = MemoryMappedTensor.zeros(3, 4)
            assert type(m[0]) is type(m.unbind(0)[0]) is MemoryMappedTensor
            assert type(m[[0, 1]]) is type(m[m > 0]) is torch.Tensor
            assert pickle.loads(pickle.dumps(m[1:])).shape == (2, 4)

    def test_class_methods_of_a_subclass(self, tmp_path: Path) -> None:
        """All constructors give the class that they are called on."""
        one = torch.ones(2)
        made = [
            Sub(one),
            Sub.from_tensor(one, filename=tmp_path / "x"),
            Sub.from_filename(tmp_path / "x", torch.float32, (2,)),
            Sub.from_storage(one.untyped_storage(), dtype=torch.float32),
            *(Sub.empty(2), Sub.zeros(2), Sub.ones(2), Sub.full(2, fill_value=1)),
            *(Sub.empty_like(one), Sub.zeros_like(one), Sub.ones_like(one), Sub.full_like(one, 1)),
        ]
        assert {type(x) for x in made} == {Sub}

    def test_first_class_dimension(self, m: MemoryMappedTensor) -> None:
        """Functorch's dimensions are refused by a text that programs look for."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dims = pytest.importorskip("functorch.dim").dims
        with pytest.raises(ValueError, match=r"^Using first class dimension indices with Mem"):
            m[dims(1)]


class TestElements:
    """What a tensor says of itself."""

    def test_builtins(self, m: MemoryMappedTensor) -> None:
        """Python's own functions work as on any tensor."""
        assert len(m) == 2
        assert isinstance(hash(m), int)
        assert m.tolist() == torch.arange(24.0).view(2, 3, 4).tolist()
        assert torch.is_tensor(m)
        assert repr(m[0, 0]) == "MemoryMappedTensor([0., 1., 2., 3.])"
        assert [int(m[0, 0, 1]), float(m[0, 0, 2]), bool(m[0, 0, 3])] == [1, 2.0, True]

    def test_format(self, m: MemoryMappedTensor) -> None:
        """An element takes a format, as a number does."""
        assert f"{m[0, 0, 1]:.3f} {m[0, 0, 1]}" == "1.000 1.0"
        assert f"{m[0, 0]}" == repr(m[0, 0])
        with pytest.raises(TypeError):
            format(m, ".3f")

    def test_numpy(self, m: MemoryMappedTensor) -> None:
        """numpy() shares the memory."""
        m.numpy()[0, 0, 0] = 9
        assert m[0, 0, 0] == 9

    def test_mode_is_torchs(self, m: MemoryMappedTensor) -> None:
        """The name of the mode argument does not hide the most frequent value."""
        assert m.mode().values.shape == (2, 3)

    def test_shared(self, m: MemoryMappedTensor) -> None:
        """It is shared, and making it so is nothing to do."""
        assert m.is_shared()
        assert m.share_memory_() is m
        assert m.view(-1).is_shared()

    def test_errors_are_torchs(self, m: MemoryMappedTensor) -> None:
        """A bad index is the error that torch has."""
        with pytest.raises(IndexError):
            m[2]
        with pytest.raises(IndexError):
            m[0, 0, 0, 0]
        with pytest.raises(ValueError, match="step must be greater"):
            m[::-1]
        with pytest.raises(TypeError):
            m.unbind()

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.requires_grad_(),
            lambda m: setattr(m, "requires_grad", True),
            lambda m: m.requires_grad_(requires_grad=True),
        ],
    )
    def test_no_gradients(self, change: Callable[[Any], Any], m: MemoryMappedTensor) -> None:
        """It cannot require gradients, and the hint says how to have them."""
        with pytest.raises(RuntimeError, match="detach"):
            change(m)
        assert m.requires_grad is False
        assert m.requires_grad_(False) is m

    def test_gradients_through_it(self, m: MemoryMappedTensor) -> None:
        """It takes part in a computation, and a view of it can have a gradient."""
        weight = torch.ones(4, requires_grad=True)
        (m @ weight).sum().backward()
        assert weight.grad.tolist() == m.sum((0, 1)).tolist()
        leaf = m.detach().requires_grad_()
        leaf.sum().backward()
        assert leaf.grad.shape == m.shape


class TestFilename:
    """The name of the file."""

    def test_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is an absolute str, whatever was given, and the same for all that views it."""
        monkeypatch.chdir(tmp_path)
        for name in ("a", Path("b"), tmp_path / "c", str(tmp_path / "d")):
            x = MemoryMappedTensor.zeros(2, filename=name)
            assert x.filename == x[1:].filename == str(tmp_path / Path(name).name)
            assert type(x.filename) is str

    def test_links_in_it_are_kept(self, tmp_path: Path) -> None:
        """The path is the one that was given, also through a linked directory."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        x = MemoryMappedTensor.zeros(2, filename=tmp_path / "link" / "x")
        assert x.filename == f"{tmp_path}/link/x"
        assert (tmp_path / "real" / "x").exists()

    def test_storage_has_it(self, tmp_path: Path) -> None:
        """The storage of a shared map has the path too, that of a private one has none."""
        x = MemoryMappedTensor.zeros(2, filename=tmp_path / "x")
        assert x.view(-1).untyped_storage().filename == x.filename
        private = MemoryMappedTensor.from_filename(x.filename, x.dtype, x.shape, mode="r")
        assert private.filename == x.filename
        assert private.untyped_storage().filename is None
        assert MemoryMappedTensor.zeros(2).untyped_storage().filename is None

    def test_nothing_is_deleted(self, tmp_path: Path) -> None:
        """The file stays when the tensor goes."""
        MemoryMappedTensor.ones(2, filename=tmp_path / "x")
        assert (tmp_path / "x").stat().st_size == 8


class TestDeprecated:
    """Three names of the past work, and warn."""

    def test_index(self, m: MemoryMappedTensor) -> None:
        """`index` is the last index, as it was given."""
        for part, index in (
            (m, None),
            (m[1], 1),
            (m[1][0:2], slice(0, 2)),
            (m[0, ..., 1], (0, ..., 1)),
        ):
            with pytest.warns(DeprecationWarning, match="MemoryMappedTensor.index"):
                assert part.index == index

    def test_parent_shape(self, m: MemoryMappedTensor) -> None:
        """`parent_shape` is the shape of the whole."""
        for part in (m, m[1], m[1][0], m.unbind(0)[0]):
            with pytest.warns(DeprecationWarning, match="parent_shape"):
                assert part.parent_shape == (2, 3, 4)

    def test_from_handler(self, m: MemoryMappedTensor) -> None:
        """`from_handler` maps what a private `_handler` stands for."""
        with pytest.warns(DeprecationWarning, match="from_handler"):
            same = MemoryMappedTensor.from_handler(m._handler, m.dtype, m.shape, 1)
        same[0, 0] = -1
        assert m[1, 0, 0] == -1

    def test_warning_points_at_the_caller(self, m: MemoryMappedTensor) -> None:
        """The line that is to be changed is the one that is shown."""
        with pytest.warns(DeprecationWarning, match="index") as caught:
            m.index  # noqa: B018
        assert caught[0].filename == __file__


class TestConstructor:
    """The class itself, called."""

    def test_path(self, tmp_path: Path) -> None:
        """A path is mapped, with dtype and shape."""
        MemoryMappedTensor.from_tensor(torch.arange(6), filename=tmp_path / "x")
        for path in (str(tmp_path / "x"), tmp_path / "x"):
            x = MemoryMappedTensor(path, dtype=torch.int64, shape=(2, 3), index=1)
            assert x.tolist() == [3, 4, 5]

    @pytest.mark.parametrize("missing", [{"dtype": torch.int64}, {"shape": (6,)}, {}])
    def test_path_alone(self, missing: dict[str, Any], tmp_path: Path) -> None:
        """A file holds the elements alone: what is missing is said."""
        with pytest.raises(TypeError, match="needs dtype= and shape="):
            MemoryMappedTensor(str(tmp_path / "x"), **missing)

    def test_tensor(self, tmp_path: Path) -> None:
        """A tensor is wrapped, or copied to a file."""
        source = torch.arange(6.0)
        wrapped = MemoryMappedTensor(source)
        wrapped[0] = 9
        assert source[0] == 9
        with pytest.raises(errors.NotSharedError):
            pickle.dumps(wrapped)
        copied = MemoryMappedTensor(source, filename=tmp_path / "x", shape=(2, 6), index=1)
        assert copied.tolist() == source.tolist()
        assert copied.filename == str(tmp_path / "x")
        assert MemoryMappedTensor(wrapped, index=slice(1, 2)).tolist() == [1]

    def test_wrapped_mapped_tensor_travels(self, m: MemoryMappedTensor) -> None:
        """A plain view that is given the class is as mapped as it was."""
        again = MemoryMappedTensor(m.view(-1))
        assert pickle.loads(pickle.dumps(again)).tolist() == m.view(-1).tolist()

    def test_storage(self) -> None:
        """A storage is viewed."""
        x = MemoryMappedTensor(torch.arange(6).untyped_storage(), shape=(2, 3))
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.parametrize(
        ("source", "arguments", "kind"),
        [
            (torch.ones(2), {"dtype": torch.int64}, TypeError),
            (torch.ones(2), {"handler": 1}, TypeError),
            (torch.ones(2), {"device": "cuda"}, ValueError),
            (torch.ones(2), {"filname": "x"}, TypeError),
            ("x", {"filename": "y"}, TypeError),
            (3, {"dtype": torch.int64, "shape": (2,)}, TypeError),
        ],
    )
    def test_mistakes(self, source: Any, arguments: dict[str, Any], kind: type) -> None:
        """Arguments that do not go together are refused."""
        with pytest.raises(kind):
            MemoryMappedTensor(source, **arguments)


class TestCopies:
    """copy and deepcopy."""

    def test_copy_is_on_the_same_memory(self, m: MemoryMappedTensor) -> None:
        """A shallow copy is another tensor on the same bytes."""
        twin = copy.copy(m)
        assert twin is not m
        twin[0, 0, 0] = 9
        assert m[0, 0, 0] == 9

    def test_deepcopy_is_independent(self, m: MemoryMappedTensor) -> None:
        """A deep copy has its own memory, no file, and can be sent."""
        twin = copy.deepcopy({"a": m, "b": m})
        assert twin["a"] is twin["b"]
        twin["a"].zero_()
        assert m[1, 2, 3] == 23
        with pytest.raises(errors.NotSharedError):
            twin["a"].filename  # noqa: B018
        assert (pickle.loads(pickle.dumps(twin["a"])) == 0).all()

    def test_deepcopy_of_a_plain_view(self, m: MemoryMappedTensor) -> None:
        """A deep copy of a plain view is a plain tensor of its own."""
        twin = copy.deepcopy(m.view(-1))
        assert type(twin.untyped_storage()) is torch.UntypedStorage
        twin.zero_()
        assert m[1, 2, 3] == 23


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("dtype", ORDINARY, ids=str)
def test_dtypes(dtype: torch.dtype, place: str, tmp_path: Path) -> None:
    """Every dtype is created, mapped again and pickled, with and without a file."""
    source = random_tensor(dtype, (3, 2))
    name = tmp_path / "x" if place == "file" else None
    x = MemoryMappedTensor.from_tensor(source, filename=name)
    assert (x.dtype, bits(x)) == (dtype, bits(source))
    assert bits(pickle.loads(pickle.dumps(x))) == bits(source)
    assert bits(x[1]) == bits(source[1])
    empty = MemoryMappedTensor.empty_like(source)
    assert (empty.dtype, empty.shape) == (dtype, source.shape)
    if place == "file":
        assert bits(MemoryMappedTensor.from_filename(tmp_path / "x", dtype, (3, 2))) == bits(source)


@pytest.mark.parametrize("name", ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"])
def test_opaque_dtypes(name: str, tmp_path: Path) -> None:
    """Bits that torch cannot calculate with are held as they are."""
    dtype = getattr(torch, name)
    source = random_tensor(torch.uint8, (dtype.itemsize * 4,)).view(dtype)
    x = MemoryMappedTensor.from_tensor(source, filename=tmp_path / "x")
    assert x.dtype is dtype
    again = pickle.loads(pickle.dumps(x[1:]))
    assert again.view(torch.uint8).tolist() == source[1:].view(torch.uint8).tolist()

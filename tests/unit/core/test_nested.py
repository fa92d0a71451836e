"""The arithmetic of nested tensors, and the tensors that it gives."""

from __future__ import annotations

import pytest
import torch

from mmrpc import MemoryMappedTensor, TensorRef, ref
from mmrpc.core.nested import NestedLayout
from mmrpc.errors import LayoutError, UnsupportedTensorError
from tests.unit.core.tensors import bits

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

SIZES = torch.tensor([[2, 3], [1, 3]])


def nested(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.arange(6).view(2, 3).to(dtype), torch.arange(6, 9).view(1, 3).to(dtype)]
    )


def test_components_lie_one_behind_the_other() -> None:
    """A new nested tensor is one run of elements, a component after the other."""
    layout = NestedLayout.contiguous(torch.float32, SIZES, 8)
    assert (layout.offsets, layout.span_bytes, layout.end_bytes) == ((0, 6), 36, 44)
    assert layout.is_contiguous
    assert layout.sizes_tensor().tolist() == SIZES.tolist()


def test_layout_of_a_transposed_tensor() -> None:
    """A transposed nested tensor keeps its strides, and says that it is not contiguous."""
    layout = NestedLayout.of(nested().transpose(1, 2), 0)
    assert layout.sizes == ((3, 2), (3, 1))
    assert layout.strides == ((1, 3), (1, 3))
    assert not layout.is_contiguous
    assert NestedLayout.unpack(layout.packed) == layout


def test_empty_components_need_nothing() -> None:
    """A component without elements needs no byte of the file, wherever it is said to be."""
    layout = NestedLayout(torch.float32, ((0,), (2,)), ((1,), (1,)), (999, 0))
    assert layout.check().end_bytes == 8


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (NestedLayout(torch.float32, ((2,),), (), (0,)), "for each row"),
        (NestedLayout(torch.float32, ((2,), (2, 2)), ((1,), (2, 1)), (0, 2)), "same length"),
        (NestedLayout(torch.float32, ((-2,),), ((1,),), (0,)), "not negative"),
        (NestedLayout(torch.float32, ((2,),), ((1,),), (-1,)), "not negative"),
        (NestedLayout(torch.float32, ((2,),), ((1,),), (0,), 3), "does not suit"),
        (NestedLayout(torch.float32, ((2,),), ((1,),), (0,), 2**63 - 4), "larger than any file"),
    ],
)
def test_bad_numbers(layout: NestedLayout, text: str) -> None:
    """Numbers that cannot be are refused."""
    with pytest.raises(LayoutError, match=text):
        layout.check()


CONSTRUCTORS = {
    "empty": lambda name: MemoryMappedTensor.empty(SIZES, filename=name),
    "zeros": lambda name: MemoryMappedTensor.zeros(SIZES, filename=name),
    "ones": lambda name: MemoryMappedTensor.ones(shape=SIZES, filename=name),
    "full": lambda name: MemoryMappedTensor.full(SIZES, fill_value=3, filename=name),
    "empty_like": lambda name: MemoryMappedTensor.empty_like(nested(), filename=name),
    "zeros_like": lambda name: MemoryMappedTensor.zeros_like(nested(), filename=name),
    "ones_like": lambda name: MemoryMappedTensor.ones_like(nested(), filename=name),
    "full_like": lambda name: MemoryMappedTensor.full_like(nested(), 3, filename=name),
}
VALUES = {"empty": 0, "zeros": 0, "ones": 1, "full": 3}


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors(name: str, place: str, tmp_path: object) -> None:
    """Every constructor makes nested tensors, which keep their class and can be sent."""
    x = CONSTRUCTORS[name](f"{tmp_path}/x" if place == "file" else None)
    value = VALUES[name.removesuffix("_like")]
    assert x._nested_tensor_size().tolist() == SIZES.tolist()
    for same in (x, x.ref().open(), TensorRef.from_json(x.ref().to_json()).open()):
        assert isinstance(same, MemoryMappedTensor)
        assert [part.unique().tolist() for part in same] == [[value]] * 2
        every = [*iter(same), *same.unbind(0), same[0]]
        assert {type(part) for part in every} == {MemoryMappedTensor}


def test_from_tensor_to_another_shape() -> None:
    """Each component is broadcast to the row of a nested shape."""
    x = MemoryMappedTensor.from_tensor(nested(), shape=torch.tensor([[2, 3], [2, 3]]))
    assert x[1].tolist() == [[6, 7, 8]] * 2
    with pytest.raises(LayoutError, match="2 components cannot take the 3 shapes"):
        MemoryMappedTensor.from_tensor(nested(), shape=torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(LayoutError, match="cannot be broadcast"):
        MemoryMappedTensor.from_tensor(nested(), shape=torch.tensor([[2, 4], [2, 3]]))


def test_existing_data(tmp_path: object) -> None:
    """Files, storages and handlers are read with a nested shape."""
    x = MemoryMappedTensor.from_tensor(torch.arange(9.0), filename=f"{tmp_path}/x")
    expected = bits(nested())
    assert bits(MemoryMappedTensor.from_filename(x.filename, torch.float32, SIZES)) == expected
    storage = x.untyped_storage()
    viewed = MemoryMappedTensor.from_storage(storage, dtype=torch.float32, shape=SIZES)
    assert bits(viewed) == expected
    with pytest.warns(DeprecationWarning, match="from_handler"):
        handled = MemoryMappedTensor.from_handler(x._handler, torch.float32, SIZES)
    assert bits(handled) == expected
    handled[1][0, 0] = -1
    assert x[6] == -1


def test_index_in_constructors(tmp_path: object) -> None:
    """An index picks a component."""
    MemoryMappedTensor.from_tensor(nested(), filename=f"{tmp_path}/x")
    part = MemoryMappedTensor.from_filename(f"{tmp_path}/x", torch.float32, SIZES, 1)
    assert part.tolist() == [[6, 7, 8]]


def test_views_of_views_travel() -> None:
    """A plain view of a nested tensor, and a component of it, have references."""
    x = MemoryMappedTensor.from_tensor(nested())
    turned = x.transpose(1, 2)
    assert bits(ref(turned).open()) == bits(nested().transpose(1, 2))
    assert ref(turned[1]).open().tolist() == [[6], [7], [8]]
    ref(turned).open()[1].fill_(5)
    assert x[1].tolist() == [[5, 5, 5]]


def test_jagged_is_refused() -> None:
    """The jagged layout has no file form, which the error says in torch's terms too."""
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(UnsupportedTensorError, match="jagged"):
        MemoryMappedTensor.from_tensor(jagged)
    with pytest.raises(NotImplementedError):
        MemoryMappedTensor.from_tensor(jagged)


def test_parent_shape() -> None:
    """The deprecated parent_shape of a component is the matrix of all sizes."""
    x = MemoryMappedTensor.from_tensor(nested())
    with pytest.warns(DeprecationWarning, match="parent_shape"):
        assert x[0].parent_shape.tolist() == SIZES.tolist()

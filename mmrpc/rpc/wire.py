"""How calls and results are written: bytes of ours, and what only torch can send, beside them.

torch's own pickler sees a plain function with the two parts as its arguments. What a user sent
is therefore unpickled by `decode`, on a thread where an exception can be caught and typed, and
never inside torch, where it would leave the caller waiting.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core import reference
from mmrpc.core.standin import Unopened
from mmrpc.paths.locating import destination
from mmrpc.rpc import torchrpc
from mmrpc.rpc.spool import policy as spool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mmrpc.rpc.spool.peers import Address

Message = tuple[bytes, list[Any]]
"""The pickled object, and the tensors, RRefs and modules that it refers to by number."""

_LAYOUTS_OF_TORCHS = (torch.strided, torch.sparse_coo)
"""What torch's serializer takes; over a nested tensor it even aborts the process."""

_jit: Any = torch.jit

_decoding = threading.local()


def encode(obj: Any, receiver: Address | None = None) -> Message:
    """Pickles an object, its mapped tensors as references.

    Args:
        obj: Any object that pickles, or that torch's RPC can send.
        receiver: The process that will decode it, if that is known. To one of this host large
            tensors go through memory, and nothing has to be flushed.

    Returns:
        The bytes, and the objects in it that travel by torch's own means: plain tensors in
        ordinary memory (distributed autograd and device transfer hook in there), RRefs, and
        classes that registered a reducer with torch's RPC.

    Raises:
        NotSharedError: If the bytes of a mapped tensor cannot be reached by others.
        pickle.PicklingError: And what else pickling may raise, if it does not pickle.
    """
    carried: list[Any] = []
    carry = partial(_carry, carried, receiver)
    table = {**copyreg.dispatch_table, **_script_reducers}
    for cls in _registered:
        table.setdefault(cls, carry)
    table[torch.Tensor] = partial(reduce_plain, carry)
    table[torchrpc.rpc.PyRRef] = table[torchrpc.rpc.RRef] = carry
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = table
    before = destination.set(None if receiver is None else receiver.files)
    try:
        pickler.dump(obj)
    except BaseException:
        spool.withdraw(carried)
        raise
    finally:
        destination.reset(before)
    return out.getvalue(), carried


def decode(data: bytes, carried: list[Any]) -> Any:
    """Gives the object back; opens the references in it.

    Args:
        data: Bytes from `encode`.
        carried: The objects that travelled beside them.

    Raises:
        PathError: If a reference cannot be opened here; and what else unpickling may raise.
    """
    outer = getattr(_decoding, "carried", None)
    _decoding.carried = spool.take_all(carried)
    try:
        return pickle.loads(data)
    finally:
        _decoding.carried = outer


def _carry(carried: list[Any], receiver: Address | None, obj: Any) -> tuple[Any, ...]:
    if receiver is not None and type(obj) is torch.Tensor:
        obj = spool.offer(obj, receiver) or obj
    carried.append(obj)
    return _carried, (len(carried) - 1,)


def _carried(index: int) -> Any:
    return _decoding.carried[index]


def reduce_plain(carry: Callable[[Any], Any], tensor: Any) -> Any:
    """Gives the pickled form of a plain tensor.

    Args:
        carry: Gives the form of one that has to be copied.
        tensor: A tensor of exactly the class `torch.Tensor`.
    """
    if not reference.is_mapped(tensor):
        if tensor.is_nested or tensor.layout not in _LAYOUTS_OF_TORCHS:
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # its parts travel
        return carry(tensor)
    if not tensor.requires_grad:
        return reference.reduce_tensor(tensor, as_plain=True)
    if torchrpc.in_autograd_context():
        return carry(tensor)  # the remote graph hangs on torch's own way of sending it
    return _requiring_grad, (tensor.detach(),)


def _requiring_grad(tensor: Any) -> Any:
    return tensor if type(tensor) is Unopened else tensor.requires_grad_()


def _reduce_script_function(function: Any) -> tuple[Any, ...]:
    # By name, as torch's own RPC finds it in what the worker has imported.
    return _find_script_function, (function.qualified_name,)


def _find_script_function(name: str) -> Any:
    function = _jit._state._python_cu.find_function(name)
    if function is None:
        raise AttributeError(f"no TorchScript function {name!r} is defined on this worker")
    return function


def _reduce_script_module(module: torch.jit.ScriptModule) -> tuple[Any, ...]:
    out = io.BytesIO()
    torch.jit.save(module, out)
    return _load_script_module, (out.getvalue(),)


def _load_script_module(data: bytes) -> Any:
    return _jit.load(io.BytesIO(data))


_script_reducers: dict[type, Callable[[Any], Any]] = {
    _jit.RecursiveScriptModule: _reduce_script_module,
    _jit.TopLevelTracedModule: _reduce_script_module,
    torch.jit.ScriptFunction: _reduce_script_function,
}

_registered: Mapping[type, Any] = getattr(torchrpc.pickler(), "_class_reducer_dict", {})
"""Classes with a reducer of their own in torch's RPC, such as RemoteModule."""

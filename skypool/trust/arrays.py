"""Arrays and tensors of strangers: memory that is theirs, in a shape and of a type that are checked here.

numpy's own functions for unpickling believe what they are told: a type with pointers in it over bytes of the sender's
choice, a state that does not fit. So none of them is called: a type is made anew from its name, an array from its
memory by `frombuffer`, which checks the size.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from typing import Any

from skypool.trust.machine import Machine, Maker, Name, Refused, check_chain

_TYPE = re.compile(r"[biufcSUVMmO?]\d{0,9}")
_UNIT = re.compile(r"generic|Y|M|W|D|h|m|s|ms|us|\u03bcs|ns|ps|fs|as")
_NESTED = 8
_LAST_LETTER = 0x10FFFF
_ALIGNED = 0x80
_TENSORS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise Refused(f"it holds something of {name}, which is not installed here", name) from e


# --- types ---------------------------------------------------------------------------------------------------


def _dtype(m: Machine, args: tuple[Any, ...]) -> Any:
    if not args or type(args[0]) is not str or not _TYPE.fullmatch(args[0]):
        raise Refused("a type of numpy has a name that is none", "numpy.dtype")
    code = args[0]
    return m.pending("numpy.dtype", lambda state: _typed(m, code, state))


def _typed(m: Machine, code: str, state: Any) -> Any:
    """The type of that code in the byte order, with the fields or the shape of its state."""
    np = _library("numpy")
    if type(state) is not tuple or not 8 <= len(state) <= 9 or state[1] not in ("<", ">", "|", "="):
        raise Refused("a type of numpy has a state that is none", "numpy.dtype")
    _, order, sub, names, fields, size, _, flags = state[:8]
    if code[0] in "Mm":
        made = np.dtype(f"{code}[{_unit(state[8])}]" if len(state) == 9 else code)
    elif sub is not None:
        made = _sub_array(np, sub)
    elif names is not None:
        made = _record(np, names, fields, size, flags)
    else:
        made = np.dtype(code)
    made = made.newbyteorder(order) if order in "<>" and names is None and sub is None else made
    _nesting(made)
    return made


def _nesting(made: Any, depth: int = 0) -> None:
    if depth > _NESTED:
        raise Refused("a type of numpy is nested too deeply", "numpy.dtype")
    for part in [made.subdtype[0]] if made.subdtype else [field[0] for field in (made.fields or {}).values()]:
        if part.hasobject:
            raise Refused("a type of numpy has objects among its fields", "numpy.dtype")
        _nesting(part, depth + 1)


def _unit(said: Any) -> str:
    match said:
        case (None | {}, (bytes(unit), int(number), 1, 1)) if _UNIT.fullmatch(unit.decode()) and 0 < number < 2**31:
            return unit.decode() if unit == b"generic" else f"{number}{unit.decode()}"
    raise Refused("a time of numpy has a unit that is none", "numpy.dtype")


def _sub_array(np: Any, sub: Any) -> Any:
    match sub:
        case (inner, tuple(shape)) if isinstance(inner, np.dtype):
            return np.dtype((inner, _shape(shape)))
    raise Refused("a type of numpy has a shape that is none", "numpy.dtype")


def _record(np: Any, names: Any, fields: Any, size: Any, flags: Any) -> Any:
    if type(names) is not tuple or type(fields) is not dict or type(size) is not int or type(flags) is not int:
        raise Refused("a type of numpy has fields that are none", "numpy.dtype")
    parts = [fields[name] for name in names]
    for name, part in zip(names, parts, strict=True):
        if type(name) is not str or type(part) is not tuple or len(part) != 2 or type(part[1]) is not int:
            raise Refused("a type of numpy has a field that is none", "numpy.dtype")
        if not isinstance(part[0], np.dtype) or part[0].hasobject:
            raise Refused("a type of numpy has objects among its fields", "numpy.dtype")
    of = {"names": list(names), "formats": [p[0] for p in parts], "offsets": [p[1] for p in parts], "itemsize": size}
    return np.dtype(of, align=bool(flags & _ALIGNED))


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is int:
        shape = (shape,)
    if type(shape) is not tuple or len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise Refused("an array has a shape that is none", "numpy.ndarray")
    return shape


# --- arrays --------------------------------------------------------------------------------------------------


def _view(m: Machine, buffer: Any, dtype: Any, shape: Any) -> Any:
    """A flat array of exactly this memory, and nothing in it that numpy takes for something else."""
    np = _library("numpy")
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(buffer) not in (bytes, bytearray, memoryview):
        raise Refused("an array is not of plain memory", "numpy.ndarray")
    size = memoryview(buffer).nbytes
    if size != math.prod(_shape(shape)) * dtype.itemsize:
        raise Refused(f"an array of shape {shape} and type {dtype} has {size} bytes", "numpy.ndarray")
    m.charge(size)
    if size == 0:
        return np.empty(_shape(shape), dtype).reshape(-1)
    made = np.frombuffer(buffer, dtype)
    _check_items(np, made)
    return made


def _check_items(np: Any, made: Any) -> None:
    """A byte that is neither 0 nor 1 as a boolean would have numpy write where nothing is: it counts them by adding."""
    if made.dtype.names:
        for name in made.dtype.names:
            _check_items(np, made[name])
    elif made.dtype.kind == "b" and bool((made.view(np.uint8) > 1).any()):
        raise Refused("an array of booleans has other values", "numpy.ndarray")
    elif made.dtype.kind == "U" and made.dtype.itemsize and made.size:
        letters = np.ascontiguousarray(made).view(made.dtype.byteorder.replace("|", "=") + "u4")
        if bool((letters > _LAST_LETTER).any()):
            raise Refused("an array of texts has characters that are none", "numpy.ndarray")


def _from_buffer(m: Machine, args: tuple[Any, ...]) -> Any:
    buffer, dtype, shape, order, *axes = args
    if order not in ("C", "F", "K") or len(axes) > 1:
        raise Refused("an array is in an order that is none", "numpy.ndarray")
    flat = _view(m, buffer, dtype, shape)
    if order == "K":
        axes = list(axes[0] or ()) if axes else []
        if not axes or not all(type(n) is int for n in axes):
            raise Refused("an array is in an order that is none", "numpy.ndarray")
        return flat.reshape(_shape(shape), order="C").transpose(axes)
    return flat.reshape(_shape(shape), order=order)


def _reconstruct(m: Machine, args: tuple[Any, ...]) -> Any:
    if not args or type(args[0]) is not Name or str(args[0]) != "numpy.ndarray":
        raise Refused(f"an array is of the class {args[0] if args else None}", str(args[0]) if args else "")
    return m.pending("numpy.ndarray", lambda state: _array(m, state))


def _array(m: Machine, state: Any) -> Any:
    """The array of what numpy writes where it does not lend its memory."""
    np = _library("numpy")
    if type(state) is not tuple or len(state) != 5 or type(state[3]) not in (bool, int):
        raise Refused("an array has a state that is none", "numpy.ndarray")
    _, shape, dtype, fortran, data = state
    order = "F" if fortran else "C"
    if isinstance(dtype, np.dtype) and dtype == np.dtype(object):
        if type(data) is not list or len(data) != math.prod(_shape(shape)):
            raise Refused("an array of objects is of something else", "numpy.ndarray")
        m.charge(len(data))
        check_chain(data)
        made = np.empty(len(data), object)
        for at, each in enumerate(data):
            made[at] = each
        return made.reshape(shape, order=order)
    return _view(m, data, dtype, shape).copy().reshape(shape, order=order)


def _scalar(m: Machine, args: tuple[Any, ...]) -> Any:
    dtype, data = args
    if type(data) is str:  # what pickle's first protocols write
        raise Refused("a number of numpy is a text", "numpy.dtype")
    made = _view(m, data, dtype, 1)
    return made.copy()[0] if made.size else dtype.type()


def _numpy() -> dict[tuple[str, str], Maker]:
    found: dict[tuple[str, str], Maker] = {("numpy", "dtype"): _dtype}
    for core in ("numpy._core", "numpy.core"):
        found[f"{core}.numeric", "_frombuffer"] = _from_buffer
        found[f"{core}.multiarray", "_reconstruct"] = _reconstruct
        found[f"{core}.multiarray", "scalar"] = _scalar
    return found


@functools.cache
def scalars() -> frozenset[type]:
    """The types of numpy's numbers, texts and times, which may be keys."""
    np = _library("numpy")
    return frozenset(kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void))


# --- tensors -------------------------------------------------------------------------------------------------


def tensor(buffer: Any, dtype: str, shape: tuple[int, ...], kind: str, wants_grad: bool) -> Any:
    """A tensor of torch in this memory; one in the CPU's, wherever it was.

    Args:
        kind: "tensor" or "parameter".

    Raises:
        Refused: the memory does not fit.
    """
    torch = _library("torch")
    if type(dtype) is not str or dtype not in _TENSORS or kind not in ("tensor", "parameter"):
        raise Refused("a tensor is of a type that is none", "torch.Tensor")
    if type(buffer) not in (bytes, bytearray, memoryview) or type(wants_grad) is not bool:
        raise Refused("a tensor is not of plain memory", "torch.Tensor")
    of, memory = getattr(torch, dtype), memoryview(buffer)
    if memory.nbytes != math.prod(_shape(shape)) * torch.empty(0, dtype=of).element_size():
        raise Refused(f"a tensor of shape {shape} and type {dtype} has {memory.nbytes} bytes", "torch.Tensor")
    own = bytearray(memory) if memory.readonly else buffer
    flat = torch.frombuffer(own, dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)
    if dtype == "bool" and bool((flat > 1).any()):
        raise Refused("a tensor of booleans has other values", "torch.Tensor")
    made = (flat.view(of) if memory.nbytes else torch.empty(0, dtype=of)).reshape(shape)
    if kind == "parameter":
        return torch.nn.Parameter(made, requires_grad=wants_grad)
    return made.requires_grad_(wants_grad) if wants_grad else made


def _tensor(m: Machine, args: tuple[Any, ...]) -> Any:
    buffer, dtype, shape, kind, wants_grad = args
    m.charge(len(buffer))
    return tensor(buffer, dtype, shape, kind, wants_grad)


def _size(_: Machine, args: tuple[Any, ...]) -> Any:
    return _library("torch").Size(_shape(*args))


MAKERS: dict[tuple[str, str], Maker] = {
    **_numpy(),
    ("skypool.trust.arrays", "tensor"): _tensor,
    ("torch", "Size"): _size,
}

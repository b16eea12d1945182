"""Writes and reads numpy arrays and torch tensors in skypool's data format, and checks their sizes and types.

numpy's own functions for unpickling do not check their arguments: they accept bytes of the sender as pointers to
objects, or an array whose size and memory do not match. This module does not call these functions. It builds a type
from its name, and an array by `frombuffer`, which checks the size of the memory.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from skypool.trust.bounded_reader import FAULTY, NotData
from skypool.trust.decoding import Maker, Reading
from skypool.trust.values import KEYS, check_chain

_TYPE = re.compile(r"[<>|=]?(?:[biufc]\d{1,2}|\?|b1|O|[SUV][1-9]\d{0,8}|[Mm]8(?:\[(\d{0,10})([A-Za-z\u03bc]{1,7})\])?)")
_UNIT = re.compile(r"generic|Y|M|W|D|h|m|s|ms|us|\u03bcs|ns|ps|fs|as")
_DEEPEST = 8
"""The greatest depth of nested numpy types."""
_MOST_FIELDS = 1000
"""The greatest number of fields of one numpy type."""
_FIELD_PRICE = 1000
"""The price in bytes of one field of a numpy type. numpy makes a dictionary entry and a text for each field."""
_LAST_LETTER = 0x10FFFF
"""The last code point of Unicode."""
_ALIGNED = 0x80
"""numpy's flag for a type with aligned fields."""
_AT_ONCE = 1 << 20
"""The number of bytes of an array that are checked in one step."""
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
    if (found := sys.modules.get(name)) is not None:
        return found
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise NotData(
            f"it contains a value of {name}, which is not installed on your machine",
            name,
            advice=f"Run on your machine: pip install {name}",
        ) from e


class NoData(Exception):
    """An error for a numpy value with a type that cannot be sent as data. The message is the reason."""


# --- types ---------------------------------------------------------------------------------------------------
#
# A numpy type without fields and shape is sent as a text such as "<f8". A type with a shape is sent as ("sub", type of
# an item, shape), and a type with fields as ("record", bytes of an item, aligned, names, types, offsets).


@functools.lru_cache(256)
def _simple(np: Any, said: str) -> Any:
    """Return the numpy type with a name such as "<f8". Raises NotData if no allowed type has this name."""
    found = _TYPE.fullmatch(said) if len(said) < 40 else None
    if found is None or (found[2] is not None and not _UNIT.fullmatch(found[2])):
        raise NotData(
            f"it contains the unknown numpy dtype {said[:40]!r}",
            "numpy.dtype",
            advice=FAULTY,
        )
    return np.dtype(said)


def _type_of(r: Reading, said: Any, depth: int = 0) -> Any:
    np = _library("numpy")
    r.charge(_FIELD_PRICE if depth else 0)
    if depth > _DEEPEST:
        raise NotData(
            f"it contains a numpy dtype whose nesting is more than {_DEEPEST} levels deep",
            "numpy.dtype",
            advice="Return an array whose dtype has less nesting",
        )
    match said:
        case str():
            made = _simple(np, said)
        case ("sub", inner, tuple(shape)):
            made = np.dtype((_type_of(r, inner, depth + 1), _shape(shape)))
        case ("record", int(size), bool(aligned), list(names), list(types), list(offsets)):
            if not len(names) == len(types) == len(offsets) <= _MOST_FIELDS or not 0 < size < 1 << 31:
                raise NotData(
                    f"it contains a structured numpy dtype with items of {size} bytes (must be 1 byte to 2 GiB)"
                    if len(names) == len(types) == len(offsets) <= _MOST_FIELDS
                    else f"it contains a structured numpy dtype with {len(names)} names, {len(types)} types and "
                    f"{len(offsets)} offsets of fields (there must be equally many, and at most {_MOST_FIELDS})",
                    "numpy.dtype",
                    advice="Return arrays with fewer or smaller fields",
                )
            if not all(type(n) is str for n in names) or not all(type(n) is int and n >= 0 for n in offsets):
                raise NotData(
                    "it contains a structured numpy dtype with an invalid name or offset of a field",
                    "numpy.dtype",
                    advice=FAULTY,
                )
            formats = [_type_of(r, each, depth + 1) for each in types]
            of = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
            made = np.dtype(of, align=aligned)
        case _:
            raise NotData(
                f"it contains a {type(said).__name__} in place of the name or parts of a numpy dtype",
                "numpy.dtype",
                advice=FAULTY,
            )
    if made.hasobject and (depth or type(said) is not str):
        raise NotData(
            "it contains a structured numpy dtype with Python objects in it",
            "numpy.dtype",
            advice=FAULTY,
        )
    if made.itemsize <= 0:
        raise NotData(
            f"it contains a numpy dtype with items of {made.itemsize} bytes",
            "numpy.dtype",
            advice=FAULTY,
        )
    return made


def price_of(name: str, args: tuple[Any, ...]) -> int:
    """Return the price in bytes of making an array's type and checking the array's contents.

    It is 0 for values other than numpy arrays, scalars or types. Memory that is sent beside the encoded value does not
    count.

    Args:
        name: the name of the value's type in skypool's data format, such as "ndarray".
        args: the arguments that the value is built from. The first stands for the numpy type, such as "<f8". For an
            array or scalar, the last is the memory, or None if it is sent beside the encoded value.
    """
    if name not in ("ndarray", "scalar", "dtype"):
        return 0
    data = args[-1]
    return _FIELD_PRICE * _types_in(args[0]) + (len(data) // 2 if type(data) is bytes else 0)


def _types_in(said: Any) -> int:
    match said:
        case ("sub", inner, _):
            return 1 + _types_in(inner)
        case ("record", _, _, _, types, _):
            return sum(1 + _types_in(each) for each in types)
    return 0


def _said_of(made: Any) -> Any:
    """Return a numpy type as data: a text such as "<f8", or a tuple for a structured type. May raise NoData."""
    # only for items that are numbers, booleans, texts, bytes, times or objects, and of more than 0 bytes
    said: Any
    if made.subdtype is not None:
        return ("sub", _said_of(made.subdtype[0]), tuple(made.subdtype[1]))
    if made.names is not None:
        parts = [made.fields[name][:2] for name in made.names]
        types = [_said_of(part[0]) for part in parts]
        offsets = [part[1] for part in parts]
        said = ("record", made.itemsize, bool(made.flags & _ALIGNED), list(made.names), types, offsets)
    else:
        said = made.str
    if (
        made.itemsize == 0
        or (made.hasobject and made.names is not None)
        or (made.names is None and not _TYPE.fullmatch(said))
    ):
        raise NoData(f"it contains a numpy value of the dtype {made!s:.100}, which cannot be sent as data")
    return said


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise NotData(
            "it contains an array whose shape is not a tuple of at most 64 sizes",
            "numpy.ndarray",
            advice=FAULTY,
        )
    return shape


# --- arrays --------------------------------------------------------------------------------------------------


def _view(r: Reading, data: Any, dtype: Any, shape: Any) -> Any:
    """Return a one-dimensional array of the type `dtype` that has exactly this memory, after checking the memory.

    An eighth of the memory's size is subtracted from the budget, and more for booleans and texts.

    Args:
        data: the memory as bytes, which are copied. None takes the next buffer that was sent beside the encoded value,
            and the array uses this buffer without a copy.
        shape: the shape that the caller gives the array later. The size of the memory must match this shape.
    """
    np = _library("numpy")
    if dtype.hasobject or type(data) not in (bytes, type(None)):
        raise NotData(
            "it contains a numpy array of Python objects that was sent as memory"
            if dtype.hasobject
            else f"it contains a numpy array whose memory is a {type(data).__name__} instead of bytes",
            "numpy.ndarray",
            advice=FAULTY,
        )
    buffer: Any = r.next_buffer() if data is None else bytearray(data)
    size = buffer.nbytes if data is None else len(buffer)
    if size != math.prod(_shape(shape)) * dtype.itemsize:
        raise NotData(
            f"it contains a numpy array of {size} bytes, which do not match the shape {shape} and items of "
            f"{dtype.itemsize} bytes",
            "numpy.ndarray",
            advice=FAULTY,
        )
    r.charge(size // 8)
    if size == 0:
        return np.empty(shape, dtype).reshape(-1)
    made = np.frombuffer(buffer, dtype)
    if dtype.kind in "bUV":
        _check_items(r, np, made)
    return made


def _check_items(r: Reading, np: Any, made: Any) -> None:
    """Raise NotData for booleans that are not 0 or 1, and for texts with characters that are not valid."""
    # also in fields of structured types; other arrays are not checked
    if made.dtype.names:
        for name in made.dtype.names:
            _check_items(r, np, made[name])
        return
    if made.dtype.kind not in "bU":
        return
    # numpy counts booleans by adding their bytes: a larger byte would make numpy write outside of an array's memory
    flat = made.reshape(-1)
    r.charge(flat.size * made.dtype.itemsize // 4)  # subtracted for each field, because fields may overlap
    for at in range(0, flat.size, step := max(1, _AT_ONCE // made.dtype.itemsize)):
        part = np.ascontiguousarray(flat[at : at + step])
        if made.dtype.kind == "b" and bool((part.view(np.uint8) > 1).any()):
            raise NotData(
                "it contains a boolean numpy array with a byte that is neither 0 nor 1",
                "numpy.ndarray",
                advice="Make this array on the node with `array.view('uint8') != 0`",
            )
        if made.dtype.kind == "U":
            letters = part.view(made.dtype.byteorder.replace("|", "=") + "u4")
            if bool((letters > _LAST_LETTER).any()):
                raise NotData(
                    "it contains a numpy array of text with a character above U+10FFFF, the last of Unicode",
                    "numpy.ndarray",
                    advice=FAULTY,
                )


def _ndarray(r: Reading, args: tuple[Any, ...]) -> Any:
    said, shape, order, data = args
    if order not in ("C", "F"):
        raise NotData(
            "it contains a numpy array whose memory order is neither 'C' nor 'F'",
            "numpy.ndarray",
            advice=FAULTY,
        )
    return _view(r, data, _type_of(r, said), shape).reshape(shape, order=order)


def _objects(r: Reading, args: tuple[Any, ...]) -> Any:
    """Return an array of Python objects, built from a shape, a memory order ("C" or "F") and a list of items."""
    # an item must not be a container that CPython frees recursively, such as a deque
    shape, order, items = args
    if type(items) is not list or len(items) != math.prod(_shape(shape)) or order not in ("C", "F"):
        raise NotData(
            "it contains a numpy array of objects with a wrong number of items or a memory order that is neither 'C' "
            "nor 'F'",
            "numpy.ndarray",
            advice=FAULTY,
        )
    check_chain(items)
    made = _library("numpy").empty(len(items), object)
    for at, each in enumerate(items):
        made[at] = each
    return made.reshape(shape, order=order)


def _scalar(r: Reading, args: tuple[Any, ...]) -> Any:
    said, data = args
    dtype = _type_of(r, said)
    if type(data) is not bytes:
        raise NotData(
            f"it contains a numpy scalar made of a {type(data).__name__} instead of bytes",
            "numpy.dtype",
            advice=FAULTY,
        )
    return _view(r, data, dtype, (1,)).copy()[0]


def _dtype(r: Reading, args: tuple[Any, ...]) -> Any:
    (said,) = args
    return _type_of(r, said)


@functools.cache
def keys() -> frozenset[type]:
    """Return the types whose instances may be dictionary keys: numpy's scalar types, and those in `values.KEYS`.

    `values.KEYS` has types such as dates and paths. numpy's types for objects and raw bytes (`object_`, `void`) are
    left out. Raises NotData if numpy is not installed.
    """
    np = _library("numpy")
    return KEYS | frozenset(kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void))


def parts_of(value: Any, buffer: Callable[[Any], bytes | None]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the name of a numpy or torch value's type in skypool's data format, and the arguments to build the value.

    Returns None if a value of this class cannot be sent as data. Raises NoData if its numpy type cannot be sent. The
    value's library, numpy or torch, must be imported already.

    Args:
        buffer: takes a piece of memory. Returns the memory as bytes, or None if it is sent beside the encoded value.
    """
    kind = type(value)
    if kind.__module__.partition(".")[0] == "torch":
        return _parts_of_tensor(value, buffer)
    np = sys.modules["numpy"]
    if kind is np.ndarray:
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        if value.dtype == np.dtype(object):
            return "objects", (value.shape, order, value.reshape(-1, order=order).tolist())
        said = _said_of(value.dtype)
        flat = value.reshape(-1, order=order)
        memory = flat.view(np.uint8) if flat.size else b""
        return "ndarray", (said, value.shape, order, buffer(memory))
    if isinstance(value, np.generic) and kind is not np.object_:
        said = "<U1" if kind is np.str_ and not value else "|S1" if kind is np.bytes_ and not value else None
        return "scalar", (said or _said_of(value.dtype), value.tobytes() or bytes(4 if kind is np.str_ else 1))
    if isinstance(value, np.dtype):
        return "dtype", (_said_of(value),)
    return None


# --- tensors -------------------------------------------------------------------------------------------------


def tensor(buffer: Any, dtype: str, shape: tuple[int, ...], kind: str, wants_grad: bool) -> Any:
    """Return a torch tensor on the CPU that uses this memory, or a copy of the memory if the memory is read-only.

    Args:
        buffer: the memory: bytes, a bytearray or a memoryview.
        dtype: the name of the type, such as "float32".
        shape: the shape, which must match the size of the memory.
        kind: "tensor", or "parameter" for a `torch.nn.Parameter`.
        wants_grad: the tensor's `requires_grad`.

    Raises:
        NotData: an argument is not valid, or the size of the memory does not match the shape and type. Also if a
            boolean is neither 0 nor 1, or torch is not installed.
    """
    torch = _library("torch")
    if type(dtype) is not str or dtype not in _TENSORS or kind not in ("tensor", "parameter"):
        raise NotData(
            "it contains a torch tensor of an unknown dtype, or one that is neither a tensor nor a parameter",
            "torch.Tensor",
            advice=FAULTY,
        )
    if type(buffer) not in (bytes, bytearray, memoryview) or type(wants_grad) is not bool:
        raise NotData(
            f"it contains a torch tensor with a {type(buffer).__name__} as memory (must be bytes) and a "
            f"{type(wants_grad).__name__} as requires_grad (must be a bool)",
            "torch.Tensor",
            advice=FAULTY,
        )
    of = getattr(torch, dtype)
    memory = memoryview(buffer)
    if memory.nbytes != math.prod(_shape(shape)) * torch.empty(0, dtype=of).element_size():
        raise NotData(
            f"it contains a torch tensor of {memory.nbytes} bytes, which do not match the shape {shape} and the dtype "
            f"{dtype}",
            "torch.Tensor",
            advice=FAULTY,
        )
    own = bytearray(memory) if memory.readonly else buffer
    flat = torch.frombuffer(own, dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)
    if dtype == "bool" and bool((flat > 1).any()):
        raise NotData(
            "it contains a boolean torch tensor with a byte that is neither 0 nor 1",
            "torch.Tensor",
            advice="Make this tensor on the node with `tensor.view(torch.uint8) != 0`",
        )
    made = (flat.view(of) if memory.nbytes else torch.empty(0, dtype=of)).reshape(shape)
    if kind == "parameter":
        return torch.nn.Parameter(made, requires_grad=wants_grad)
    return made.requires_grad_(wants_grad) if wants_grad else made


def _tensor(r: Reading, args: tuple[Any, ...]) -> Any:
    data, dtype, shape, kind, wants_grad = args
    buffer: Any = r.next_buffer() if data is None else data
    r.charge(len(buffer) if type(buffer) is bytes else 0)
    return tensor(buffer, dtype, shape, kind, wants_grad)


def _size(_: Reading, args: tuple[Any, ...]) -> Any:
    return _library("torch").Size(_shape(args))


def _parts_of_tensor(value: Any, buffer: Callable[[Any], bytes | None]) -> tuple[str, tuple[Any, ...]] | None:
    torch = sys.modules["torch"]
    if type(value) is torch.Size:
        return "size", tuple(value)
    kind = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter"}.get(type(value))
    if kind is None or value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        return None
    own = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    name = str(own.dtype).removeprefix("torch.")
    memory = own.reshape(-1).view(torch.uint8).numpy() if own.numel() else b""
    return "tensor", (buffer(memory), name, tuple(own.shape), kind, value.requires_grad)


MAKERS: dict[str, Maker] = {
    "dtype": _dtype,
    "ndarray": _ndarray,
    "objects": _objects,
    "scalar": _scalar,
    "tensor": _tensor,
    "size": _size,
}
"""The functions that build values, by the name of the value's type in the data format.

Each takes the decoder and a tuple of arguments, and raises NotData if an argument is not allowed.
"""

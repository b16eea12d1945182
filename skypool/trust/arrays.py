"""Writes and reads numpy arrays and torch tensors in skypool's data format, and checks their sizes and types.

The format carries results of machines that may not run code on the client. numpy's own functions for unpickling do not
check what they get: a type may contain pointers over bytes that the sender chose, or a state may not fit. So none of
them is called here. A type is built from its name, and an array from its memory by `frombuffer`, which checks the size.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from skypool.trust.cursor import NotData
from skypool.trust.reading import Maker, Reading
from skypool.trust.values import KEYS, check_chain

_TYPE = re.compile(r"[<>|=]?(?:[biufc]\d{1,2}|\?|b1|O|[SUV][1-9]\d{0,8}|[Mm]8(?:\[(\d{0,10})([A-Za-z\u03bc]{1,7})\])?)")
_UNIT = re.compile(r"generic|Y|M|W|D|h|m|s|ms|us|\u03bcs|ns|ps|fs|as")
_DEEPEST = 8
"""The greatest depth of nested numpy types."""
_MOST_FIELDS = 1000
"""The greatest number of fields of one numpy type."""
_FIELD_PRICE = 1000
"""The price in bytes of one field of a record. numpy makes a dictionary entry and a text of it."""
_LAST_LETTER = 0x10FFFF
"""The last code point of Unicode."""
_ALIGNED = 0x80
"""numpy's flag for a type with aligned fields."""
_AT_ONCE = 1 << 20
"""The number of bytes of an array that are checked together."""
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
            f"the node sent a value that needs {name}, which is not installed here; run: pip install {name}", name
        ) from e


class NoData(Exception):
    """An error for a numpy or torch value with a part that cannot be sent as data. Its message is the reason."""


# --- types ---------------------------------------------------------------------------------------------------
#
# A numpy type is sent as a text such as "<f8", as ("sub", type, shape), or as ("record", size, aligned, names, types,
# offsets). It is a tree without references to parts of itself.


@functools.lru_cache(256)
def _simple(np: Any, said: str) -> Any:
    """Return the numpy type without fields that has this name, such as "<f8".

    Args:
        np: the numpy module.
        said: the name, of at most 39 characters.

    Raises:
        NotData: it is not the name of a type that is allowed.
    """
    found = _TYPE.fullmatch(said) if len(said) < 40 else None
    if found is None or (found[2] is not None and not _UNIT.fullmatch(found[2])):
        raise NotData(
            f"the node sent a numpy dtype of the unknown type {said[:40]!r}; a correct node never sends this, "
            "so stop using that machine",
            "numpy.dtype",
        )
    return np.dtype(said)


def _type_of(r: Reading, said: Any, depth: int = 0) -> Any:
    np = _library("numpy")
    r.charge(_FIELD_PRICE if depth else 0)
    if depth > _DEEPEST:
        raise NotData(
            f"the node sent a numpy dtype that is nested more than {_DEEPEST} levels deep; return a flatter one",
            "numpy.dtype",
        )
    match said:
        case str():
            made = _simple(np, said)
        case ("sub", inner, tuple(shape)):
            made = np.dtype((_type_of(r, inner, depth + 1), _shape(shape)))
        case ("record", int(size), bool(aligned), list(names), list(types), list(offsets)):
            if not len(names) == len(types) == len(offsets) <= _MOST_FIELDS or not 0 < size < 1 << 31:
                raise NotData(
                    f"the node sent a structured numpy dtype with {len(names)} names, {len(types)} types and "
                    f"{len(offsets)} offsets (limit {_MOST_FIELDS} each, and all equal), or an invalid item "
                    "size; return fewer fields",
                    "numpy.dtype",
                )
            if not all(type(n) is str for n in names) or not all(type(n) is int and n >= 0 for n in offsets):
                raise NotData(
                    "the node sent a structured numpy dtype with an invalid field name or offset; a correct "
                    "node never sends this, so stop using that machine",
                    "numpy.dtype",
                )
            formats = [_type_of(r, each, depth + 1) for each in types]
            of = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
            made = np.dtype(of, align=aligned)
        case _:
            raise NotData(
                f"the node described a numpy dtype with a {type(said).__name__}, which has no such meaning; a "
                "correct node never sends this, so stop using that machine",
                "numpy.dtype",
            )
    if made.hasobject and (depth or type(said) is not str):
        raise NotData(
            "the node sent a structured numpy dtype that contains Python objects; a correct node never sends "
            "this, so stop using that machine",
            "numpy.dtype",
        )
    if made.itemsize <= 0:
        raise NotData(
            f"the node sent a numpy dtype with items of {made.itemsize} bytes; a correct node never sends "
            "this, so stop using that machine",
            "numpy.dtype",
        )
    return made


def price_of(name: str, args: tuple[Any, ...]) -> int:
    """Return the price in bytes of making an array's type and checking its contents.

    A reader subtracts prices from a memory budget. The price is 0 for values other than numpy arrays, scalars or types.
    Array memory that is sent beside the value is not included.

    Args:
        name: the value's name in skypool's data format, such as "ndarray".
        args: the arguments that the value is built from: first its type, last its memory.
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
    """Return the text or tuple that stands for a numpy type in skypool's data format, such as "<f8".

    A type with a shape becomes ("sub", ...), and one with fields becomes ("record", ...).

    Raises:
        NoData: the type cannot be sent as data: it has no bytes, contains objects in fields, or is of an unknown kind.
    """
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
        raise NoData(
            f"numpy arrays of dtype {made} cannot be sent as data; convert them to plain numbers or text "
            "before you return them"
        )
    return said


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise NotData(
            "the node sent an array whose shape is not a tuple of at most 64 sizes; a correct node never sends "
            "this, so stop using that machine",
            "numpy.ndarray",
        )
    return shape


# --- arrays --------------------------------------------------------------------------------------------------


def _view(r: Reading, data: Any, dtype: Any, shape: Any) -> Any:
    """Return a flat array of exactly this memory, after checking it. The array is empty if the memory is.

    Args:
        r: the decoder. Its memory budget is reduced by an eighth of the size, and for booleans and texts by more.
        data: the memory as bytes, which is copied. None takes the next buffer beside the value, which the array uses
            without a copy.
        dtype: the type of its items.
        shape: the shape that the array shall get later. The memory must fit it; the result has one dimension all the
            same.

    Raises:
        NotData: the memory does not fit the shape and type, contains values that are not valid, or exceeds the budget;
            or the type contains objects.
    """
    np = _library("numpy")
    if dtype.hasobject or type(data) not in (bytes, type(None)):
        raise NotData(
            "the node sent a numpy array whose memory is not bytes, or whose dtype contains objects; a correct "
            "node never sends this, so stop using that machine",
            "numpy.ndarray",
        )
    buffer: Any = r.next_buffer() if data is None else bytearray(data)
    size = buffer.nbytes if data is None else len(buffer)
    if size != math.prod(_shape(shape)) * dtype.itemsize:
        raise NotData(
            f"the node sent a numpy array of {size} bytes that do not match its shape {shape} with items of "
            f"{dtype.itemsize} bytes; a correct node never sends this, so stop using that machine",
            "numpy.ndarray",
        )
    r.charge(size // 8)
    if size == 0:
        return np.empty(shape, dtype).reshape(-1)
    made = np.frombuffer(buffer, dtype)
    if dtype.kind in "bUV":
        _check_items(r, np, made)
    return made


def _check_items(r: Reading, np: Any, made: Any) -> None:
    """Check that booleans are 0 or 1, and that texts have valid characters only. Arrays of other types pass unchecked.

    Fields of structured types are checked one by one. numpy counts booleans by adding them up. Another value would make
    it write outside of its memory.

    Raises:
        NotData: a value is not valid, or the checks exceed the memory budget of `r`, the decoder.
    """
    if made.dtype.names:
        for name in made.dtype.names:
            _check_items(r, np, made[name])
        return
    if made.dtype.kind not in "bU":
        return
    flat = made.reshape(-1)
    r.charge(flat.size * made.dtype.itemsize // 4)  # paid for each field, because fields may overlap
    for at in range(0, flat.size, step := max(1, _AT_ONCE // made.dtype.itemsize)):
        part = np.ascontiguousarray(flat[at : at + step])
        if made.dtype.kind == "b" and bool((part.view(np.uint8) > 1).any()):
            raise NotData(
                "the node sent a boolean numpy array with a byte that is neither 0 nor 1; make it with "
                "`array.view('uint8') != 0`",
                "numpy.ndarray",
            )
        if made.dtype.kind == "U":
            letters = part.view(made.dtype.byteorder.replace("|", "=") + "u4")
            if bool((letters > _LAST_LETTER).any()):
                raise NotData(
                    "the node sent a numpy array of text with a character above U+10FFFF, the last of Unicode; "
                    "a correct node never sends this, so stop using that machine",
                    "numpy.ndarray",
                )


def _ndarray(r: Reading, args: tuple[Any, ...]) -> Any:
    said, shape, order, data = args
    if order not in ("C", "F"):
        raise NotData(
            "the node sent a numpy array whose memory order is neither 'C' nor 'F'; a correct node never sends "
            "this, so stop using that machine",
            "numpy.ndarray",
        )
    return _view(r, data, _type_of(r, said), shape).reshape(shape, order=order)


def _objects(r: Reading, args: tuple[Any, ...]) -> Any:
    """Return an array of Python objects, built from a shape, a memory order ("C" or "F") and a list of items.

    Raises:
        NotData: shape and items do not fit, the order is another one, or an item is a container whose deallocation is
            recursive (see `check_chain`).
    """
    shape, order, items = args
    if type(items) is not list or len(items) != math.prod(_shape(shape)) or order not in ("C", "F"):
        raise NotData(
            "the node sent a numpy array of objects with a wrong number of items or memory order; a correct "
            "node never sends this, so stop using that machine",
            "numpy.ndarray",
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
            f"the node sent a numpy scalar as {type(data).__name__} instead of bytes; a correct node never "
            "sends this, so stop using that machine",
            "numpy.dtype",
        )
    return _view(r, data, dtype, (1,)).copy()[0]


def _dtype(r: Reading, args: tuple[Any, ...]) -> Any:
    (said,) = args
    return _type_of(r, said)


@functools.cache
def keys() -> frozenset[type]:
    """Return the types whose instances may be dictionary keys: those of `values.KEYS`, and numpy's scalar types.

    numpy's types for objects and raw bytes (`object_`, `void`) are not among them. The result is computed once.

    Raises:
        NotData: numpy is not installed.
    """
    np = _library("numpy")
    return KEYS | frozenset(kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void))


def parts_of(value: Any, buffer: Callable[[Any], bytes | None]) -> tuple[str, tuple[Any, ...]] | None:
    """Return a numpy or torch value's name in skypool's data format, and the arguments to build it from.

    Returns None if a value of this type cannot be sent as data.

    Args:
        value: a value whose class is from numpy or torch, which must be loaded.
        buffer: takes memory, and returns its bytes, or None if it is sent beside the value.

    Raises:
        NoData: the value has a numpy type that cannot be sent as data, for the reason in its message.
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
    """Return a torch tensor on the CPU that uses this memory, or a copy of the memory if it is read-only.

    Args:
        buffer: the memory: bytes, a bytearray or a memoryview.
        dtype: the name of the type, such as "float32".
        shape: the tensor's shape.
        kind: "tensor", or "parameter" for a `torch.nn.Parameter`.
        wants_grad: the tensor's `requires_grad`.

    Raises:
        NotData: an argument is not valid, the memory does not fit the shape and type, a boolean is neither 0 nor 1, or
            torch is not installed.
    """
    torch = _library("torch")
    if type(dtype) is not str or dtype not in _TENSORS or kind not in ("tensor", "parameter"):
        raise NotData(
            "the node sent a torch tensor of an unknown dtype or kind; a correct node never sends this, so "
            "stop using that machine",
            "torch.Tensor",
        )
    if type(buffer) not in (bytes, bytearray, memoryview) or type(wants_grad) is not bool:
        raise NotData(
            "the node sent a torch tensor whose memory is not bytes, or whose requires_grad is not a boolean; "
            "a correct node never sends this, so stop using that machine",
            "torch.Tensor",
        )
    of = getattr(torch, dtype)
    memory = memoryview(buffer)
    if memory.nbytes != math.prod(_shape(shape)) * torch.empty(0, dtype=of).element_size():
        raise NotData(
            f"the node sent a torch tensor of {memory.nbytes} bytes that do not match its shape {shape} and "
            f"dtype {dtype}; a correct node never sends this, so stop using that machine",
            "torch.Tensor",
        )
    own = bytearray(memory) if memory.readonly else buffer
    flat = torch.frombuffer(own, dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)
    if dtype == "bool" and bool((flat > 1).any()):
        raise NotData(
            "the node sent a boolean torch tensor with a byte that is neither 0 nor 1; make it with "
            "`tensor.view(torch.uint8) != 0`",
            "torch.Tensor",
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
"""The function that builds a value, by the value's name in the data format. It takes the reading and the arguments."""

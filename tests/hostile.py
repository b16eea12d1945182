"""Pickles that mean harm, written opcode by opcode; see tests/test_trust.py."""

from __future__ import annotations

import functools
import itertools
import pickle
import pickletools
import struct
from collections.abc import Iterator

import numpy as np

CORE = "numpy._core" if hasattr(np, "_core") else "numpy.core"
POINTERS = b"C\x10" + b"A" * 16


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def value(plain: object) -> bytes:
    """What builds a number, a text or a container of them, and remembers nothing."""
    return pickletools.optimize(pickle.dumps(plain, 3))[2:-1]


def name(module: str, what: str) -> bytes:
    return text(module) + text(what) + b"\x93"


def call(module: str, what: str, *args: bytes) -> bytes:
    return name(module, what) + b"(" + b"".join(args) + b"tR"


def state(*parts: bytes) -> bytes:
    """BUILD of a tuple of these."""
    return b"(" + b"".join(parts) + b"tb"


def p(*parts: bytes) -> bytes:
    return b"\x80\x05" + b"".join(parts) + b"."


def dtype(code: str, *own: bytes) -> bytes:
    """numpy's type of that code, with its usual state unless there is another."""
    usual = value(3), text("|" if code[0] in "SVOb?" else "<"), b"NNN", value(-1), value(-1), value(0)
    return call("numpy", "dtype", text(code), b"\x89\x88") + state(*(own or usual))


def record(inner: bytes, at: int = 0, size: int = 8) -> bytes:
    """A type with one field."""
    fields = b"}" + text("a") + inner + value(at) + b"\x86s"
    return dtype(f"V{size}", value(3), text("|"), b"N", text("a") + b"\x85", fields, value(size), value(1), value(0))


def frombuffer(buffer: bytes, kind: bytes, *shape: int) -> bytes:
    return call(f"{CORE}.numeric", "_frombuffer", buffer, kind, value(shape), text("C"))


def blank(kind: str = "ndarray") -> bytes:
    """An array before it has its state."""
    return call(f"{CORE}.multiarray", "_reconstruct", name("numpy", kind), value((0,)), b"C\x01b")


def array_of(kind: bytes, data: bytes, *shape: int) -> bytes:
    return blank() + state(value(1), value(shape), kind, b"\x89", data)


def runs_code(here: str) -> dict[str, bytes]:
    """Each runs code where pickle reads it: the sender's, or the client's own at the sender's word."""
    fire, no_data, by_hand = name(here, "fire"), name(here, "NoData"), f"__import__('sys').modules[{here!r}].fire()"
    module = call("importlib", "import_module", text(here))
    return {
        "a function": p(fire, b")R"),
        "a function by the old opcode": p(f"c{here}\nfire\n".encode(), b")R"),
        "INST": p(f"(i{here}\nfire\n".encode()),
        "OBJ": p(b"(", fire, b"K\x01o"),
        "a class with an init": p(no_data, b")R"),
        "its setstate": p(no_data, b")\x81}b"),
        "its hash, as a key": p(b"}", no_data, b")\x81Ns"),
        "its hash, in a set": p(b"\x8f(", no_data, b")\x81\x90"),
        "its hash, in a frozen set": p(b"(", no_data, b")\x81\x91"),
        "the hash of a data class in a tuple": p(b"}", name(here, "Key"), b")\x81}", text("part"), b"Nsb\x85Ns"),
        "getattr": p(call("builtins", "getattr", module, text("fire")), b")R"),
        "a dotted name": p(name(here, "FIRED.append"), b"K\x01\x85R"),
        "eval": p(call("builtins", "eval", text(by_hand))),
        "exec": p(call("builtins", "exec", text(by_hand))),
        "code": p(call("builtins", "eval", call("builtins", "compile", text(by_hand), text("x"), text("eval")))),
        "map in a list": p(call("builtins", "list", call("builtins", "map", fire, b"K\x01\x85"))),
        "map in a deque": p(call("collections", "deque", call("builtins", "map", fire, b"K\x01\x85"))),
        "partial": p(call("functools", "partial", fire), b")R"),
        "reduce": p(call("functools", "reduce", fire, value((1, 2)))),
        "methodcaller": p(call("operator", "methodcaller", text("append"), b"N"), name(here, "FIRED"), b"\x85R"),
        "a data class by its init": p(name(here, "Point"), b"K\x01\x85R"),
        "a property of a data class": p(name(here, "Point"), b")\x81N}", text("secret"), b"Ns\x86b"),
        "a data class with a finalizer": p(name(here, "Cleans"), b")\x81}", text("path"), text("/x"), b"sb"),
        "a data class with a setstate": p(name(here, "Restores"), b")\x81Nb"),
        "_missing_ of an enumeration": p(name(here, "Color"), b"K\x63\x85R"),
        "the init of an exception": p(name(here, "BadInput"), b"K\x01", text("x"), b"\x86R"),
        "copyreg": p(call("copyreg", "__newobj__", no_data), b"Nb"),
    }


def _codes() -> dict[str, bytes]:
    return {
        "os.system": p(call("os", "system", text("true"))),
        "posix.system": p(call("posix", "system", text("true"))),
        "open": p(call("builtins", "open", text("/etc/passwd"))),
        "type": p(call("builtins", "type", b"N")),
        "a type made": p(call("builtins", "type", text("X"), b")", b"}")),
        "Popen": p(name("subprocess", "Popen"), text("true"), b"\x85R"),
        "Popen by NEWOBJ": p(name("subprocess", "Popen"), b")\x81"),
        "a module of the sender's choice": p(call("antigravity", "fly")),
        "a type through a module": p(name("collections.abc", "sys.modules")),
        "a class through an alias": p(name("dataclasses", "abc.ABC"), b")\x81"),
        "numpy's own exec": p(call("numpy.testing._private.utils", "runstring", text("1"), b"}")),
        "numpy.load": p(call("numpy", "load", text("/etc/passwd"))),
        "torch.load": p(call("torch.storage", "_load_from_bytes", b"C\x01a")),
        "pandas.eval": p(call("pandas", "eval", text("1"))),
        "rebuild of another class": p(call("skypool.codec", "rebuild", name("subprocess", "Popen"), b")", b"}")),
        "rebuild of a text": p(call("skypool.codec", "rebuild", text("x"), b")", b"}")),
        "object_of": p(call("skypool.codec", "object_of", text("x"))),
        "a class of the client's that is none": p(
            call("skypool.trust.sending", "theirs", text("os"), text("system")), b")R"
        ),
        "getattr of a value": p(call("builtins", "getattr", text("x"), text("format"))),
        "a method of ZoneInfo": p(
            call("builtins", "getattr", name("zoneinfo", "ZoneInfo"), text("from_file")), b"N\x85R"
        ),
        "a file as a time zone": p(
            *(call("builtins", "getattr", name("zoneinfo", "ZoneInfo"), text("_unpickle")), b"("),
            *(text("../../../etc/passwd"), b"K\x01tR"),
        ),
        "a call of a value": p(text("x"), b")R"),
        "a factory": p(call("collections", "defaultdict", name("os", "getcwd"))),
        "a factory in disguise": p(call("collections", "defaultdict", name("builtins", "exit"))),
        "an exception that ends the process": p(name("builtins", "SystemExit"), b")R"),
        "KeyboardInterrupt": p(call("builtins", "KeyboardInterrupt")),
    }


def _names(here: str) -> dict[str, bytes]:
    point = name(here, "Point") + b")\x81"
    return {
        "a function itself": p(name("builtins", "print")),
        "a name in a list": p(b"]", name("os", "system"), b"a"),
        "a name in a tuple": p(name("os", "system"), b"\x85"),
        "a name as a key": p(b"}", name("os", "system"), b"Ns"),
        "a name in an exception": p(call("builtins", "ValueError", name("os", "system"))),
        "a name in a data class": p(point, b"}", text("x"), name("os", "system"), b"sb"),
        "NEWOBJ_EX": p(name(here, "NoData"), b")}\x92"),
        "a new enumeration": p(call(here, "Color", text("Evil"), text("a b"))),
        "the enumeration of enumerations": p(call("enum", "Enum", text("Evil"))),
        "a member with a state": p(name(here, "Color"), b"K\x01\x85R}", text("x"), b"Nsb"),
        "bits that no flag has": p(name(here, "Perm"), b"K\x40\x85R"),
        "__class__ of a data class": p(point, b"}", text("__class__"), b"Nsb"),
        "__class__ as a slot": p(point, b"N}", text("__class__"), b"Ns\x86b"),
        "__dict__ of a data class": p(point, b"}", text("__dict__"), b"}sb"),
        "a method of a data class": p(point, b"}", text("norm"), b"Nsb"),
        "a number for a field": p(point, b"}K\x01Nsb"),
        "a state of a class": p(name(here, "Point"), b"}", text("x"), b"Nsb"),
        "a state of a list": p(b"]}", text("x"), b"Nsb"),
        "a method of an exception": p(name("builtins", "ValueError"), b")R}", text("add_note"), b"Nsb"),
        "more fields than there are": p(name(here, "Frozen"), b")\x81](K\x01K\x02K\x03eb"),
        "a named tuple of another size": p(name(here, "Pair"), b"K\x01\x85\x81"),
        "a surrogate in a name": p(name("os", "\ud800")),
        "no text as a name": p(b"K\x01K\x02\x93"),
        "arguments that are no tuple": p(name("decimal", "Decimal"), text("1"), b"R"),
        "a key that cannot be hashed": p(b"}]Ns"),
    }


def _arrays() -> dict[str, bytes]:
    objects = dtype("V16", value(3), text("|"), dtype("O") + value((2,)) + b"\x86", b"NN", value(16), b"K\x01K\x00")
    nested = functools.reduce(lambda inner, _: record(inner), range(50), dtype("f8"))
    return {
        "a matrix": p(blank("matrix")),
        "a file as an array": p(blank("memmap")),
        "an array without its state": p(blank()),
        "a type without its state": p(call("numpy", "dtype", text("f8"), b"\x89\x88")),
        "an array in its own state": p(blank(), b"\x94", state(value(1), value((1,)), dtype("O"), b"\x89", b"]h\x00a")),
        "pointers forged by _frombuffer": p(frombuffer(POINTERS, dtype("O"), 2)),
        "pointers forged by a state": p(array_of(dtype("O"), POINTERS, 2)),
        "pointers forged by a scalar": p(call(f"{CORE}.multiarray", "scalar", dtype("O"), b"C\x08" + b"A" * 8)),
        "pointers in a field": p(frombuffer(POINTERS, record(dtype("O")), 2)),
        "pointers in a field by a state": p(array_of(record(dtype("O")), POINTERS, 2)),
        "pointers in a sub-array": p(frombuffer(POINTERS, objects, 1)),
        "pointers in the field of a field": p(frombuffer(POINTERS, record(record(dtype("O"))), 2)),
        "a field behind the item": p(record(dtype("f8"), at=100)),
        "a field before the item": p(record(dtype("f8"), at=-8)),
        "a type by another name": p(dtype("f8,O")),
        "a type in a type in a type": p(nested),
        "a unit that is none": p(
            *(call("numpy", "dtype", text("M8"), b"\x89\x88"),),
            state(value(4), text("<"), b"NNN", *[value(-1)] * 2, value(0), b"}" + value((b"x]", 1, 1, 1)) + b"\x86"),
        ),
        "too small a buffer": p(frombuffer(POINTERS, dtype("f8"), 3)),
        "too large a buffer": p(frombuffer(POINTERS, dtype("f8"), 1)),
        "a negative shape": p(frombuffer(POINTERS, dtype("f8"), -2)),
        "a shape that overflows": p(frombuffer(POINTERS, dtype("f8"), 2**31, 2**31, 4)),
        "a shape of 100 dimensions": p(frombuffer(POINTERS, dtype("f8"), 2, *[1] * 100)),
        "a state of another size": p(array_of(dtype("f8"), POINTERS, 3)),
        "objects of another number": p(array_of(dtype("O"), b"]", 3)),
        "booleans that are 2": p(frombuffer(b"C\x10" + b"\x02" * 16, dtype("b1"), 16)),
        "booleans in a field that are 2": p(frombuffer(b"C\x10" + b"\x02" * 16, record(dtype("b1"), size=1), 16)),
        "characters that are none": p(frombuffer(b"C\x04\xff\xff\xff\x7f", dtype("U1"), 1)),
        "a missing buffer": p(frombuffer(b"\x97", dtype("f8"), 2)),
        "read-only nothing": p(b"N\x98"),
        "an array of no form": p(
            call("array", "_array_reconstructor", name("array", "array"), text("d"), b"K\x63", b"C\x08" + b"A" * 8)
        ),
        "half an item of an array": p(
            call("array", "_array_reconstructor", name("array", "array"), text("d"), b"K\x10", b"C\x07" + b"A" * 7)
        ),
    }


def _opcodes() -> dict[str, bytes]:
    return {
        "an extension code": p(b"\x82\x01)R"),
        "a long extension code": p(b"\x84\x01\x00\x00\x00"),
        "a persistent id": p(b"Pos\n"),
        "a persistent id of the stack": p(b"NQ"),
        "DUP": p(b"N2"),
        "PUT": p(b"Np1\n"),
        "BINPUT": p(b"Nq\x01"),
        "a memo of billions": p(b"Nr\xff\xff\xff\x7f"),
        "bytes of exabytes": p(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"),
        "a bytearray of exabytes": p(b"\x96\xff\xff\xff\xff\xff\xff\xff\x3f"),
        "a bytearray of gigabytes": p(b"\x96\x00\x00\x00\x00\x10\x00\x00\x00"),
        "a text of exabytes": p(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f"),
        "a number of gigabytes": p(b"\x8b\xff\xff\xff\x7f"),
        "a frame of exabytes": b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        "an unknown protocol": b"\x80\xffN.",
        "nothing": b"",
        "nothing but an end": b".",
        "more behind the end": p(b"N") + b"N.",
        "an open mark": p(b"(N\x8f"),
        "no mark": p(b"t"),
        "a memory that is not there": p(b"h\x05"),
        "a text that is none": p(b"\x8c\x01\xff"),
        "a number of many digits": p(b"I" + b"9" * 5000 + b"\n"),
        "an item of a tuple": p(b")Na"),
        "a list as a set": p(b"](N\x90"),
        "a month that is none": p(call("datetime", "date", b"C\x04\x07\xe4\x63\x01")),
        "an hour that is none": p(call("datetime", "time", b"C\x06\x7f\x00\x00\x00\x00\x00")),
        "a time zone of the sender's": p(call("datetime", "datetime", b"C\x0a\x07\xe4\x01\x01" + bytes(6), text("x"))),
        "no denominator": p(call("fractions", "Fraction", b"K\x01", b"K\x00")),
    }


def _long(n: int) -> bytes:
    """A number, soon: `value` of thousands takes seconds, and so would pickling a dict of those that collide."""
    data = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _batches(keys: list[bytes], size: int, after: bytes, put: bytes) -> Iterator[bytes]:
    """Keys into what lies on the stack, as many at a time."""
    for at in range(0, len(keys), size):
        yield b"(" + b"".join(key + after for key in keys[at : at + size]) + put


def _monsters() -> dict[str, bytes]:
    """Some of these end the process that reads them with pickle, or keep it for ever: they are never given to it."""
    collide = [_long(n * (2**61 - 1)) for n in range(1, 20001)]
    twins = [b"(" + b"".join(each) + b"t" for each in itertools.product((_long(-1), _long(-2)), repeat=13)]
    in_twos = b")" + b"".join(b"\x94h%ch%c\x86" % (n, n) for n in range(60))
    copied = b"}(" + b"".join(b"M" + struct.pack("<H", n) + b"N" for n in range(5000)) + b"u\x94"
    return {
        "a number that takes for ever": p(call("fractions", "Fraction", text("1e999999999"))),
        "keys that collide": p(b"}", *_batches(collide, 1000, b"N", b"u")),
        "keys that collide, a few at a time": p(b"}", *_batches(collide[:4000], 200, b"N", b"u")),
        "members that collide": p(b"\x8f", *_batches(collide[:3000], 1000, b"", b"\x90")),
        "tuples that collide": p(b"}", *_batches(twins, 1000, b"N", b"u")),
        "a key as deep as the sea": p(b"})" + b"\x85" * 300_000, b"Ns"),
        "a key of two of two of two": p(b"}", in_twos, b"Ns"),
        "an exception of two of two of two": p(name("builtins", "ValueError"), in_twos, b"\x85R"),
        "a chain of deques": p(call("collections", "deque", call("collections", "deque") + b"\x85")),
        "a chain of deques, appended": p(call("collections", "deque"), call("collections", "deque"), b"a"),
        "a chain of defaultdicts": p(
            call("collections", "defaultdict"), b"K\x00", call("collections", "defaultdict"), b"s"
        ),
        "a chain of arrays": p(array_of(dtype("O"), b"]" + array_of(dtype("O"), b"]Na", 1) + b"a", 1)),
        "a chain of slices": p(call("builtins", "slice", call("builtins", "slice", b"NNN"), b"NN")),
        "copies of copies": p(copied, b"0](", b"".join([call("collections", "Counter", b"h\x00")] * 2000), b"e"),
        "too long a path": p(name("pathlib", "PosixPath"), b"(" + text("a") * 2000 + b"tR"),
        "texts of a path, often": p(
            *(text("a" * 100_000), b"\x940]("),
            *([name("pathlib", "PosixPath"), b"h\x00" * 3, b"\x87R"] * 1000),
            b"e",
        ),
    }


def nested(depth: int) -> bytes:
    """An exception in a pickle in an exception in a pickle …"""
    inner: bytes = b"N"
    for _ in range(depth):
        data = p(inner)
        size = struct.pack("<I", len(data))
        inner = call("skypool.codec", "_load_one", b"B" + size + data, text("a"), text("b"), text("c"), b"]")
    return p(call("builtins", "ExceptionGroup", text(""), b"]" + inner + b"a"))


def refused(here: str) -> dict[str, bytes]:
    """What must be refused, each by its harm: code, memory that is not its own, memory or time without end."""
    return {**_codes(), **_names(here), **_arrays(), **_opcodes(), **_monsters()}

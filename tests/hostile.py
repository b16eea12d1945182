"""Values that mean harm, in the format of `skypool.trust.decoding`, written byte by byte; see tests/test_trust.py."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from skypool.trust.classes import Allowed
from skypool.trust.encoding import _Writing
from skypool.trust.format import MAGIC

POINTERS = b"A" * 16


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def raw(data: bytes) -> bytes:
    return u64(len(data)) + data


def text(value: str) -> bytes:
    return b"s" + raw(value.encode("utf-8", "surrogatepass"))


def value(plain: object) -> bytes:
    """An honest value, without what it begins with and the zeros at its end."""
    writing = _Writing(Allowed(), tables=False)
    writing.value(plain)
    return bytes(writing._out[len(MAGIC) :])


def several(tag: bytes, parts: Iterable[bytes]) -> bytes:
    parts = list(parts)
    return tag + u64(len(parts)) + b"".join(parts)


def ref(number: int) -> bytes:
    return b"r" + u64(number)


def other(name: str, *args: bytes) -> bytes:
    return b"x" + bytes([len(name)]) + name.encode() + u64(len(args)) + b"".join(args)


def shape(module: str, name: str, *fields: str, number: int = 0) -> bytes:
    names = b"".join(raw(each.encode("utf-8", "surrogatepass")) for each in (module, name, *fields))
    return u64(number) + u64(len(fields)) + names


def made(tag: bytes, module: str, name: str, *values: bytes) -> bytes:
    return tag + shape(module, name) + u64(len(values)) + b"".join(values)


def whole(*parts: bytes, zeros: int = 0) -> bytes:
    return MAGIC + b"".join(parts) + bytes(zeros)


def array(said: Any, shape_: tuple[int, ...], data: bytes = POINTERS, order: str = "C") -> bytes:
    return other("ndarray", value(said), value(shape_), text(order), b"b" + raw(data))


def record(inner: Any, at: int = 0, size: int = 8) -> Any:
    return ("record", size, False, ["a"], [inner], [at])


def names(here: str) -> list[tuple[str, str]]:
    """What nothing may be made of, by whatever tag."""
    own = [
        (here, each)
        for each in ("fire", "NoData", "Cleans", "Restores", "FIRED", "FIRED.append", "Point.norm", "nothing")
    ]
    return [
        *own,
        *(("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr")),
        *(("builtins", "type"), ("builtins", "list"), ("builtins", "print"), ("subprocess", "Popen"), ("enum", "Enum")),
        *(("builtins", "SystemExit"), ("builtins", "KeyboardInterrupt"), ("antigravity", "fly"), ("os", "\ud800")),
        *(
            ("collections.abc", "sys.modules"),
            ("dataclasses", "abc.ABC"),
            ("numpy", "matrix"),
            ("", ""),
            ("a", "b" * 9999),
        ),
        *(("functools", "partial"), ("operator", "methodcaller"), ("pathlib", "Path"), ("numpy", "memmap")),
    ]


def _wrong(here: str) -> dict[str, bytes]:
    point = shape(here, "Point", "x")
    return {
        "nothing": b"",
        "another beginning": b"\x93sky2N",
        "a pickle": b"\x80\x05N.",
        "nothing but its beginning": whole(),
        "an unknown tag": whole(b"\xff"),
        "a list that is cut off": whole(b"l", u64(5), b"NN"),
        "a list of exabytes": whole(b"l", u64(1 << 60)),
        "a list of billions": whole(b"l", u64(1 << 32)),
        "numbers of exabytes": whole(b"q", u64(1 << 60)),
        "a text of exabytes": whole(b"s", u64(1 << 63)),
        "a text that is none": whole(b"s", raw(b"\xff")),
        "bytes of gigabytes": whole(b"b", u64(1 << 31)),
        "an integer of gigabytes": whole(b"I", u64(1 << 31)),
        "a reference to nothing": whole(ref(0)),
        "a reference to exabytes": whole(ref(1 << 63)),
        "JSON that is none": b"\x93sky{[[[[",
        "JSON as deep as it may be": b"\x93sky{" + b"[" * 200,
        "JSON that is long": b"\x93sky{" + b"1" * 5000,
        "an unknown name": whole(other("system", text("true"))),
        "a name of nothing": whole(b"x\x00", u64(0)),
        "a name that is no text": whole(b"x\x01\xff", u64(0)),
        "a member that there is none of": whole(made(b"e", here, "Color", text("GREEN"))),
        "a member by its value": whole(made(b"e", here, "Color", value(1))),
        "bits that no flag has": whole(made(b"E", here, "Perm", value(64))),
        "bits of what is no flag": whole(made(b"E", here, "Color", value(1))),
        "a named tuple of another size": whole(made(b"n", here, "Pair", value(1))),
        "a method of a data class": whole(b"O", shape(here, "Point", "norm"), value(1)),
        "a property of a data class": whole(b"O", shape(here, "Point", "secret"), value(1)),
        "__class__ of a data class": whole(b"O", shape(here, "Point", "__class__"), value(1)),
        "__dict__ of a data class": whole(b"O", shape(here, "Point", "__dict__"), value({})),
        "a field that is no name": whole(b"O", shape(here, "Point", "a b"), value(1)),
        "a field twice": whole(b"O", shape(here, "Point", "x", "x"), value(1), value(1)),
        "a data class as an error": whole(b"l", u64(2), b"O", point, value(1), b"X", u64(0), u64(0)),
        "rows without columns": whole(b"R", u64(0), u64(1 << 40)),
        "rows of another length": whole(b"R", u64(1), u64(3), value([1, 2])),
        "rows of exabytes": whole(b"R", u64(1), u64(1 << 60), value([1, 2])),
        "texts of another number": whole(b"u", u64(3), raw(b"a\0b")),
        "no texts at all": whole(b"u", u64(0), raw(b"")),
        "a key that cannot be hashed": whole(b"d", u64(1), value([]), value(1)),
        "keys without values": whole(b"w", u64(2), value([1, 2]), value([1])),
        "a key with a hash of its own": whole(b"d", u64(1), b"O", shape(here, "Key", "part"), value(1), value(1)),
        "the same in a tuple": whole(b"d", u64(1), b"t", u64(1), b"O", shape(here, "Key", "part"), value(1), value(1)),
        "the same in a set": whole(b"S", u64(1), b"l", u64(1), b"O", shape(here, "Key", "part"), value(1)),
        "a month that is none": whole(other("date", value(2020), value(99), value(1))),
        "an hour that is a text": whole(other("time", text("x"), *[value(0)] * 3, b"N", value(0))),
        "a time zone of the sender's": whole(other("time", *[value(0)] * 4, text("x"), value(0))),
        "a file as a time zone": whole(other("zone", text("../../../etc/passwd"))),
        "no denominator": whole(other("fraction", value(1), value(0))),
        "a number that takes for ever": whole(other("fraction", value(1 << 200_000), value((1 << 200_000) - 1))),
        "a factory": whole(other("defaultdict", text("getcwd"), value({}))),
        "a factory in disguise": whole(other("defaultdict", text("exit"), value({}))),
        "attributes of an OrderedDict": whole(other("ordered", value({}), value({"__class__": 1}))),
        "attributes of a namespace": whole(other("namespace", value({"__class__": 1}))),
        "a deque in a deque": whole(other("deque", several(b"l", [other("deque", value([]), b"N")]), b"N")),
        "a slice in a slice": whole(other("slice", other("slice", *[b"N"] * 3), b"N", b"N")),
        "an array of no form": whole(other("array", text("u"), value(8), b"b" + raw(b"A" * 8))),
        "half an item of an array": whole(other("array", text("d"), value(8), b"b" + raw(b"A" * 7))),
        "an exception of itself": whole(b"X", shape("builtins", "ValueError"), u64(2), b"t", u64(1), ref(0), value({})),
        "an exception of a method": whole(made(b"X", "builtins", "ValueError", value(()), value({"add_note": 1}))),
        "an exception of nothing": whole(made(b"X", "builtins", "ValueError")),
        "a group of numbers": whole(made(b"X", "builtins", "ExceptionGroup", value(("g", [1, 2])), value({}))),
        "a worker that died oddly": whole(made(b"X", "skypool.errors", "WorkerDied", value((1, 2, 3)), value({}))),
    }


def _arrays() -> dict[str, bytes]:
    nested: Any = "<f8"
    for _ in range(50):
        nested = record(nested)
    return {
        "pointers": whole(array("|O", (2,))),
        "pointers in a field": whole(array(record("|O"), (2,))),
        "pointers in a sub-array": whole(array(("sub", "|O", (2,)), (1,))),
        "pointers in the field of a field": whole(array(record(record("|O")), (2,))),
        "a pointer as a number": whole(other("scalar", text("|O"), b"b" + raw(b"A" * 8))),
        "a field behind the item": whole(array(record("<f8", at=100), (2,))),
        "a field before the item": whole(array(record("<f8", at=-8), (2,))),
        "a type by another name": whole(array("f8,O", (2,))),
        "a type in a type in a type": whole(array(nested, (2,))),
        "a type that holds itself": whole(b"x\x05dtype", u64(1), b"l", u64(1), ref(0)),
        "a unit that is none": whole(array("<M8[x]", (2,))),
        "too small a buffer": whole(array("<f8", (3,))),
        "too large a buffer": whole(array("<f8", (1,))),
        "a negative shape": whole(array("<f8", (-2,))),
        "a shape that overflows": whole(array("<f8", (2**31, 2**31, 4))),
        "a shape of 100 dimensions": whole(array("<f8", (2, *[1] * 100))),
        "objects of another number": whole(other("objects", value((3,)), text("C"), value([]))),
        "an array of objects in itself": whole(
            other(
                "objects", value((1,)), text("C"), several(b"l", [other("objects", value((0,)), text("C"), value([]))])
            )
        ),
        "booleans that are 2": whole(array("|b1", (16,), b"\x02" * 16)),
        "booleans in a field that are 2": whole(array(record("|b1", size=1), (16,), b"\x02" * 16)),
        "characters that are none": whole(array("<U1", (1,), b"\xff\xff\xff\x7f")),
        "a missing buffer": whole(other("ndarray", text("<f8"), value((2,)), text("C"), b"N")),
        "texts without a size": whole(array("|S0", (1 << 30,), b"")),
        "letters without a size": whole(array("<U0", (1 << 30,), b"")),
        "records without a size": whole(array(("record", 0, False, [], [], []), (1 << 40,), b"")),
        "an order that is none": whole(array("<f8", (2,), order="K")),
    }


def wrong(here: str) -> dict[str, bytes]:
    """What must be refused: code, memory that is not its own, what is no value."""
    by_tag = {
        f"{module[:12]}.{name[:20]} by {tag.decode()}": whole(tag, shape(module, name), u64(0))
        for module, name in names(here)
        for tag in (b"e", b"E", b"n", b"O", b"X", b"A", b"C")
    }
    return {**_wrong(here), **_arrays(), **by_tag}


def monsters() -> dict[str, bytes]:
    """What costs far more than its length where it is read carelessly. It must be refused, or cost little."""
    # Every link of a chain is a list item, so that it has a number: the chains are made of references to these.
    links: list[bytes] = []
    for chain in range(2):
        first = 1 + chain * 2 * 40
        links += [several(b"t", [value(1), value(2)])]
        links += [b"Z" + u64(1) + several(b"l", [ref(first)])]
        for n in range(1, 20):
            before = first + 3 * n - 1
            links += [several(b"t", [ref(before), ref(before)]), b"Z" + u64(1) + several(b"l", [ref(before + 1)])]
    collide = [value(n * (2**61 - 1)) for n in range(1, 20_001)]
    big = value(1 << 80_000)
    many = 20_000
    doubling = [several(b"t", [value(1), value(2)])] + [several(b"t", [ref(n + 1), ref(n + 1)]) for n in range(60)]
    fields = ("record", 800, False, [f"f{n}" for n in range(1000)], ["<U200"] * 1000, [0] * 1000)
    return {
        "two chains of frozensets as keys": whole(
            several(b"l", [*links, b"d" + u64(2) + ref(1 + 3 * 19) + ref(1 + 3 * 39) + b"NN"]), zeros=20_000
        ),
        "a key of two of two of two": whole(several(b"l", [*doubling, b"d" + u64(1) + ref(60) + b"N"]), zeros=20_000),
        "keys that collide": whole(
            b"w", u64(len(collide)), several(b"l", collide), several(b"l", [b"N"] * len(collide)), zeros=1_500_000
        ),
        "members that collide": whole(b"S", u64(len(collide)), several(b"l", collide), zeros=2_500_000),
        "fractions of one big number": whole(
            several(b"l", [b"m" + big, *[other("fraction", ref(1), value(3))] * 2000]), zeros=10_000
        ),
        "a big number as a key, often": whole(
            several(b"l", [b"m" + big, *[b"d" + u64(1) + ref(1) + b"N"] * 2000]), zeros=10_000
        ),
        "empty sets": whole(several(b"l", [b"S" + u64(0) + several(b"l", [])] * many)),
        "empty lists": whole(several(b"l", [several(b"l", [])] * many)),
        "empty dictionaries": whole(several(b"l", [b"d" + u64(0)] * many)),
        "empty deques": whole(several(b"l", [other("deque", value([]), b"N")] * many)),
        "deques of one list": whole(
            several(b"l", [value([*range(1000)]), *[other("deque", ref(1), b"N")] * 2000]), zeros=10_000
        ),
        "dictionaries of one dictionary": whole(
            several(b"l", [value({str(n): n for n in range(50)}), *[other("counter", ref(1))] * 2000]), zeros=10_000
        ),
        "nothing at all, often": whole(several(b"l", [b"N"] * 1_000_000)),
        "references": whole(several(b"l", [value([]), *[ref(1)] * 100_000])),
        "a million fields above each other": whole(array(fields, (250,), bytes(800 * 250))),
        "records in records": whole(several(b"l", [other("dtype", value(record(record("<f8"))))] * 3000)),
        "lists in lists in lists": whole(b"".join([b"l" + u64(1)] * 100_000) + b"N"),
        "one path, often": whole(
            several(b"l", [b"m" + text("a/" * 400), *[other("path", text("posix"), ref(1))] * 2000]), zeros=10_000
        ),
        "time zones": whole(several(b"l", [other("zone", text(f"Etc/GMT+{n}")) for n in range(2000)])),
    }

"""What a worker does for a client that reads data only: values go home in the form in which it can read them."""

from __future__ import annotations

import sys
from pickle import PickleBuffer
from typing import Any

from skypool import codec
from skypool.trust import arrays, classes

_known: dict[tuple[str, str], type] = {}


def theirs(module: str, name: str) -> type:
    """A class of the client's own that the node has from it: of its script, which is no module here.

    Raises:
        AttributeError: it is not there, as where it was made inside a function.
    """
    made = _known.get((module, name)) or classes.locate(module, name)
    if made is None:
        raise AttributeError(f"{module}.{name} is no class that can be found by its name")
    return made


class Pickler(codec.Pickler):
    """cloudpickle, that sends no class by value, and tensors as their memory."""

    for_data = True

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and classes.locate(obj.__module__, obj.__qualname__) is not obj:
            if obj.__module__ not in ("builtins", "types") and "<locals>" not in obj.__qualname__:
                _known[obj.__module__, obj.__qualname__] = obj
                return theirs, (obj.__module__, obj.__qualname__)
        elif type(obj).__module__.partition(".")[0] == "torch" and (reduced := _of_tensor(obj)) is not None:
            return reduced
        return super().reducer_override(obj)


def _of_tensor(value: Any) -> tuple[Any, ...] | None:
    """(tensor, its arguments); None for what is no plain tensor with numbers in it."""
    torch = sys.modules["torch"]
    kind = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter"}.get(type(value))
    if kind is None or value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        return None
    own = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    memory = own.reshape(-1).view(torch.uint8).numpy() if own.numel() else b""
    name = str(own.dtype).removeprefix("torch.")
    return arrays.tensor, (
        PickleBuffer(memory) if own.numel() else memory,
        name,
        tuple(own.shape),
        kind,
        value.requires_grad,
    )

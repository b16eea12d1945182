"""`accelerators.suggest`: the accelerators that a model of a given size needs, with the arithmetic shown.

All sizes are in 10**9 bytes, for N parameters of b bytes each; sequence s, batch B, and for activations the
width h and depth L of a transformer of that size: N = 12 L h² with h = 128 L, which gives 33 layers of 4211
for 7B and 96 of 12313 for 175B.

| what | inference | lora | full-finetune, pretrain |
|---|---|---|---|
| weights | N b | N b, frozen, + 2 for each adapter | 2 N |
| gradients | – | 2 for each adapter | 2 N |
| optimizer (Adam) | – | 12 for each adapter | 12 N: a float32 copy and two moments |
| activations | 0.2 N b + cache | 2 s B h L + 34 s B h on each device | the same; pretrain: 34 s B h L |

The cache of inference holds keys and values of 16 bits for B sequences of s tokens: 4 s B L w, where w is the smaller
of h and 1024: 8 key-value heads of 128, as Llama 3 has in all sizes (arXiv:2407.21783, table 3).

Sources: 16 bytes a parameter in mixed precision with Adam, ZeRO (arXiv:1910.02054) section 3.1; in float32 it
is 4 + 4 + 8. Activations 34 s B h a layer with selective recomputation, 2 s B h with full, Korthikanti et al.
(arXiv:2205.05198). 1.2 times the weights for inference, EleutherAI, Transformer Math 101. Adapters of 0.5 % of the
parameters, which are ranks of 16 to 32 in all linear layers; 4-bit frozen weights, QLoRA (arXiv:2305.14314), whose
65B fits 48 GB.

A card's nominal memory is compared with these; it has some 5 % more, which the driver and fragmentation take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from skypool.accelerators._parse import parse
from skypool.accelerators.value import Accelerator
from skypool.errors import UsageError, nearest

Workload = Literal["inference", "lora", "full-finetune", "pretrain"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]

WORKLOADS = ("inference", "lora", "full-finetune", "pretrain")
BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5}
ADAPTERS = 0.005
KEY_VALUE_WIDTH = 1024

GUIDE: tuple[tuple[float, str, str], ...] = (
    (1e9 - 1, "T4", "T4"),
    (7e9, "A10G", "A100-40GB"),
    (13e9, "A100-40GB", "A100-80GB"),
    (70e9, "A100-80GB", "H100:2"),
    (float("inf"), "H100:4", "H100:8"),
)
"""Up to so many parameters: the least that is worth trying, and what to take if it can be had. It is the
table that users of such tools know; it leaves room for batch and context, where arithmetic takes less."""

LADDER: tuple[str, ...] = (
    "T4", "L4", "A10G", "A100-40GB", "L40S", "A100-80GB", "H100", "L40S:2", "H200", "H100:2", "A100-80GB:2", "MI300X",
    "A100-80GB:4", "H100:4", "H200:4", "A100-80GB:8", "H100:8", "H200:8", "B200:8", "MI300X:8",
)  # fmt: skip
"""What else is offered, by memory: the cards that most clouds have."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory for one copy of the model, in 10**9 bytes."""

    weights_gb: float
    gradients_gb: float
    optimizer_gb: float
    activations_gb: float

    @property
    def total_gb(self) -> float:
        """All four."""
        return self.weights_gb + self.gradients_gb + self.optimizer_gb + self.activations_gb


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One choice.

    Attributes:
        accelerator: of one node; nodes: how many such nodes hold the model.
        role: "minimum", "better" or "also".
        precision: of the weights; needs: the arithmetic at that precision; why: the same in words.
    """

    accelerator: Accelerator
    nodes: int
    role: Literal["minimum", "better", "also"]
    precision: str
    needs: Needs
    why: str

    @property
    def free_gb(self) -> float:
        """What is left for larger batches and longer contexts."""
        return self.accelerator.total_memory_gb * self.nodes - self.needs.total_gb


def suggest(
    parameters: float | str,
    workload: Workload = "inference",
    precision: Precision | None = None,
    *,
    sequence: int = 2048,
    batch: int = 1,
    limit: int = 5,
) -> tuple[Suggestion, ...]:
    """What to rent for a model, the least first.

    Without a precision it agrees with `GUIDE` for inference and lora, wherever the arithmetic allows; with one, and
    for training, the arithmetic alone decides.

    Args:
        parameters: 13e9 or "13B".
        workload: "inference", "lora", "full-finetune" or "pretrain".
        precision: of the weights. Left out, bf16; for inference and lora on a machine too small for that, fp8
            where it computes in fp8, else int8 or int4, and the suggestion says so.
        sequence, batch: tokens in a sequence, and sequences at once: on each device in training, of all together
            in inference. They size the activations and the cache of keys and values.
        limit: how many choices at most.
    Raises:
        UsageError: a value that means nothing.
    """
    size = amount(parameters)
    _check(size, workload, precision, sequence, batch)
    shape = _Shape(size, workload, sequence, batch)
    serving = workload in ("inference", "lora")
    guided = serving and precision is None
    least, better = next((least, better) for most, least, better in GUIDE if size <= most)
    narrower = (precision,) if precision else (("bf16", "fp8", "int8", "int4") if serving else ("bf16",))
    found = []
    for name in _candidates([least, better] if guided else [], workload):
        tried = narrower if name in (least, better) or not guided else narrower[:1]
        if fit := _fit(parse(name), 1, shape, tried):
            found.append(fit)
    found = found or _several_nodes(shape, narrower)
    second = str(parse(better)) if guided else None
    return tuple(_ranked(found[:limit], second))


def amount(text: float | str) -> float:
    """Read a number of parameters: "7B" and "7e9" are 7e9.

    Raises:
        UsageError: it cannot be read.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    plain = text.strip().upper() if isinstance(text, str) else ""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    scale = units.get(plain[-1:], 1.0)
    try:
        return float(plain[:-1] if plain[-1:] in units else plain) * scale
    except ValueError:
        raise UsageError(f'parameters must be spelled like "7B", "350M" or 7e9, not {text!r}') from None


@dataclass(frozen=True, slots=True)
class _Shape:
    parameters: float
    workload: str
    sequence: int
    batch: int
    split: bool = False
    """Whether the devices of a node share the activations of one sequence, as in tensor parallelism."""


def _check(parameters: float, workload: str, precision: str | None, sequence: int, batch: int) -> None:
    if not 0 < parameters < 1e15 or sequence < 1 or batch < 1:
        raise UsageError("parameters, sequence and batch must be above 0, and parameters a number such as 13e9")
    if parameters < 1000:
        few = f"{parameters:g}"
        raise UsageError(f"a model has more than {few} parameters; {few} billion of them are {few}e9, or '{few}B'")
    if workload not in WORKLOADS:
        near = nearest(workload, WORKLOADS) or WORKLOADS
        raise UsageError(f"no workload is called {workload!r}; did you mean {' or '.join(near)}?")
    if precision is not None and precision not in BYTES:
        raise UsageError(f"no precision is called {precision!r}; there is {', '.join(BYTES)}")
    if precision not in (None, "bf16", "fp16", "fp32") and workload not in ("inference", "lora"):
        raise UsageError(f"{workload} updates every weight, which {precision} is too coarse for")


def _candidates(first: list[str], workload: str) -> list[str]:
    """The guide's two first, where it is asked, then all that have as much memory as the least of them, by memory."""
    rising = sorted(LADDER, key=lambda name: (parse(name).total_memory_gb, parse(name).count))
    if first:
        floor = parse(first[0]).total_memory_gb
        return list(dict.fromkeys([*first, *(name for name in rising if parse(name).total_memory_gb >= floor)]))
    if workload != "pretrain":
        return rising
    # training from nothing takes all the speed there is: 8 of the current generation or nothing
    least = parse("H100:8").total_memory_gb
    return [name for name in rising if parse(name).total_memory_gb >= least and not name.startswith("A100")]


def needs(
    parameters: float,
    workload: str,
    precision: str = "bf16",
    *,
    sequence: int = 2048,
    batch: int = 1,
    devices: int = 1,
) -> Needs:
    """The memory that a model takes on so many devices together, by the table at the top of this module."""
    each, size = BYTES[precision], parameters / 1e9
    width, depth = dimensions(parameters)
    if workload == "inference":
        cache = 4 * sequence * batch * depth * min(width, KEY_VALUE_WIDTH) / 1e9
        return Needs(size * each, 0, 0, 0.2 * size * each + cache)
    layer = sequence * batch * width * devices / 1e9
    activations = 34 * layer * depth if workload == "pretrain" else 2 * layer * depth + 34 * layer
    if workload == "lora":
        added = ADAPTERS * size
        return Needs(size * each + 2 * added, 2 * added, 12 * added, activations)
    if precision == "fp32":
        return Needs(4 * size, 4 * size, 8 * size, 2 * activations)
    return Needs(2 * size, 2 * size, 12 * size, activations)


def dimensions(parameters: float) -> tuple[float, float]:
    """Width and depth of a transformer of this size: N = 12 L h² with h = 128 L."""
    depth = (parameters / (12 * 128**2)) ** (1 / 3)
    return 128 * depth, depth


def _computes_fp8(card: Accelerator) -> bool:
    """Return True for NVIDIA since Ada, AMD since CDNA 3, Gaudi 2 and 3, and TPU7x."""
    major, _, minor = (card.compute_capability or "0.0").partition(".")
    recent = (int(major), int(minor or 0)) >= (8, 9)
    return recent or card.architecture.startswith(("CDNA3", "CDNA4")) or card.name in ("Gaudi2", "Gaudi3", "TPU7x")


def _needs(card: Accelerator, nodes: int, shape: _Shape, precision: str) -> Needs:
    size = {"sequence": shape.sequence, "batch": shape.batch, "devices": nodes if shape.split else card.count * nodes}
    return needs(shape.parameters, shape.workload, precision, **size)


def _fit(card: Accelerator, nodes: int, shape: _Shape, precisions: tuple[str, ...]) -> Suggestion | None:
    """The widest of the precisions in which the model goes into so many such nodes."""
    for precision in precisions:
        if precision == "fp8" and not _computes_fp8(card):
            continue
        total = _needs(card, nodes, shape, precision)
        if total.total_gb <= card.total_memory_gb * nodes:
            label = "fp16" if precision == "bf16" and card.compute_capability in ("7.0", "7.5") else precision
            why = _why(shape, card, nodes, label, total)
            return Suggestion(card, nodes, "also", label, total, why)
    return None


def _several_nodes(shape: _Shape, precisions: tuple[str, ...]) -> list[Suggestion]:
    """Nodes of eight, as many as it takes; a node's devices share activations that are too many for one."""
    found = []
    for card in (parse(name) for name in ("H100:8", "H200:8", "B200:8")):
        narrowest = precisions[-1]
        one, two = (_needs(card, nodes, shape, narrowest).total_gb for nodes in (1, 2))
        added = two - one  # what each further node holds of its own
        if added >= card.total_memory_gb:
            continue
        if fit := _fit(card, math.ceil((one - added) / (card.total_memory_gb - added)), shape, precisions):
            found.append(fit)
    if not found and not shape.split:
        return _several_nodes(replace(shape, split=True), precisions)
    if not found:
        raise UsageError("no node holds the activations of one sequence: ask for a smaller sequence= or batch=")
    return found


def _why(shape: _Shape, card: Accelerator, nodes: int, precision: str, total: Needs) -> str:
    billions = f"{shape.parameters / 1e9:g}B"
    parts = [f"weights {total.weights_gb:.1f}"]
    parts += [f"gradients {total.gradients_gb:.1f}"] if total.gradients_gb else []
    parts += [f"optimizer {total.optimizer_gb:.1f}"] if total.optimizer_gb else []
    parts += [f"activations {total.activations_gb:.1f}"]
    have = f"{card.total_memory_gb * nodes:g} GB" + (f" in {nodes} nodes" if nodes > 1 else "")
    return f"{billions} in {precision}: {' + '.join(parts)} = {total.total_gb:.1f} GB of {have}"


def _ranked(found: list[Suggestion], better: str | None) -> list[Suggestion]:
    """The first is the minimum; the better one is the guide's, or the second where the guide is silent."""
    ranked = []
    for place, each in enumerate(found):
        is_better = str(each.accelerator) == better if better else place == 1
        role: Literal["minimum", "better", "also"] = "minimum" if place == 0 else "better" if is_better else "also"
        ranked.append(replace(each, role=role))
    return ranked

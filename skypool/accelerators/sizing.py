"""`accelerators.suggest`: the accelerators that a model of a given size needs, and how the memory adds up.

The sums below are in bytes, for N parameters of b bytes each, with sequence length s and batch size B.
Activations also depend on the width h and depth L of a transformer of that size: N = 12 L h² with h = 128 L.
That gives 33 layers of width 4211 for 7B, and 96 of width 12313 for 175B.

- inference: weights N b. Activations 0.2 N b + cache.
- lora: frozen weights N b. For each adapter parameter, 2 bytes of weights, 2 of gradients and 12 of the optimizer.
  Activations 2 s B h L + 34 s B h on each device.
- full-finetune: weights 2 N. Gradients 2 N. Optimizer (Adam) 12 N: a float32 copy and two moments.
  Activations as for lora.
- pretrain: the same as full-finetune, but activations 34 s B h L on each device.

The cache of inference holds 16-bit keys and values for B sequences of s tokens: 4 s B L w.
Here w is the smaller of h and 1024. That is 8 key-value heads of 128, as Llama 3 has in all sizes
(arXiv:2407.21783, table 3).

Sources:

- 16 bytes a parameter in mixed precision with Adam: ZeRO (arXiv:1910.02054) section 3.1. In float32 these are weights
  4, gradients 4 and optimizer 8.
- Activations of 34 s B h a layer with selective recomputation, 2 s B h with full recomputation: Korthikanti
  (arXiv:2205.05198).
- 1.2 times the weights for inference: EleutherAI, Transformer Math 101.
- Adapters have 0.5 % of the model's parameters: this is a rank of 16 to 32 in all linear layers.
- 4-bit frozen weights: QLoRA (arXiv:2305.14314), whose 65B model fits 48 GB.

The sum of a model is compared with a card's nominal memory. The card really has some 5 % more, which the driver and
fragmentation use up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from skypool.accelerators.accelerator import Accelerator
from skypool.accelerators.spelling import parse
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
"""A rule of thumb that names two accelerators for each size of model.

A row has the largest number of parameters for which it counts, the smallest accelerator worth trying, and a better
one. The rule leaves more memory for batches and contexts than the arithmetic of this module does.
"""

LADDER: tuple[str, ...] = (
    "T4", "L4", "A10G", "A100-40GB", "L40S", "A100-80GB", "H100", "L40S:2", "H200", "H100:2", "A100-80GB:2", "MI300X",
    "A100-80GB:4", "H100:4", "H200:4", "A100-80GB:8", "H100:8", "H200:8", "B200:8", "MI300X:8",
)  # fmt: skip
"""The accelerators that `suggest` tries in addition to those of the table `GUIDE`. Most clouds have them."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that one copy of a model needs on all its devices together, in GB of 10**9 bytes.

    For inference, `gradients_gb` and `optimizer_gb` are 0, and `activations_gb` includes the cache of keys and values.
    """

    weights_gb: float
    gradients_gb: float
    optimizer_gb: float
    activations_gb: float

    @property
    def total_gb(self) -> float:
        """The sum of the four parts, in GB of 10**9 bytes."""
        return self.weights_gb + self.gradients_gb + self.optimizer_gb + self.activations_gb


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One suggested accelerator for a model, with the reason for the suggestion.

    Attributes:
        accelerator: the devices of one node.
        nodes: number of nodes that together hold the model.
        role: "minimum" for the smallest suggestion, "better" for the recommended larger one, "also" for the others.
        precision: number format of the weights, such as "bf16".
        needs: memory that the model needs in that precision.
        why: a line of text that adds up the parts of `needs` and compares the sum with the devices' memory.
    """

    accelerator: Accelerator
    nodes: int
    role: Literal["minimum", "better", "also"]
    precision: str
    needs: Needs
    why: str

    @property
    def free_gb(self) -> float:
        """Return the memory that the model leaves for larger batches and longer contexts, in GB over all nodes."""
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
    """Return accelerators to rent for a model, with the calculation of the memory that the model needs.

    Accelerators with enough memory are suggested in rising order of memory. But the table `GUIDE`, a rule of thumb,
    names two accelerators for each size of model. For the workloads "inference" and "lora" without a given precision,
    these two come first, if the model fits on them. If the model fits on no single node, several nodes with 8 cards
    each are suggested.

    Args:
        parameters: number of parameters, such as 13e9 or "13B".
        workload: "inference", "lora", "full-finetune" or "pretrain".
        precision: number format of the weights. By default bf16. If that does not fit, inference and lora also try fp8
            (if the card computes in fp8), int8 and int4. They are tried only on the two accelerators of `GUIDE`, and on
            several nodes.
        sequence: tokens in one sequence.
        batch: sequences at the same time: on each device in training, over all devices in inference.
        limit: largest number of suggestions to return.

    Returns:
        The suggestions, at least one if `limit` is above 0.

    Raises:
        UsageError: an argument is invalid, for example because the precision is too coarse for training, or no node can
            hold the activations (intermediate results) of `batch` sequences.
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
    """Return a number of parameters as a float: 7e9 for "7B", "7e9" or 7e9.

    The suffixes K, M, B and T, in any case, stand for 1e3, 1e6, 1e9 and 1e12. The size of the number is not checked.
    UsageError is raised for a value that is no number, such as True.
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
    """True if the devices of a node share one set of activations, as in tensor parallelism; False for a set each."""


def _check(parameters: float, workload: str, precision: str | None, sequence: int, batch: int) -> None:
    if not 0 < parameters < 1e15:
        raise UsageError(f"parameters must be a number above 0 and below 1e15, such as 13e9, not {parameters!r}")
    if sequence < 1 or batch < 1:
        raise UsageError(f"sequence and batch must be at least 1, not sequence={sequence!r} and batch={batch!r}")
    if parameters < 1000:
        few = f"{parameters:g}"
        raise UsageError(f"{few} parameters are too few for a model; for {few} billion write {few}e9 or '{few}B'")
    if workload not in WORKLOADS:
        near = nearest(workload, WORKLOADS) or WORKLOADS
        raise UsageError(f"no workload is called {workload!r}; did you mean {' or '.join(near)}?")
    if precision is not None and precision not in BYTES:
        raise UsageError(f"no precision is called {precision!r}; choose from {', '.join(BYTES)}")
    if precision not in (None, "bf16", "fp16", "fp32") and workload not in ("inference", "lora"):
        raise UsageError(
            f"precision {precision!r} is too coarse for workload {workload!r}, which updates every weight; use "
            "bf16, fp16 or fp32"
        )


def _candidates(first: list[str], workload: str) -> list[str]:
    """Return names of accelerators to try: `first`, then those of `LADDER` with at least the memory of `first[0]`."""
    rising = sorted(LADDER, key=lambda name: (parse(name).total_memory_gb, parse(name).count))
    if first:
        floor = parse(first[0]).total_memory_gb
        return list(dict.fromkeys([*first, *(name for name in rising if parse(name).total_memory_gb >= floor)]))
    if workload != "pretrain":
        return rising
    # pretraining needs all available speed: at least 8 cards of the current generation
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
    """Return the memory that a model needs on all its devices together.

    Args:
        parameters: number of parameters.
        workload: "inference", "lora", "full-finetune" or "pretrain".
        precision: number format of the weights: "fp32", "bf16", "fp16", "fp8", "int8" or "int4".
        sequence: tokens in one sequence.
        batch: sequences at the same time: on each device in training, over all devices in inference.
        devices: number of devices. In training, each one holds activations of its own. Not used for inference.
    """
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
    """Return the usual width h and depth L (number of layers) of a transformer with N parameters, not rounded.

    The formula is N = 12 L h² with h = 128 L.
    """
    depth = (parameters / (12 * 128**2)) ** (1 / 3)
    return 128 * depth, depth


def _computes_fp8(card: Accelerator) -> bool:
    """Return True if a card computes in fp8: NVIDIA since Ada, AMD since CDNA 3, Gaudi 2 and 3, and TPU7x."""
    major, _, minor = (card.compute_capability or "0.0").partition(".")
    recent = (int(major), int(minor or 0)) >= (8, 9)
    return recent or card.architecture.startswith(("CDNA3", "CDNA4")) or card.name in ("Gaudi2", "Gaudi3", "TPU7x")


def _needs(card: Accelerator, nodes: int, shape: _Shape, precision: str) -> Needs:
    size = {"sequence": shape.sequence, "batch": shape.batch, "devices": nodes if shape.split else card.count * nodes}
    return needs(shape.parameters, shape.workload, precision, **size)


def _fit(card: Accelerator, nodes: int, shape: _Shape, precisions: tuple[str, ...]) -> Suggestion | None:
    """Return a suggestion in the first of `precisions` in which the model fits on `nodes` nodes; None if in none."""
    for precision in precisions:
        if precision == "fp8" and not _computes_fp8(card):
            continue
        total = _needs(card, nodes, shape, precision)
        if total.total_gb <= card.total_memory_gb * nodes:
            # cards of compute capability 7.0 and 7.5 lack bf16
            label = "fp16" if precision == "bf16" and card.compute_capability in ("7.0", "7.5") else precision
            why = _why(shape, card, nodes, label, total)
            return Suggestion(card, nodes, "also", label, total, why)
    return None


def _several_nodes(shape: _Shape, precisions: tuple[str, ...]) -> list[Suggestion]:
    """Return suggestions of several nodes with eight H100, H200 or B200 cards. Raise UsageError if there is none."""
    found = []
    for card in (parse(name) for name in ("H100:8", "H200:8", "B200:8")):
        narrowest = precisions[-1]
        one, two = (_needs(card, nodes, shape, narrowest).total_gb for nodes in (1, 2))
        added = two - one  # memory that each further node needs for its own activations
        if added >= card.total_memory_gb:
            continue
        if fit := _fit(card, math.ceil((one - added) / (card.total_memory_gb - added)), shape, precisions):
            found.append(fit)
    if not found and not shape.split:  # the devices of a node share the activations
        return _several_nodes(replace(shape, split=True), precisions)
    if not found:
        raise UsageError(
            "no accelerator has enough memory for the activations (intermediate results) with "
            f"sequence={shape.sequence} and batch={shape.batch}: ask for a smaller sequence= or batch="
        )
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
    """Set the roles: "minimum" for the first, "better" for the accelerator `better` (None: the second), else "also"."""
    ranked = []
    for place, each in enumerate(found):
        is_better = str(each.accelerator) == better if better else place == 1
        role: Literal["minimum", "better", "also"] = "minimum" if place == 0 else "better" if is_better else "also"
        ranked.append(replace(each, role=role))
    return ranked

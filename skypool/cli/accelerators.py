"""`skypool accelerators` (with `list` and `compare`) and `skypool suggest`. They need no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from skypool.accelerators import registry
from skypool.accelerators.accelerator import Accelerator
from skypool.accelerators.ranges import catalog, select
from skypool.accelerators.sizing import Suggestion, suggest
from skypool.accelerators.spelling import parse
from skypool.accelerators.tpu_slices import squashed
from skypool.cli import output
from skypool.errors import UsageError


def add_to(app: typer.Typer) -> None:
    """Add the commands `skypool accelerators` and `skypool suggest` to the program."""
    group = typer.Typer(help="List accelerators (`list`, which may be left out), or compare them.")
    group.command("list")(list_)
    group.command("compare")(compare)
    app.add_typer(group, name="accelerators")
    app.command("suggest")(suggest_)


def list_(
    query: Annotated[str, typer.Argument(help="Part of a name, or any spelling of a name.")] = "",
    vendor: Annotated[str | None, typer.Option(help="nvidia, amd, aws, google, intel…")] = None,
    kind: Annotated[str | None, typer.Option(help="gpu, trainium, inferentia, tpu, gaudi…")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one device: '>=80GB', '<24GB', '80GB'.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """List accelerators. `skypool accelerators` without a command does the same."""
    found = select(_matching(query), vendor=vendor, kind=kind, memory=memory)
    if as_json:
        output.data([json.loads(each.to_json()) for each in found])
    elif found:
        _show(found)
    else:
        raise UsageError("no accelerator matches all of these options; `skypool accelerators` lists all accelerators")


def _matching(query: str) -> list[Accelerator]:
    """Return the accelerators whose names contain the query. If there are none, return the one that it names."""
    own = [made for name in registry.names() if (made := registry.look_up(name))]
    every = [*catalog(), *own]
    key = squashed(query)
    if found := [each for each in every if key in squashed(str(each))]:
        return found
    return [parse(query)]


def _show(found: Sequence[Accelerator]) -> None:
    headings = ["name", "memory", "form", "vendor", "architecture", "CC", "BF16 TFLOPS", "GB/s", "TDP W"]
    rows = [
        [
            str(each),
            f"{each.memory_gb:g} GB",
            each.form_factor or "",
            each.vendor,
            each.architecture,
            each.compute_capability or "",
            *(_figure(getattr(each.metadata, field)) for field in _FIGURES),
        ]
        for each in found
    ]
    output.table(headings, rows, numbers=["memory", "CC", "BF16 TFLOPS", "GB/s", "TDP W"])


_FIGURES = ("bf16_tflops", "bandwidth_gb_per_s", "tdp_watts")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


_LINES: tuple[tuple[str, Callable[[Accelerator], str]], ...] = (
    ("vendor", lambda it: it.vendor),
    ("kind", lambda it: it.kind),
    ("runtime", lambda it: it.runtime),
    ("architecture", lambda it: it.architecture),
    ("form factor", lambda it: it.form_factor or ("any" if it.runtime == "cuda" else "–")),
    ("devices", lambda it: str(it.count)),
    ("memory, each", lambda it: f"{it.memory_gb:g} GB {it.metadata.memory_type}".strip()),
    ("memory, all", lambda it: f"{it.total_memory_gb:g} GB"),
    ("bandwidth, each", lambda it: _measure(it.metadata.bandwidth_gb_per_s, "GB/s")),
    ("BF16 dense, each", lambda it: _measure(it.metadata.bf16_tflops, "TFLOPS")),
    ("TDP, each", lambda it: _measure(it.metadata.tdp_watts, "W")),
    ("compute capability", lambda it: it.compute_capability or "–"),
    ("CUDA", lambda it: _span(it.metadata.cuda_min, it.metadata.cuda_max)),
    ("driver, at least", lambda it: f"R{it.metadata.driver_min}" if it.metadata.driver_min else "–"),
    ("partitions", lambda it: str(len(it.profiles)) if it.profiles else "–"),
    ("topology", lambda it: it.slice.topology or "–" if it.slice else "–"),
    ("TensorCores", lambda it: str(it.slice.cores) if it.slice else "–"),
    ("virtual machines", lambda it: str(it.slice.vms) if it.slice else "–"),
    ("runtime version", lambda it: it.slice.runtime_version or "–" if it.slice else "–"),
)


def _measure(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:g} {unit}"


def _span(first: str | None, last: str | None) -> str:
    return "–" if first is None else f"{first} to {last}" if last else f"from {first}"


def compare(
    names: Annotated[list[str], typer.Argument(help="Two or more accelerators: H100 MI300X TPUv6 A100:8@40GB.")],
    as_json: output.AsJson = False,
) -> None:
    """Show accelerators side by side. A fact that no source states is shown as –."""
    found = [parse(name) for name in names]
    if as_json:
        output.data([json.loads(each.to_json()) for each in found])
        return
    rows = [[label, *(read(each) for each in found)] for label, read in _LINES]
    output.table(["", *map(str, found)], [row for row in rows if set(row[1:]) != {"–"}])


def suggest_(
    parameters: Annotated[str, typer.Option(help="Size of the model: 7B, 350M, 1.5T or a number.")],
    workload: Annotated[str, typer.Option(help="inference, lora, full-finetune or pretrain.")] = "inference",
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, fp8, int8 or int4.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Suggest accelerators for a model of this size, and show how its memory adds up."""
    wanted: dict[str, Any] = {"workload": workload, "precision": precision}  # suggest() checks both
    found = suggest(parameters, **wanted)
    if as_json:
        output.data([_as_data(each) for each in found])
        return
    for each in found:
        nodes = f"{each.nodes} nodes of " if each.nodes > 1 else ""
        output.say(f"{each.role:<8}  {nodes + str(each.accelerator):<16}  {each.why}")


def _as_data(each: Suggestion) -> dict[str, object]:
    return {
        "accelerator": str(each.accelerator),
        "nodes": each.nodes,
        "role": each.role,
        "precision": each.precision,
        "weights_gb": round(each.needs.weights_gb, 3),
        "gradients_gb": round(each.needs.gradients_gb, 3),
        "optimizer_gb": round(each.needs.optimizer_gb, 3),
        "activations_gb": round(each.needs.activations_gb, 3),
        "total_gb": round(each.needs.total_gb, 3),
        "free_gb": round(each.free_gb, 3),
        "why": each.why,
    }

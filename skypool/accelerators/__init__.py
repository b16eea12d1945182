"""Catalogue of accelerators: what each one is, how much memory it has, and all spellings of its name.

    from skypool import accelerators
    accelerators.H100(memory="80GB", form_factor="SXM", count=8)
    accelerators.A100.partition_2g_10gb
    accelerators.TPU("v5e", topology="4x4")
    accelerators.parse("nvidia-tesla-a100")
    accelerators.any(memory=">=40GB", vendor="nvidia", capability=">=8.0")

Each name is created at its first use, so importing this package is cheap.

- `accelerator`: `Accelerator`, the value that stands for one kind of hardware and its count.
- `factories`: the factories `H100(...)`, `A100.partition_...`; `tpu_slices`: `TPU` and `CPU`.
- `facts`: memory, vendor, form factors and partitions as values; `partitions`: which MIG partitions fit on a card.
- `spelling`: parser for names as users, tools and clouds write them; `similarity`: suggestions for misspelt names.
- `ranges`: `any` and `catalog`; `sizing`: `suggest`, the hardware that a machine-learning model of a given size needs.
- `registry`: hardware that is not in the catalogue; `tables`: loader of the catalogue's data files.

Words of this package:

- device: a whole card, a partition of a card, or a chip.
- profile: a kind of partition, such as NVIDIA's "2g.10gb", or "1of4" for a quarter of a card.
- TPU slice: a number of TPU chips that are wired together and sold as one unit, such as "v5p-8".
- form factor: how a device is built, such as "SXM" or "PCIe".
- variant: a model with one memory size in one form factor.
- spelling: a text that names an accelerator, such as "8x H100". A spelling is squashed if it is in lower case, without
  spaces, tabs, dashes, underscores and dots.
- dialect: a source of names, such as a cloud or a tool. "aws-type", for example, has AWS's names of machine types.
- alias: another name of an accelerator, such as a cloud's.
- Flyte: a workflow tool, whose constants are accepted as names.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators.accelerator import Accelerator as Accelerator
    from skypool.accelerators.datacenter import *  # noqa: F403 - some 300 factories, listed in each __all__
    from skypool.accelerators.desktop import *  # noqa: F403
    from skypool.accelerators.facts import Metadata as Metadata
    from skypool.accelerators.facts import Partition as Partition
    from skypool.accelerators.facts import Slice as Slice
    from skypool.accelerators.others import *  # noqa: F403
    from skypool.accelerators.ranges import any as any
    from skypool.accelerators.ranges import catalog as catalog
    from skypool.accelerators.registry import Custom as Custom
    from skypool.accelerators.registry import register as register
    from skypool.accelerators.registry import unregister as unregister
    from skypool.accelerators.sizing import Suggestion as Suggestion
    from skypool.accelerators.sizing import suggest as suggest
    from skypool.accelerators.spelling import parse as parse
    from skypool.accelerators.spelling import parse_all as parse_all
    from skypool.accelerators.tpu import *  # noqa: F403
    from skypool.accelerators.tpu_slices import CPU as CPU
    from skypool.accelerators.tpu_slices import TPU as TPU

_WHERE = {
    "Accelerator": "accelerator",
    "CPU": "tpu_slices",
    "Custom": "registry",
    "Metadata": "facts",
    "Partition": "facts",
    "Slice": "facts",
    "Suggestion": "sizing",
    "TPU": "tpu_slices",
    "any": "ranges",
    "catalog": "ranges",
    "parse": "spelling",
    "parse_all": "spelling",
    "register": "registry",
    "suggest": "sizing",
    "unregister": "registry",
}


if not TYPE_CHECKING:  # type checkers must see only the names above

    def __getattr__(name: str) -> object:
        found = _named(name)
        if found is None:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; `skypool accelerators` lists the models that it has",
                name=name,
                obj=sys.modules[__name__],
            )
        globals()[name] = found
        return found


def _named(name: str) -> object:
    if module := _WHERE.get(name):
        from importlib import import_module

        found: object = getattr(import_module(f"{__name__}.{module}"), name)
        return found
    if name == "__all__":
        return __dir__()
    if not name[:1].isupper():  # a submodule: Python looks here first, then for the file
        return None
    from skypool.accelerators.factories import factory

    return factory(name)


def __dir__() -> list[str]:
    from skypool.accelerators.factories import factories

    public = [name for name in globals() if not name.startswith("_") and name not in ("annotations", "sys")]
    return sorted({*public, *_WHERE, *factories()} - {"TYPE_CHECKING"})

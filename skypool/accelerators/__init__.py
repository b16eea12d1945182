"""One name for every piece of hardware: what it is, how much memory it has, how it is spelled.

    from skypool import accelerators
    accelerators.H100(memory="80GB", form_factor="SXM", count=8)
    accelerators.A100.partition_2g_10gb
    accelerators.TPU("v5e", topology="4x4")
    accelerators.parse("nvidia-tesla-a100")
    accelerators.any(memory=">=40GB", vendor="nvidia", capability=">=8.0")

The factories are here at once; everything else is imported at its first use, so this import is cheap.
"""

from __future__ import annotations

import sys

from skypool.accelerators.datacenter import *  # noqa: F403 - some 300 factories, listed in each __all__
from skypool.accelerators.desktop import *  # noqa: F403
from skypool.accelerators.others import *  # noqa: F403
from skypool.accelerators.tpu import *  # noqa: F403

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators.facts import Metadata as Metadata
    from skypool.accelerators.facts import Partition as Partition
    from skypool.accelerators.facts import Slice as Slice
    from skypool.accelerators.ranges import any as any
    from skypool.accelerators.ranges import catalog as catalog
    from skypool.accelerators.registry import Custom as Custom
    from skypool.accelerators.registry import register as register
    from skypool.accelerators.registry import unregister as unregister
    from skypool.accelerators.sizing import Suggestion as Suggestion
    from skypool.accelerators.sizing import suggest as suggest
    from skypool.accelerators.slicing import CPU as CPU
    from skypool.accelerators.slicing import TPU as TPU
    from skypool.accelerators.spelling import parse as parse
    from skypool.accelerators.spelling import parse_all as parse_all
    from skypool.accelerators.value import Accelerator as Accelerator

_WHERE = {
    "Accelerator": "value",
    "CPU": "slicing",
    "Custom": "registry",
    "Metadata": "facts",
    "Partition": "facts",
    "Slice": "facts",
    "Suggestion": "sizing",
    "TPU": "slicing",
    "any": "ranges",
    "catalog": "ranges",
    "parse": "spelling",
    "parse_all": "spelling",
    "register": "registry",
    "suggest": "sizing",
    "unregister": "registry",
}


if not TYPE_CHECKING:  # a checker must see the names above and no others

    def __getattr__(name: str) -> object:
        if (module := _WHERE.get(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        from importlib import import_module

        found: object = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})

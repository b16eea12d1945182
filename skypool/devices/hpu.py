"""Intel Gaudi cards: the family `Hpu`, and a parser for the output of Intel's tool `hl-smi`, which lists the cards."""

from __future__ import annotations

from collections.abc import Sequence

from skypool.devices.device import Device, Family, Stats, index_of
from skypool.devices.tools import ask, number, shown, table, whole

_FORMAT = ["-f", "csv,noheader,nounits"]
_FACTS = "index,name,uuid,module_id,memory.total"
_STATE = "memory.used,memory.total,utilization.aip,temperature.aip,power.draw"


class Hpu(Family):
    """Intel Gaudi cards of this machine: detection, state, and variables that make chosen cards visible to processes.

    `detect` leaves out cards that the environment variable `HABANA_VISIBLE_MODULES` hides. `Device.pin` is the module
    id of a card, because the index of a card can change after a restart.
    """

    kind = "hpu"

    def detect(self) -> tuple[Device, ...]:
        found = read_hl_smi(ask(["hl-smi", "-Q", _FACTS, *_FORMAT]))
        return shown("HABANA_VISIBLE_MODULES", found, lambda device: (device.pin,), ordered=False)

    def get_device_stats(self, device: Device | int) -> Stats:
        rows = table(ask(["hl-smi", "-Q", f"index,{_STATE}", *_FORMAT]))
        row = next((row for row in rows if whole(row[0]) == index_of(device)), None)
        return Stats(*(number(cell) for cell in row[1:])) if row and len(row) == 6 else Stats()

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        return {"HABANA_VISIBLE_MODULES": ",".join(pins)}


def read_hl_smi(text: str | None) -> tuple[Device, ...]:
    """Return the devices in the output of `hl-smi -Q index,name,uuid,module_id,memory.total -f csv,noheader,nounits`.

    The devices are sorted by index. Lines that do not have five columns are left out.
    """
    found = []
    for row in table(text):
        index = whole(row[0])
        if len(row) == 5 and index is not None:
            found.append(Device("hpu", index, row[1], whole(row[4]), pin=row[3], uuid=row[2]))
    return tuple(sorted(found, key=lambda device: device.index))

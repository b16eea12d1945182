"""Ask for a Dask cluster on machines with different versions of Dask; print as JSON how that is refused.

python dask_refused.py SETTINGS
"""

from __future__ import annotations

import json
import sys
from typing import Any

import skypool as sky


def main(settings: dict[str, Any]) -> None:
    hosts = [sky.Host(address, host_key=key) for address, key in settings["machines"]]
    driver = sky.SSH(hosts=hosts, user="root", identity=settings["identity"], python=settings["python"])
    shown: dict[str, Any] = {"refused": ""}
    with sky.ComputePool(driver, nodes=len(hosts), slots=1, name="versions", console="off") as pool:
        try:
            sky.dask.cluster(pool)
        except sky.UsageError as e:
            shown["refused"] = str(e)
        shown["services"] = [each.name for each in pool.services]
    print(f"\n{json.dumps({'shown': shown})}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

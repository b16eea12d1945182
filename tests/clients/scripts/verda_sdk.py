"""Verda's own SDK, led to the lab by its documented argument base_url."""

import os

from report import Report
from verda import VerdaClient

address = os.environ["VERDA_BASE_URL"]


def client(secret):
    """Return the SDK's client of the lab."""
    return VerdaClient(os.environ["VERDA_CLIENT_ID"], secret, base_url=address)


def plain(thing):
    """Return what an object of the SDK holds."""
    return {name.lstrip("_"): value for name, value in vars(thing).items()}


with Report() as report:
    verda = client(os.environ["VERDA_CLIENT_SECRET"])
    balance = report.call("get", verda.balance.get)
    types = report.call("list", verda.instance_types.get)
    images = report.call("list", verda.images.get)
    report.show(
        balance=[balance.amount, balance.currency],
        types=[[each.instance_type, each.price_per_hour, each.spot_price_per_hour] for each in types],
        images=[each.image_type for each in images],
        locations=[each["code"] for each in report.call("list", verda.locations.get)],
        availabilities=report.call("list", verda.instances.get_availabilities),
        available=report.call("get", verda.instances.is_available, "1V100.6V", location_code="FIN-01"),
        volume_types=[each.type for each in report.call("list", verda.volume_types.get)],
    )

    key = report.call("create", verda.ssh_keys.create, "mine", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA me")
    script = report.call("create", verda.startup_scripts.create, "mine", "#!/bin/sh\necho hello\n")
    keys = report.call("list", verda.ssh_keys.get)
    scripts = report.call("list", verda.startup_scripts.get)
    report.show(keys=[plain(each) for each in keys], scripts=[plain(each) for each in scripts], key=plain(key))

    order = {"instance_type": "1V100.6V", "image": "ubuntu-24.04-cuda-12.8-open-docker", "hostname": "first"}
    more = {"ssh_key_ids": [key.id], "startup_script_id": script.id, "location": "FIN-01", "description": "a test"}
    # It waits until the instance leaves the state "ordered".
    made = report.call("create", verda.instances.create, **order, **more)
    found = report.call("get", verda.instances.get_by_id, made.id)
    listed = report.call("list", verda.instances.get)
    volumes = report.call("list", verda.volumes.get)
    report.show(
        made=plain(made), found=plain(found), listed=[each.id for each in listed], volumes=[each.id for each in volumes]
    )
    volume = report.call("create", verda.volumes.create, "NVMe", "data", 50, location="FIN-01")
    report.call("tag", verda.volumes.rename, volume.id, "renamed")
    report.show(renamed=report.call("get", verda.volumes.get_by_id, volume.id).name)

    report.refused("no stock", verda.instances.create, **{**order, "instance_type": "1H100.80S.32V"}, **more)
    report.refused("bad id", verda.instances.get_by_id, "00000000-0000-4000-8000-000000000000")
    report.refused("bad id", verda.instances.action, "00000000-0000-4000-8000-000000000000", "delete")
    report.refused("bad key", client, "wrong", as_="VerdaClient")

    constants = verda.constants.instance_actions
    for _ in range(200):
        found = verda.instances.get_by_id(made.id)
        if found.status == "running":
            break
    report.show(running=plain(found))
    report.call(
        "end",
        verda.instances.action,
        made.id,
        constants.DELETE,
        volume_ids=[made.os_volume_id],
        delete_permanently=True,
    )
    report.call("end", verda.volumes.delete, volume.id, is_permanent=True)
    report.call("end", verda.ssh_keys.delete, [key.id])
    report.call("end", verda.startup_scripts.delete, [script.id])

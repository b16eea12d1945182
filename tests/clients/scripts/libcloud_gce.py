"""Apache Libcloud's driver for Compute Engine, led to the lab by host and port of its connection.

The driver passes its own arguments host and port on at the wrong place, so a subclass of its connection has them.
It logs in at a fixed address, but first reads the file in which it keeps its token. So the file has one beforehand.
"""

import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from libcloud.common.google import GoogleAuthType
from libcloud.compute.drivers.gce import GCEConnection, GCENodeDriver
from libcloud.compute.types import NodeState
from report import Report

project, zone, kind, sold_out, token, wrong = sys.argv[1:]
at = urlsplit(os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"])


class LabConnection(GCEConnection):
    """The driver's connection, to the lab."""

    poll_interval = 0.1

    def __init__(self, *args, **options):
        super().__init__(*args, **{**options, "host": at.hostname, "port": at.port})


def driver(shown):
    """Return the driver for the lab, with a token that is good for an hour."""
    file = Path.home() / f"token-{shown}"
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    file.write_text(json.dumps({"access_token": shown, "token_type": "Bearer", "expire_time": until}))
    kind_of_login = {"auth_type": GoogleAuthType.IA, "credential_file": str(file)}
    GCENodeDriver.connectionCls = LabConnection
    return GCENodeDriver("me", "secret", datacenter=zone, project=project, secure=False, **kind_of_login)


with Report() as report:
    gce = driver(token)
    zones = report.call("list", gce.ex_list_zones)
    regions = report.call("list", gce.ex_list_regions)
    report.show(zones=[each.name for each in zones], regions=[each.name for each in regions])
    sizes = report.call("list", gce.list_sizes, location=zone)
    report.show(sizes=[[each.name, each.extra["guestCpus"], each.ram] for each in sizes])
    images = report.call("list", gce.list_images, ex_project="ubuntu-os-cloud")
    report.show(images=[[each.name, each.extra["family"]] for each in images])
    networks = report.call("list", gce.ex_list_networks)
    report.show(networks=[each.name for each in networks])
    image = report.call("get", gce.ex_get_image_from_family, "ubuntu-2404-lts-amd64", ["ubuntu-os-cloud"])
    report.show(image=image.name)

    report.call(
        "create", gce.ex_create_firewall, "mine", [{"IPProtocol": "tcp", "ports": ["22"]}],
        source_ranges=["192.0.2.0/24"],
    )  # fmt: skip
    script = {"startup-script": "#!/bin/sh\necho hello\n"}
    report.call("create", gce.create_node, "first", kind, image, location=zone, ex_metadata=script)
    node = report.call("get", gce.ex_get_node, "first", zone)
    report.show(tagged=report.call("tag", gce.ex_set_node_labels, node, {"owner": "somebody"}))
    node = gce.ex_get_node("first", zone)
    items = [*node.extra["metadata"]["items"], {"key": "note", "value": "mine"}]
    report.show(noted=report.call("tag", gce.ex_set_node_metadata, node, items))
    report.show(
        nodes=[
            {
                "name": each.name, "id": each.id, "status": each.extra["status"], "labels": each.extra["labels"],
                "zone": each.extra["zone"].name, "type": each.size, "private": each.private_ips[0],
                "public": each.public_ips[0],
                "metadata": {item["key"]: item["value"] for item in each.extra["metadata"]["items"]},
            }
            for each in report.call("list", gce.list_nodes)
        ],
        disks=[[each.name, each.size] for each in report.call("list", gce.list_volumes, ex_zone=zone)],
        firewalls=[each.name for each in report.call("list", gce.ex_list_firewalls)],
    )  # fmt: skip
    for _ in range(600):
        log = report.call("log", gce.ex_get_serial_output, node)
        if "hello" in log:
            break
        time.sleep(0.1)
    report.show(log=log)

    # Machines with accelerators cannot migrate.
    report.refused(
        "no stock", gce.create_node, "none", sold_out, image, location=zone, ex_on_host_maintenance="TERMINATE"
    )
    report.refused("bad id", gce.ex_get_node, "nobody", zone)
    report.refused("bad key", driver, wrong, as_="GCENodeDriver.__init__")

    report.show(destroyed=report.call("end", gce.destroy_node, node))
    report.show(rule_gone=report.call("end", gce.ex_destroy_firewall, gce.ex_get_firewall("mine")))
    report.show(left=[each.name for each in gce.list_nodes() if each.state != NodeState.TERMINATED])

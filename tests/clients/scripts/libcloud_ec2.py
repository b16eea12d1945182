"""Apache Libcloud's driver for EC2, led to the lab by its documented arguments host, port and secure."""

import os
import sys
import time
from urllib.parse import urlsplit

from libcloud.compute.base import Node
from libcloud.compute.providers import get_driver
from libcloud.compute.types import NodeState, Provider
from report import Report

image, sold_out, wrong = sys.argv[1:]
at = urlsplit(os.environ["AWS_ENDPOINT_URL"])


def driver(key):
    """Return the driver of a region, for the lab."""
    secret, address = os.environ["AWS_SECRET_ACCESS_KEY"], {"host": at.hostname, "port": at.port, "secure": False}
    # Newer regions take no other signatures than those of version 4; the driver's default in older ones is version 2.
    return get_driver(Provider.EC2)(key, secret, region="us-east-1", signature_version="4", **address)


def wait(node, is_so):
    """Return the node once a condition holds for it."""
    for _ in range(600):
        (found,) = report.call("get", ec2.list_nodes, ex_node_ids=[node.id])
        if is_so(found):
            return found
        time.sleep(0.05)
    raise TimeoutError(f"{found} is still in state {found.state}")


with Report() as report:
    ec2 = driver(os.environ["AWS_ACCESS_KEY_ID"])
    locations = report.call("list", ec2.list_locations)
    regions = report.call("list", ec2.list_regions)
    report.show(zones=[each.availability_zone.name for each in locations], regions=regions)
    sizes = report.call("list", ec2.list_sizes)
    images = report.call("list", ec2.list_images)
    report.show(sizes=len(sizes), images={each.id: each.name for each in images})
    types = report.call("list", ec2.ex_list_networks)
    report.show(networks={each.id: each.cidr_block for each in types})
    subnets = report.call("list", ec2.ex_list_subnets)
    report.show(subnets={each.id: each.extra["zone"] for each in subnets})

    pair = report.call("create", ec2.create_key_pair, "mine")
    keys = report.call("list", ec2.list_key_pairs)
    report.show(made_key=pair.fingerprint, keys={each.name: each.fingerprint for each in keys})
    group = report.call("create", ec2.ex_create_security_group, "mine", "ssh")["group_id"]
    report.call("create", ec2.ex_authorize_security_group_ingress, group, 22, 22, cidr_ips=["192.0.2.0/24"])
    report.show(
        group_names=report.call("list", ec2.ex_list_security_groups),
        groups={each.name: each.id for each in report.call("list", ec2.ex_get_security_groups)},
    )

    size = next(each for each in sizes if each.id == "t3.micro")
    told = next(each for each in images if each.id == image)
    options = {"ex_keyname": "mine", "ex_security_groups": ["mine"], "ex_userdata": "#!/bin/sh\necho hello\n"}
    node = report.call("create", ec2.create_node, name="first", size=size, image=told, location=locations[0], **options)
    node = wait(node, lambda now: now.state == NodeState.RUNNING and now.public_ips)
    report.call("tag", ec2.ex_create_tags, node, {"owner": "somebody"})
    tags = report.call("tag", ec2.ex_describe_tags, node)
    nodes = report.call("list", ec2.list_nodes)
    for _ in range(600):
        log = report.call("log", ec2.ex_get_console_output, node)
        if log["output"] and "hello" in log["output"]:
            break
        time.sleep(0.1)
    report.show(
        tags=tags,
        log=log["output"],
        nodes=[
            {
                "id": each.id, "name": each.name, "state": each.extra["status"], "public": each.public_ips,
                "private": each.private_ips, "type": each.extra["instance_type"], "zone": each.extra["availability"],
                "image": each.extra["image_id"], "key": each.extra["key_name"], "tags": each.extra["tags"],
                "groups": sorted(group["group_id"] for group in each.extra["groups"]),
            }
            for each in nodes
        ],
        volumes=[[each.id, each.size, each.extra["instance_id"]] for each in report.call("list", ec2.list_volumes)],
    )  # fmt: skip

    scarce = next(each for each in sizes if each.id == sold_out)
    report.refused("no stock", ec2.create_node, name="none", size=scarce, image=told)
    report.refused("bad id", ec2.destroy_node, Node("i-0123456789abcdef0", "none", NodeState.RUNNING, [], [], ec2))
    report.refused("bad key", driver(wrong).list_nodes)

    report.show(destroyed=report.call("end", ec2.destroy_node, node))
    wait(node, lambda now: now.state == NodeState.TERMINATED)
    report.show(
        group_gone=report.call("end", ec2.ex_delete_security_group_by_id, group),
        key_gone=report.call("end", ec2.delete_key_pair, pair),
    )

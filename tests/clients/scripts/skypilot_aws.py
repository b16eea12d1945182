"""SkyPilot's provisioner for AWS, called as its own backend calls it: bootstrap, run, wait, query, open ports, end."""

import contextlib
import sys
import time

from report import Report

with contextlib.redirect_stdout(sys.stderr):  # its log goes to what is stdout when it is imported
    from sky.adaptors import aws
    from sky.provision import common
    from sky.provision.aws import config as aws_config
    from sky.provision.aws import instance
    from sky.utils import status_lib

image, sold_out, wrong = sys.argv[1:]
REGION, ZONE = "us-east-1", "us-east-1a"
NAME = "mine-0123"
provider = {
    "region": REGION,
    "availability_zone": ZONE,
    "use_internal_ips": False,
    "security_group": {"GroupName": "mine-sg"},
}


def asked(kind, count=1):
    """Return the order of a cluster, as SkyPilot's template for AWS makes it."""
    node = {
        "InstanceType": kind,
        "ImageId": image,
        "KeyName": "mine",
        "UserData": "#!/bin/sh\necho hello\n",
        "IamInstanceProfile": {},
    }
    return common.ProvisionConfig(
        provider_config=dict(provider),
        authentication_config={"ssh_user": "ubuntu"},
        docker_config={},
        node_config=node,
        count=count,
        tags={"owner": "somebody"},
        resume_stopped_nodes=True,
        ports_to_open_on_launch=None,
    )


def states(**more):
    """Return the instances of the cluster with their states, as SkyPilot sees them."""
    found = report.call("list", instance.query_instances, "mine", NAME, provider, **more)
    return {id: state.value if state else None for id, (state, _) in found.items()}


with Report() as report:
    ec2 = aws.client("ec2", region_name=REGION)
    ec2.create_key_pair(KeyName="mine")
    ready = report.call("create", aws_config.bootstrap_instances, REGION, "mine", asked("t3.micro", 2))
    record = report.call("create", instance.run_instances, REGION, "mine", NAME, ready)
    report.call("get", instance.wait_instances, REGION, NAME, status_lib.ClusterStatus.UP)
    report.call("create", instance.open_ports, NAME, ["8265"], provider)
    found = report.call("get", instance.get_cluster_info, REGION, NAME, provider)
    report.show(
        made=record.created_instance_ids,
        head=record.head_instance_id,
        zone=record.zone,
        states=states(),
        nodes={
            id: {"private": one.internal_ip, "public": one.external_ip, "tags": one.tags}
            for id, (one,) in found.instances.items()
        },
        head_of_info=found.head_instance_id,
        groups=[each["GroupName"] for each in ec2.describe_security_groups()["SecurityGroups"]],
    )

    gone = {**provider, "security_group": {"GroupName": "nobody-sg"}}
    report.refused("bad id", instance.open_ports, "nobody-4567", ["80"], gone)
    scarce = aws_config.bootstrap_instances(REGION, "scarce", asked(sold_out))
    report.refused("no stock", instance.run_instances, REGION, "scarce", "scarce-89ab", scarce)

    report.call("end", instance.terminate_instances, NAME, provider)
    for _ in range(600):
        if not states():
            break
        time.sleep(0.1)
    report.call("end", instance.cleanup_ports, NAME, ["8265"], provider)
    groups = ec2.describe_security_groups()["SecurityGroups"]
    report.show(left=states(), groups_left=[each["GroupName"] for each in groups])

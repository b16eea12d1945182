"""boto3 as its documentation shows it: key pairs, groups, run, waiters, paginators, spot, tags, console, terminate.

See https://boto3.amazonaws.com/v1/documentation/api/latest/guide/ec2-examples.html (read 2026-11-24).
"""

import sys

import boto3
from report import Report

image, sold_out, wrong = sys.argv[1:]

with Report() as report:
    ec2 = boto3.client("ec2", region_name="us-east-1")
    regions = report.call("list", ec2.describe_regions)["Regions"]
    zones = report.call("list", ec2.describe_availability_zones)["AvailabilityZones"]
    pages = report.call(
        "list", ec2.get_paginator("describe_instance_types").paginate, as_="EC2.Paginator.DescribeInstanceTypes"
    )
    types = [each["InstanceType"] for page in pages for each in page["InstanceTypes"]]
    report.show(
        regions=[each["RegionName"] for each in regions], zones=[each["ZoneName"] for each in zones], types=types
    )

    pair = report.call("create", ec2.create_key_pair, KeyName="mine")
    vpc = report.call("list", ec2.describe_vpcs)["Vpcs"][0]["VpcId"]
    group = report.call("create", ec2.create_security_group, GroupName="web", Description="ssh and web", VpcId=vpc)[
        "GroupId"
    ]
    report.call(
        "create",
        ec2.authorize_security_group_ingress,
        GroupId=group,
        IpPermissions=[
            {"IpProtocol": "tcp", "FromPort": 80, "ToPort": 80, "IpRanges": [{"CidrIp": "192.0.2.0/24"}]},
            {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.0/24"}]},
        ],
    )
    groups = report.call("list", ec2.describe_security_groups, GroupIds=[group])["SecurityGroups"]
    report.show(ports=sorted(each["FromPort"] for each in groups[0]["IpPermissions"]), key=pair["KeyName"])

    resource = boto3.resource("ec2", region_name="us-east-1")
    order = {"ImageId": image, "InstanceType": "t3.micro", "MinCount": 1, "MaxCount": 2, "KeyName": pair["KeyName"]}
    made = report.call(
        "create", resource.create_instances, **order, SecurityGroupIds=[group], as_="ServiceResource.create_instances"
    )
    ids = [each.id for each in made]
    report.call("get", ec2.get_waiter("instance_running").wait, InstanceIds=ids, as_="EC2.Waiter.InstanceRunning")
    first = made[0]
    report.call("get", first.reload, as_="Instance.reload")
    report.show(ids=ids, state=first.state["Name"], type=first.instance_type, address=first.public_ip_address)
    report.call("tag", first.create_tags, Tags=[{"Key": "Name", "Value": "first"}], as_="Instance.create_tags")
    named = [{"Name": "tag:Name", "Values": ["first"]}]
    found = report.call("list", resource.instances.filter, Filters=named, as_="ServiceResource.instances.filter")
    report.show(named=[each.id for each in found])
    pages = report.call(
        "list",
        ec2.get_paginator("describe_instances").paginate,
        PaginationConfig={"PageSize": 5},
        as_="EC2.Paginator.DescribeInstances",
    )
    report.show(listed=[i["InstanceId"] for page in pages for r in page["Reservations"] for i in r["Instances"]])
    report.call("log", first.console_output, Latest=True, as_="Instance.console_output")

    spot = {
        **order,
        "MaxCount": 1,
        "InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}},
    }
    (bought,) = report.call("create", ec2.run_instances, **spot)["Instances"]
    requests = report.call(
        "get", ec2.describe_spot_instance_requests, SpotInstanceRequestIds=[bought["SpotInstanceRequestId"]]
    )
    report.show(
        lifecycle=bought["InstanceLifecycle"],
        spot=requests["SpotInstanceRequests"][0]["InstanceId"] == bought["InstanceId"],
    )
    history = report.call(
        "list",
        ec2.describe_spot_price_history,
        InstanceTypes=["g5.xlarge"],
        ProductDescriptions=["Linux/UNIX"],
        MaxResults=10,
    )
    report.show(prices=[[each["AvailabilityZone"], each["SpotPrice"]] for each in history["SpotPriceHistory"]])

    report.refused("no stock", ec2.run_instances, ImageId=image, InstanceType=sold_out, MinCount=1, MaxCount=1)
    report.refused("bad id", ec2.describe_instances, InstanceIds=["i-0123456789abcdef0"])
    report.refused("bad id", ec2.terminate_instances, InstanceIds=["i-0123456789abcdef0"])
    stranger = boto3.client("ec2", region_name="us-east-1", aws_access_key_id=wrong, aws_secret_access_key="nothing")
    report.refused("bad key", stranger.describe_instances)

    ids.append(bought["InstanceId"])
    report.call("end", ec2.terminate_instances, InstanceIds=ids)
    report.call("end", ec2.get_waiter("instance_terminated").wait, InstanceIds=ids, as_="EC2.Waiter.InstanceTerminated")
    report.call("end", ec2.delete_security_group, GroupId=group)
    report.call("end", ec2.delete_key_pair, KeyName=pair["KeyName"])

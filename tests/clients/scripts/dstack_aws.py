"""dstack's backend for AWS, called as its server calls it: offers, create, update, terminate.

Its catalogue of prices comes from a server of this process, at the address that gpuhunt's GPUHUNT_CATALOG_URL names.
"""

import csv
import http.server
import io
import os
import sys
import threading
import time
import zipfile

from report import Report

image, sold_out, wrong = sys.argv[1:]
REGION = "us-east-1"
FIELDS = ["instance_name", "location", "price", "cpu", "memory", "gpu_count", "gpu_name", "gpu_memory", "gpu_vendor",
          "spot", "disk_size", "flags", "provider_data"]  # fmt: skip
TYPES = [
    ["t3.small", REGION, "0.0208", "2", "2", "0", "", "", "", "False", "", "", ""],
    ["g5.xlarge", REGION, "1.006", "4", "16", "1", "A10G", "24", "nvidia", "False", "", "", ""],
    [sold_out, REGION, "32.77", "96", "1152", "8", "A100", "40", "nvidia", "False", "", "", ""],
]


class Catalog(http.server.BaseHTTPRequestHandler):
    """gpuhunt's catalogue: the types of AWS, and nothing of the other providers."""

    def do_GET(self):
        """Answer with a version, or with the zip of a provider."""
        provider = self.path.split("/")[1]
        body = b"1"
        if self.path.endswith("catalog.zip"):
            rows, packed = io.StringIO(), io.BytesIO()
            csv.writer(rows).writerows([FIELDS, *(TYPES if provider == "aws" else [])])
            with zipfile.ZipFile(packed, "w") as file:
                file.writestr(f"{provider}.csv", rows.getvalue())
            body = packed.getvalue()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *about):
        """Say nothing."""


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Catalog)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["GPUHUNT_CATALOG_URL"] = f"http://127.0.0.1:{server.server_port}"

with Report() as report:
    import boto3
    from dstack._internal.core.backends.aws.compute import AWSCompute
    from dstack._internal.core.backends.aws.models import (
        AWSAccessKeyCreds,
        AWSConfig,
        AWSDefaultCreds,
        AWSOSImage,
        AWSOSImageConfig,
    )
    from dstack._internal.core.models.instances import InstanceConfiguration, SSHKey

    (found,) = boto3.client("ec2", region_name=REGION).describe_images(ImageIds=[image])["Images"]
    own = AWSOSImage(name=found["Name"], owner=found["OwnerId"], user="ubuntu")
    images = AWSOSImageConfig(cpu=own, nvidia=own)
    aws = AWSCompute(AWSConfig(regions=[REGION], creds=AWSDefaultCreds(), os_images=images))
    offers = report.call("list", aws.get_all_offers_with_availability, True)
    report.show(
        offers={
            each.instance.name: [each.price, sorted(each.availability_zones), each.availability.value]
            for each in offers
        }
    )
    by_name = {each.instance.name: each for each in offers}

    def config(name):
        """Return what dstack's server asks for."""
        keys = [SSHKey(public="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA me")]
        return InstanceConfiguration(
            project_name="mine", instance_name=name, user="me", ssh_keys=keys, tags={"owner": "somebody"}
        )

    made = report.call("create", aws.create_instance, by_name["t3.small"], config("first"), None)
    for _ in range(600):
        report.call("get", aws.update_provisioning_data, made, "", "")
        if made.hostname:
            break
        time.sleep(0.1)
    report.show(id=made.instance_id, hostname=made.hostname, private=made.internal_ip, region=made.region)
    report.refused("no stock", aws.create_instance, by_name[sold_out], config("none"), None)
    thief = AWSAccessKeyCreds(access_key=wrong, secret_key="x" * 40)
    stranger = AWSCompute(AWSConfig(regions=[REGION], creds=thief, os_images=images))
    report.refused("bad key", stranger.terminate_instance, made.instance_id, REGION)
    report.refused("bad id", aws.terminate_instance, "nobody", REGION)
    report.call("end", aws.terminate_instance, made.instance_id, REGION)
    report.show(again=report.call("end", aws.terminate_instance, made.instance_id, REGION))

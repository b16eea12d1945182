"""SkyPilot's provisioner for AWS with a key that nobody has: it is refused with AWS's own words."""

import contextlib
import sys

from report import Report

with contextlib.redirect_stdout(sys.stderr):  # its log goes to what is stdout when it is imported
    from sky.provision.aws import instance

with Report() as report:
    report.refused("bad key", instance.query_instances, "mine", "mine-0123", {"region": "us-east-1"})

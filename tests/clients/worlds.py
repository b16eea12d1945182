"""The labs as the clients find them: with one type that is sold out, and one key that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.aws import AWS
from tests.lab.aws_facts import IMAGES
from tests.lab.gce import GCE
from tests.lab.machines import Lab

WRONG_KEY = "AKIAWRONGWRONGWRONG1"
SOLD_OUT = "p4d.24xlarge"
WRONG_TOKEN = "bad"
"""A token that nobody has at Google."""
GCE_KIND = "e2-standard-2"
GCE_SOLD_OUT = "a2-highgpu-1g"
TPU_SOLD_OUT = "v5p-32"


@contextmanager
def aws(lab: Lab) -> Iterator[AWS]:
    """An account at AWS, in which WRONG_KEY is nobody's key and SOLD_OUT is sold out."""
    with AWS(lab) as world:
        world.capacity(0, SOLD_OUT)
        world.fail("*", "AuthFailure", times=None, service="ec2", when=lambda call: call.key == WRONG_KEY)
        yield world


@contextmanager
def gce(lab: Lab) -> Iterator[GCE]:
    """A project at Google Cloud in which GCE_SOLD_OUT is sold out."""
    with GCE(lab) as world:
        world.capacity(0, GCE_SOLD_OUT)
        yield world


def ubuntu(world: AWS, region: str = "us-east-1") -> str:
    """The id of a plain Ubuntu AMI."""
    return next(image.id(region) for image in IMAGES.values() if image.look == "ubuntu")

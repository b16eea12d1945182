"""The labs as the clients find them: with one type that is sold out, and one key that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.aws import AWS
from tests.lab.aws_facts import IMAGES
from tests.lab.machines import Lab

WRONG_KEY = "AKIAWRONGWRONGWRONG1"
SOLD_OUT = "p4d.24xlarge"


@contextmanager
def aws(lab: Lab) -> Iterator[AWS]:
    """An account at AWS, in which WRONG_KEY is nobody's key and SOLD_OUT is sold out."""
    with AWS(lab) as world:
        world.capacity(0, SOLD_OUT)
        world.fail("*", "AuthFailure", times=None, service="ec2", when=lambda call: call.key == WRONG_KEY)
        yield world


def ubuntu(world: AWS, region: str = "us-east-1") -> str:
    """The id of a plain Ubuntu AMI."""
    return next(image.id(region) for image in IMAGES.values() if image.look == "ubuntu")

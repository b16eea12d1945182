"""What the lab's AWS made just now, and does not know everywhere yet.

The real one is eventually consistent: https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.lab.aws_life import Delays
from tests.lab.aws_wire import ApiError, Call, Reply

_MAKES = {
    "CreateSecurityGroup": ("InvalidGroup.NotFound", re.compile(rb"<groupId>(sg-[0-9a-f]+)")),
    "ImportKeyPair": ("InvalidKeyPair.NotFound", re.compile(rb"<keyName>([^<]+)")),
    "CreatePlacementGroup": ("InvalidPlacementGroup.Unknown", re.compile(rb"<groupName>([^<]+)")),
}
Thing = tuple[str, str, str]  # region, the code of who does not know it, name


@dataclass
class Lag:
    """Calls that name something new do not know it yet, as often as `delays.unknown` says."""

    delays: Delays
    left: dict[Thing, int] = field(default_factory=dict[Thing, int])

    def after(self, call: Call, reply: Reply) -> None:
        """Note what a call has made."""
        if self.delays.unknown and not call.error and call.action in _MAKES:
            code, shape = _MAKES[call.action]
            self.left |= {(call.region, code, name.decode()): self.delays.unknown for name in shape.findall(reply.body)}

    def before(self, call: Call) -> Mapping[str, Any] | None:
        """The answer of a list that lacks what is new; None where nothing is lacking.

        Raises:
            ApiError: the call names what is not known yet.
        """
        for code, name in _named(call):
            if left := self.left.get((call.region, code, name), 0):
                self.left[call.region, code, name] = left - 1
                raise ApiError(code, f"The resource '{name}' does not exist")
        if call.action == "DescribeSecurityGroups":
            for (region, code, name), left in self.left.items():
                if left and (region, code) == (call.region, "InvalidGroup.NotFound"):
                    self.left[region, code, name] = left - 1
                    return {"SecurityGroups": []}
        return None


def _named(call: Call) -> Iterator[tuple[str, str]]:
    """What a call names that may be new, each with the code of who does not know it."""
    params = call.params
    if call.action.startswith("AuthorizeSecurityGroup"):
        yield "InvalidGroup.NotFound", params.get("GroupId", "")
    if call.action == "RunInstances":
        yield "InvalidKeyPair.NotFound", params.get("KeyName", "")
        yield "InvalidPlacementGroup.Unknown", params.get("Placement", {}).get("GroupName", "")
        for nic in params.get("NetworkInterfaces", ()):
            yield from (("InvalidGroup.NotFound", each) for each in nic.get("Groups", ()))

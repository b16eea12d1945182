"""`skypool prove` at all levels against the labs of the six clouds, whose machines are real."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.cli import main
from skypool.drivers import recording, registry
from skypool.drivers.contract import Driver
from skypool.proof.report import Report, from_json
from tests.lab.billing import Billing

pytestmark = [
    pytest.mark.usefixtures("own_state"),
    pytest.mark.slow,
    pytest.mark.timeout(500),
]


@dataclass(frozen=True)
class Cloud:
    """How the proof is made at one lab.

    Attributes:
        name: name of the provider.
        fixture: name of the fixture with the lab.
        driver: makes the driver. Port 22 of lab machines is open to whoever is in the lab.
        more: further options of the command.
        ends_itself: True if machines end their own cost.
        says_why: True if the provider names what it refuses, so that a refusal shows something.
    """

    name: str
    fixture: str
    driver: Callable[[], Driver]
    more: tuple[str, ...] = ()
    ends_itself: bool = True
    says_why: bool = True

    def __str__(self) -> str:
        return self.fixture


LABS = [
    Cloud("aws", "aws", lambda: sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0")),
    Cloud("gcp", "gce", lambda: sky.GCP(ssh_from="203.0.113.7")),
    Cloud(
        "gcp",
        "tpu",
        lambda: sky.GCP(ssh_from="203.0.113.7"),
        ("--accelerator", "v5litepod-8", "--max-usd", "20"),
        ends_itself=False,
    ),
    Cloud("runpod", "runpod", sky.RunPod, says_why=False),
    Cloud("vastai", "vastai", sky.VastAI),
    Cloud("verda", "verda", sky.Verda, ends_itself=False),
]


@pytest.fixture
def world(cloud: Cloud, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The lab; for Cloud TPU with Compute Engine beside it, and for both with Google's catalogue of prices."""
    beside: dict[str, str] = {}
    if cloud.fixture == "tpu":
        compute: dict[str, str] = request.getfixturevalue("gce_api").environment
        beside = {name: value for name, value in compute.items() if "COMPUTE" in name}
    made = request.getfixturevalue(cloud.fixture)  # it empties the environment of Google's variables
    with Billing() as billing:
        for name, value in {**billing.environment, **beside}.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, Report | None]]:
    """`skypool prove`, in this very process, with the driver of a lab; its report comes back, too."""
    monkeypatch.chdir(tmp_path)

    def run(cloud: Cloud, *args: str) -> tuple[int, str, Report | None]:
        file = tmp_path / "proof.md"
        out = io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
            patch.setattr(registry, "driver", lambda name: cloud.driver())
            patch.setattr(sys, "argv", ["skypool", "prove", cloud.name, "--report", str(file), *cloud.more, *args])
            with pytest.raises(SystemExit) as left:
                main()
        report = from_json(file.with_suffix(".json").read_text()) if file.exists() else None
        return int(left.value.code or 0), out.getvalue(), report

    return run


@pytest.mark.parametrize("cloud", LABS, ids=str)
def test_all_levels_are_good_and_leave_nothing(
    cloud: Cloud, world: Any, prove: Callable[..., tuple[int, str, Report | None]], tmp_path: Path
) -> None:
    status, told, report = prove(
        cloud, "--level", "cents", "--yes", "--lease", "6s", "--record", str(tmp_path / "record")
    )
    print(told)
    assert world.left() == {}
    assert report is not None
    assert [each for each in report.steps if each.result == "bad"] == []
    assert status == 0, told
    titles = [each.what for each in report.steps]
    assert "first machine: a call" in titles
    assert any(each.level == "write" and each.result == "good" for each in report.steps) is cloud.says_why
    own_end = [each for each in report.steps if each.what == "machine without its client: its own end"]
    assert len(own_end) == cloud.ends_itself
    assert len(report.machines) >= 2
    assert all(each.ended for each in report.machines)
    assert recording.read(tmp_path / "record").exchanges
    for secret in (value for name, value in world.environment.items() if "KEY" in name or "SECRET" in name):
        assert secret not in (tmp_path / "proof.md").read_text() + (tmp_path / "proof.json").read_text()

"""Run tests that Dask ships, unchanged, so that a Dask cluster on a pool computes; print as JSON what came of them.

python dask_own_tests.py SETTINGS

SETTINGS is JSON: the machines as pairs of address and host key, the private key, their Python, and for each file of
tests an expression for `pytest -k`. If tests of a file have the fixture `client` of `distributed.utils_test`, they get
a client of the cluster, and the others are left out: they start clusters of their own. In other files, what is computed
without a `scheduler=` goes to the cluster, as it is the default.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import distributed.utils_test
import pytest
from distributed import Client

import skypool as sky


class Plugin:
    """A plugin of pytest that selects tests, connects them with a cluster, and counts their outcomes."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.outcomes: dict[str, int] = {}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        own = [each for each in items if {"c", "client"} & set(each.fixturenames)]
        items[:] = own or items

    @pytest.fixture(scope="session", autouse=True)
    def _default(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if any("c" in each.fixturenames for each in request.session.items):  # type: ignore[attr-defined]
            yield
        else:
            with Client(self._cluster):
                yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
            if report.failed:
                self.failed.append(f"{report.nodeid}: {str(report.longrepr)[-600:]}")


def main(settings: dict[str, Any]) -> None:
    hosts = [sky.Host(address, host_key=key) for address, key in settings["machines"]]
    driver = sky.SSH(hosts=hosts, user="root", identity=settings["identity"], python=settings["python"])
    shown: dict[str, Any] = {}
    with sky.ComputePool(driver, nodes=len(hosts), slots=1, console="off") as pool, sky.dask.cluster(pool) as cluster:

        @pytest.fixture
        def client() -> Iterator[Client]:
            with Client(cluster) as made:
                yield made

        distributed.utils_test.client = client  # files of tests import this fixture by its name
        for file, words in settings["files"].items():
            before = transitions(cluster)
            plugin = Plugin(cluster)
            options = ["-q", "-c", os.devnull, "--rootdir", os.getcwd(), "-p", "no:cacheprovider", "-W", "ignore"]
            status = pytest.main([*options, "-k", words, str(where(file))], [plugin])
            outcome = {"status": int(status), "outcomes": plugin.outcomes, "failed": plugin.failed}
            shown[file] = {**outcome, "transitions": transitions(cluster) - before}
    sys.__stdout__.write(f"\n{json.dumps({'shown': shown})}\n")  # type: ignore[union-attr]  # it is there


def transitions(cluster: Any) -> int:
    """Return how often a task has changed its state on the scheduler of a cluster."""
    with Client(cluster, set_as_default=False) as client:
        return int(client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter))


def where(file: str) -> Path:
    """Return the path of a file of the installed dask."""
    spec = find_spec("dask")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent / file


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

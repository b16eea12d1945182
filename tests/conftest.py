"""Every test gets its own place for nodes, and leaves no process and no file behind."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import socket
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from skypool.agent.processes import descendants
from tests import needs, user_code
from tests.interrupts import hear_signals, pytest_runtest_call, pytest_timeout_set_timer
from tests.lab import fixtures
from tests.lab.fixtures import (
    aws,
    aws_api,
    chromium,
    gce,
    gce_api,
    lab,
    machine,
    own_state,
    runpod,
    runpod_api,
    tpu,
    tpu_api,
    two,
    vastai,
    vastai_api,
    verda,
    verda_api,
)
from tests.needs import pytest_addoption, pytest_configure, pytest_runtest_setup, pytest_terminal_summary
from tests.nvml import built_nvml, library, nvml

Server = TypeVar("Server", bound=socketserver.BaseServer)
ROOT = Path(__file__).parents[1]
_serving: list[tuple[str, socketserver.TCPServer]] = []
"""The name of each thread that serves a socket, and its server."""
hear_signals()

LONGEST = """
    aws runpod ssh save run detached_run hand_over slots gcp_compute gcp_tpu container gangs replay recording vastai
    rental image_lab bad_luck prove hostile_nodes verda second_user_ports quote first_hour services troubleshooting
    slices bundle recipes userdata pauses guard bootstrap spot left_processes data planned_ends driver_kit joblib
    resize remote aws_prove executor lab least_billed gce_pools nets lab_tpu guides gcp_groups observers
    network_check image_script house cli_shell lab_aws vastai_pools pool ledger large tpu_pools jupyter own_name
    mixed lab_gce tracebacks full_disk darwin driver_contract trust broadcast paid_examples aws_permissions
    runpod_pools published forward gcp_prices reaper aws_failover aws_pools verda_pools spot_lab gang_node fuzz
    console gang_decisions fake_cloud aws_schema spawned stacks samples notice_steps buckets temporary_credentials
    counts logs without_supply setup_gcp timeouts link lab_verda gcp_prove ranking lab_vastai cli_money interrupts
    metrics otlp testing_page sizing gcp_permissions docs_architecture cli_accelerators resize_lab gcp_tpu_schema
    bills travel usercode ends damage attach unread dispatch idle left_uploads runner gcs
""".split()  # noqa: SIM905 - as a list it is 35 lines and says no more
"""Test files by how long they take. Processes share them out by whole files, and none should begin a long one last."""
LONGEST_SLOW = """
    checkpoints_soak lids_soak drains_soak detached_run folder_saver aws_pools save soak temporary_credentials docs ends
    save_lab data_lab hand_over runner runner_watch gcs aws_failover gce_pools vastai_pools tpu_pools verda_pools replay
    runpod_pools remote dask skypilot_aws prove aws_prove fuzz recording files_lab guides stacks prove_labs driver_kit
    gcp_permissions awscli ssh linger troubleshooting gangs nets libcloud_ec2 bad_luck gcp_groups slots recipes
    google_tpu observers rental otlp image_script gcp_tpu image_lab guard network_check libcloud_gce hostile_nodes
    house handover end_hook readers_of_runs observing_runs detached_calls detached_notices
""".split()  # noqa: SIM905 - the same
"""The same of their slow tests."""


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without looking for garbage. Each look would go through all tests so far, in every process."""
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fixtures.mark(items)
    needs.pytest_collection_modifyitems(config, items)
    longest = LONGEST_SLOW if config.option.markexpr.startswith("slow") else LONGEST
    node = {f"test_{name}.py": place for place, name in enumerate(longest)}
    items.sort(key=lambda item: node.get(item.path.name, len(node)))


def pytest_collection_finish() -> None:
    """What was collected stays: a collection of garbage need not look at thousands of tests each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the sockets that clients have left in /tmp, where they are if the path of the home of a test is long.

    Clients that were killed cannot remove them. The next command of the user would, but those homes are gone.
    """
    if hasattr(session.config, "workerinput"):
        return  # the process that started this one does it
    for file in Path("/tmp").glob("skypool-????????/socket"):
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(file))
            except ConnectionRefusedError:
                shutil.rmtree(file.parent)


@pytest.fixture(scope="module")
def frozen() -> None:
    """For tests that collect garbage: all that is there already need not be looked at each time, for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_place() -> Iterator[None]:
    """Nodes of this run live in a folder of their own, as its ledger does; its path is short, as Unix sockets need."""
    place = tempfile.mkdtemp(prefix="sp-")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # programs of users write to pipes without it
        patch.setenv("XDG_RUNTIME_DIR", place)
        patch.setenv("XDG_STATE_HOME", f"{place}/state")
        yield
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _user_code_runs_without_locks() -> Iterator[None]:
    """Code of the user that runs under a lock of skypool, or on its event loop, fails in all tests."""
    if os.environ.get("SKYPOOL_TEST_SPEED"):  # measuring
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        user_code.watch(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _serving_is_noted() -> Iterator[None]:
    """Note which thread serves which socket: the frames of a thread that runs cannot be read."""
    serve_forever = socketserver.TCPServer.serve_forever

    def serve(self: socketserver.TCPServer, poll_interval: float = 0.5) -> None:
        _serving.append(noted := (threading.current_thread().name, self))
        try:
            serve_forever(self, poll_interval)
        finally:
            _serving.remove(noted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socketserver.TCPServer, "serve_forever", serve)
        yield


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """After a test no node is left that was not there before it, and no server's thread that nothing can reach."""
    before = set(nodes())
    user_code.found.clear()
    yield
    assert not user_code.found
    left = set(nodes()) - before
    assert not left, f"nodes left behind: {left}"
    if spinning_servers():  # a thread that was told to stop may still be on its way out
        eventually(
            lambda: not spinning_servers(),
            30,
            "a thread whose server was closed before it was stopped (use `served`): its end",
        )


def memory() -> int:
    """Bytes of this process that were in memory at once, at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def home() -> Path:
    """Where Local keeps its nodes in this run."""
    return Path(os.environ["XDG_RUNTIME_DIR"]) / f"skypool-{os.getuid()}"


def nodes(pool: str = "") -> list[Path]:
    """Folders of nodes that are there now."""
    return sorted(home().glob(f"{pool}*")) if home().exists() else []


def processes_of(text: str) -> list[int]:
    """Processes whose environment or command line mentions `text`, this one excluded."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                seen = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in seen:
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def served(server: Server) -> Iterator[Server]:
    """Let a server work in a thread of its own; both are gone afterwards."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    with server:
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def spinning_servers() -> list[str]:
    """Threads that serve a socket which is closed: they ask for its next connection again and again."""
    return [thread for thread, server in list(_serving) if server.socket.fileno() < 0]


def eventually(check: Callable[[], object], within: float = 30.0, what: str = "it") -> float:
    """Wait until `check` is true; how long it took. A check that takes long is made less often."""
    began = asked = time.monotonic()
    while not check():
        now = time.monotonic()
        if now - began > within:
            raise AssertionError(f"{what} did not happen within {within} s")
        time.sleep(max(0.01, 2 * (now - asked)))
        asked = time.monotonic()
    return time.monotonic() - began


def children(parent: int) -> list[int]:
    """The processes that it has started itself. Their numbers tell no order: they begin again at the lowest."""
    found = []
    for pid in descendants(parent):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(pid)
    return found


__all__ = [
    "ROOT",
    "aws",
    "aws_api",
    "built_nvml",
    "children",
    "chromium",
    "descendants",
    "eventually",
    "gce",
    "gce_api",
    "home",
    "lab",
    "library",
    "machine",
    "nodes",
    "nvml",
    "own_state",
    "processes_of",
    "pytest_addoption",
    "pytest_configure",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_terminal_summary",
    "pytest_timeout_set_timer",
    "runpod",
    "runpod_api",
    "tpu",
    "tpu_api",
    "two",
    "vastai",
    "vastai_api",
    "verda",
    "verda_api",
]

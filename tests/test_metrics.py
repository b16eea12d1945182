"""Metrics for monitoring systems: their names, what they leave out, and that real servers take them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import clock, events
from skypool.devices.health import DeviceHealth, NodeHealth
from skypool.devices.sample import DeviceSample, NodeSample
from skypool.errors import CapacityError, NoOffers, PoolClosed, UsageError
from skypool.metrics import calls_and_costs, devices, names
from skypool.metrics.exporter import exporters_asked
from skypool.metrics.metering import Metering
from skypool.metrics.prometheus import label_of, name_of
from skypool.metrics.values import Attributes, Kind, Measurement, Metric
from skypool.observers.observed import Observed
from skypool.pool.states import Node, Phase, Pool
from skypool.rental.receipt import Line
from skypool.testing import FakeCloud, Stock
from skypool.wire.save_orders import FolderState
from tests.conftest import eventually
from tests.facts import Given
from tests.needs import skip_or_fail
from tests.nvml import FakeNvml, Library, build, fake_and_real
from tests.nvml.cloud import CloudWithCards
from tests.test_idle import Script
from tests.watched import Watched
from tests.work import where

NODE: Attributes = {"skypool.pool": "p", "skypool.node": 0}
FULL = DeviceSample(
    "cuda", 0, uuid="GPU-0", utilization_percent=88.0, sm_activity_percent=40.0, memory_used_mib=1024.0,
    memory_total_mib=4096.0, power_watts=300.0, power_limit_watts=700.0, temperature_celsius=60.0, sm_clock_mhz=1980.0,
    memory_clock_mhz=2619.0, throttled=("power cap",), pcie_sent_mib=1.0, pcie_received_mib=2.0, nvlink_sent_mib=3.0,
    nvlink_received_mib=4.0, pcie_width=16, pcie_width_max=16, nvlinks=18, nvlinks_all=18, ecc_corrected=5,
    ecc_uncorrected=0, xids=(45,), xids_watched=True,
)  # fmt: skip
"""A device that reports everything."""


def of_device(seen: DeviceSample, state: Any = "ok", xids: dict[Any, int] | None = None) -> list[Measurement]:
    sample = NodeSample(devices=(seen,))
    health = NodeHealth(0, state, (DeviceHealth(seen.kind, seen.index, state),))
    models = {("cuda", 0): "NVIDIA H100"}
    return [
        *devices.device_measurements(sample, health, NODE, models),
        *devices.xid_measurements(sample, xids or {}, NODE, models),
    ]


def values(measurements: list[Measurement], metric: Metric) -> list[Any]:
    return [each.value for each in measurements if each.metric is metric]


# --- names ---------------------------------------------------------------------------------------------------


class Conventions:
    """The metrics that a module of opentelemetry-semantic-conventions makes, by name, each with its unit and kind."""

    def __init__(self, module: Any) -> None:
        self.found: dict[str, tuple[str, Kind]] = {}
        for name, make in vars(module).items():
            if name.startswith("create_"):
                make(self, *[None] * (make.__code__.co_argcount - 1))

    def create_counter(self, name: str, description: str, unit: str) -> None:
        self.found[name] = unit, "counter"

    def create_up_down_counter(self, name: str, description: str, unit: str) -> None:
        self.found[name] = unit, "updown"

    def create_observable_gauge(self, name: str, callbacks: None, description: str, unit: str) -> None:
        self.found[name] = unit, "gauge"


def test_names_of_hardware_are_those_of_the_semantic_conventions_and_all_others_are_our_own() -> None:
    from opentelemetry.semconv._incubating.metrics import hw_metrics

    theirs = Conventions(hw_metrics).found
    assert len(theirs) > 30
    ours = {each.name: (each.unit, each.kind) for each in names.ALL}
    assert len(ours) == len(names.ALL)
    hardware = {name: said for name, said in ours.items() if name.startswith("hw.")}
    assert hardware == {name: theirs.get(name) for name in hardware}
    assert len(hardware) >= 8
    assert all(name.startswith("skypool.") for name in ours.keys() - hardware.keys())
    assert not {name.removeprefix("skypool.") for name in ours} & {name.removeprefix("hw.") for name in theirs}


def test_attributes_and_their_values_are_those_of_the_semantic_conventions_or_our_own() -> None:
    from opentelemetry.semconv._incubating.attributes import disk_attributes, hw_attributes, network_attributes
    from opentelemetry.semconv.attributes import error_attributes

    modules = (hw_attributes, disk_attributes, network_attributes, error_attributes)
    known = {each for module in modules for each in vars(module).values() if isinstance(each, str)}
    sample = NodeSample(disk_read_mib=1.0, disk_written_mib=1.0, sent_mib=1.0, received_mib=1.0)
    found = [
        *of_device(FULL, xids={("cuda", 0, "GPU-0", 45): 1}),
        *devices.node_measurements(sample, NODE),
        *calls_and_costs.cost_measurements(
            [Line("p", "i", "t", "z", "spot", 0, 1.0, 0.0, 0.0, 1.0)], 5.0, {"skypool.pool": "p"}
        ),
    ]
    attributes = {(key, value) for each in found for key, value in each.attributes.items()}
    assert {key for key, _ in attributes if not key.startswith("skypool.")} <= known
    for key, enum in (
        ("hw.state", hw_attributes.HwStateValues),
        ("hw.type", hw_attributes.HwTypeValues),
        ("hw.gpu.task", hw_attributes.HwGpuTaskValues),
        ("disk.io.direction", disk_attributes.DiskIoDirectionValues),
        ("network.io.direction", network_attributes.NetworkIoDirectionValues),
    ):
        said = {value for each, value in attributes if each == key}
        assert said
        assert said <= {each.value for each in enum}, key


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (names.GPU_UTILIZATION, "hw_gpu_utilization_ratio"),
        (names.GPU_MEMORY_USAGE, "hw_gpu_memory_usage_bytes"),
        (names.POWER, "hw_power_watts"),
        (names.TEMPERATURE, "hw_temperature_celsius"),
        (names.ERRORS, "hw_errors_total"),
        (names.STATUS, "hw_status"),
        (names.DEVICE_CLOCK, "skypool_device_clock_hertz"),
        (names.NODE_NETWORK_TRAFFIC, "skypool_node_network_traffic_bytes_per_second"),
        (names.CALLS, "skypool_calls_total"),
        (names.CALLS_RUNNING, "skypool_calls_running"),
        (names.CALL_DURATION, "skypool_call_duration_seconds"),
        (names.COST, "skypool_cost_usd"),
        (names.COST_RATE, "skypool_cost_usd_per_hour"),
        (names.IDLE_TIME, "skypool_idle_time_seconds"),
    ],
)
def test_names_for_prometheus_follow_the_rules_of_opentelemetry(metric: Metric, name: str) -> None:
    assert name_of(metric) == name


def test_the_page_of_metrics_lists_all_of_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "metrics.md").read_text()
    listed = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| ([^|]*) \| (\w+) \| ([^|]*) \|$", page, re.MULTILINE)
    assert [tuple(part.strip() for part in each) for each in listed] == [
        (each.name, name_of(each), each.unit, each.kind, each.description) for each in names.ALL
    ]


# --- what is measured, and what is not -----------------------------------------------------------------------


def test_values_are_in_the_units_of_their_metrics() -> None:
    found = of_device(FULL)
    assert values(found, names.GPU_UTILIZATION) == [0.88]
    assert values(found, names.GPU_MEMORY_USAGE) == [1 << 30]
    assert values(found, names.GPU_MEMORY_UTILIZATION) == [0.25]
    assert values(found, names.DEVICE_CLOCK) == [1.98e9, 2.619e9]
    assert values(found, names.DEVICE_PCIE_TRAFFIC) == [1 << 20, 2 << 20]
    [status] = [each for each in found if each.metric is names.STATUS and each.value == 1]
    assert status.attributes == {
        **NODE, "hw.id": "GPU-0", "hw.name": "cuda 0", "hw.model": "NVIDIA H100", "hw.type": "gpu", "hw.state": "ok",
        "skypool.device.kind": "cuda", "skypool.device.index": 0,
    }  # fmt: skip


def test_what_was_not_measured_is_left_out() -> None:
    found = of_device(DeviceSample("tpu", 0, unknown="no tool"), "unknown")
    assert {each.metric for each in found} == {names.DEVICE_HEALTH}
    assert [each.attributes["skypool.health"] for each in found if each.value == 1] == ["unknown"]
    assert list(devices.node_measurements(NodeSample(), NODE)) == []
    lost = of_device(DeviceSample("cuda", 0, lost=True, xids_watched=True), "unhealthy")
    assert {each.metric for each in lost} == {names.DEVICE_HEALTH, names.STATUS, names.ERRORS}
    assert [each.attributes["hw.state"] for each in lost if each.metric is names.STATUS and each.value] == ["failed"]


def test_errors_are_zero_only_where_they_would_be_seen() -> None:
    watched = [each for each in of_device(FULL) if each.attributes.get("error.type") == "xid"]
    assert [each.value for each in watched] == [0]
    unseen = of_device(DeviceSample("cuda", 0, utilization_percent=1.0))
    assert values(unseen, names.ERRORS) == []
    ended = list(devices.xid_measurements(NodeSample(), {("cuda", 0, "GPU-0", 79): 2}, NODE, {}))
    assert [(each.metric, each.value) for each in ended] == [(names.DEVICE_XIDS, 2), (names.ERRORS, 2)]


def test_idle_costs_that_are_not_known_are_left_out() -> None:
    line = Line("p", "i", "t", "z", "spot", 0, 36.0, 0.0, 0.0, 100.0, billed_from=0.0)
    found = list(calls_and_costs.cost_measurements([line], None, {}))
    assert values(found, names.COST) == [pytest.approx(1.0)]
    assert {each.metric for each in found} == {names.COST, names.COST_RATE}


def test_what_is_no_exporter_is_refused() -> None:
    for wrong in ("prometheus", 9464, [sky.Prometheus(port=0), None], sky.Prometheus):
        with pytest.raises(UsageError, match=r"metrics must be sky\.Prometheus"):
            sky.ComputePool(metrics=wrong)  # type: ignore[arg-type]
    one = sky.Prometheus(port=0)
    assert exporters_asked([one, one]) == (one,)


@pytest.mark.parametrize(("port", "address"), [(-1, "127.0.0.1"), (65536, "127.0.0.1"), ("80", "127.0.0.1"), (0, "")])
def test_a_wrong_address_is_refused(port: Any, address: Any) -> None:
    with pytest.raises(UsageError):
        sky.Prometheus(port=port, address=address)


# --- the server for Prometheus -------------------------------------------------------------------------------


def scraped(prometheus: sky.Prometheus) -> str:
    with urllib.request.urlopen(prometheus.url, timeout=30) as reply:
        text: str = reply.read().decode()
        return text


def lines(text: str, name: str, *labels: str) -> list[str]:
    return [each for each in text.splitlines() if each.startswith(f"{name}{{") and all(one in each for one in labels)]


def test_a_pool_is_served_from_its_start_to_its_end_and_so_are_two_at_once() -> None:
    prometheus = sky.Prometheus(port=0)
    with sky.ComputePool(name="one", slots=2, console="off", metrics=prometheus) as pool:
        assert list(pool.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
        url = prometheus.url
        assert url.startswith("http://127.0.0.1:")
        with sky.ComputePool(name="two", slots=2, console="off", metrics=[prometheus]):
            assert prometheus.url == url
            text = scraped(prometheus)
            assert text.count("# TYPE skypool_calls_total counter") == 1
            assert lines(text, "skypool_calls_total", 'skypool_pool="one"', 'skypool_outcome="ok"')[0].endswith(" 5.0")
            assert lines(text, "skypool_calls_total", 'skypool_pool="two"', 'skypool_outcome="ok"')[0].endswith(" 0.0")
        text = scraped(prometheus)
        assert lines(text, "skypool_nodes", 'skypool_state="ready"') == [
            'skypool_nodes{skypool_pool="one",skypool_state="ready"} 1.0'
        ]
        [slots] = lines(text, "skypool_node_slots")
        assert 'skypool_provider="local"' in slots
        assert slots.endswith(" 2.0")
        assert "skypool_claimed" not in text
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=30)
    assert prometheus.port == 0


@fake_and_real
def test_the_page_of_a_pool_has_every_card_of_the_library(library: Library) -> None:
    fields = {
        "hw_gpu_memory_limit_bytes": ("memory_total_mib", 1 << 20),
        "hw_gpu_utilization_ratio": ("utilization_percent", 0.01),
        "hw_temperature_celsius": ("temperature_celsius", 1),
        "hw_power_watts": ("power_watts", 1),
    }
    prometheus = sky.Prometheus(port=0)
    with sky.ComputePool(slots=1, console="off", metrics=prometheus):
        eventually(lambda: lines(scraped(prometheus), "hw_gpu_memory_limit_bytes"), 60, "the cards")
        text = scraped(prometheus)
    for index, card in enumerate(library.cards):
        of_card = f'hw_name="cuda {index}"'
        for name, (field, unit) in fields.items():
            found = [float(each.split()[-1]) / unit for each in lines(text, name, of_card, f'hw_model="{card.name}"')]
            wanted = card.values[field]
            assert len(found) == (wanted is not None), (name, found)
            assert wanted is None or wanted[0] <= found[0] <= wanted[1], (name, found, wanted)
        [state] = [each for each in lines(text, "skypool_device_health", of_card) if float(each.split()[-1]) == 1]
        assert any(f'skypool_health="{each}"' in state for each in library.states)
    assert len(lines(text, "hw_gpu_memory_limit_bytes")) == len(library.cards)


def test_running_and_waiting_calls_are_told_apart(tmp_path: Path) -> None:
    prometheus = sky.Prometheus(port=0)
    with sky.ComputePool(slots=1, console="off", metrics=prometheus) as pool:
        calls = [pool.send(where(str(tmp_path / "go"))) for _ in range(3)]
        text = scraped(prometheus)
        assert [each.rpartition(" ")[2] for each in lines(text, "skypool_calls_running")] == ["1.0"]
        assert [each.rpartition(" ")[2] for each in lines(text, "skypool_calls_waiting")] == ["2.0"]
        (tmp_path / "go").touch()
        assert [each.result(60) for each in calls] == [0, 0, 0]
        text = scraped(prometheus)
        assert [each.rpartition(" ")[2] for each in lines(text, "skypool_calls_waiting")] == ["0.0"]


def test_a_port_in_use_is_told_before_anything_is_rented(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, FakeCloud(tmp_path) as cloud:
        port = taken.getsockname()[1]
        first, second = sky.Prometheus(port=0), sky.Prometheus(port=port)
        pool = sky.ComputePool(cloud, name="p", console="off", metrics=[first, second])
        with pytest.raises(UsageError, match=rf"port {port}.*in use.*port=0"):
            pool.start()
        assert cloud.instances(pool="p") == []
        assert pool.receipt.lines == ()
        assert first.port == 0, "the server that could be opened is closed again"
    with pytest.raises(UsageError, match=r"203\.0\.113\.1"):
        sky.ComputePool(console="off", metrics=sky.Prometheus(port=0, address="203.0.113.1")).start()


def test_the_server_is_closed_when_a_pool_cannot_start(tmp_path: Path) -> None:
    prometheus = sky.Prometheus(port=0)
    with FakeCloud(tmp_path, [Stock()]) as cloud, pytest.raises(NoOffers):
        sky.ComputePool(cloud, accelerator="H200:8", console="off", metrics=prometheus).start()
    assert prometheus.port == 0
    eventually(lambda: not [each for each in threading.enumerate() if "metrics" in each.name], 30, "the thread's end")


def test_a_pool_is_served_while_its_machines_boot(tmp_path: Path) -> None:
    prometheus = sky.Prometheus(port=0)
    with FakeCloud(tmp_path) as cloud:
        cloud.control.delay(30.0, "describe", times=None)  # until then, the pool does not know how to reach the machine
        pool = Watched(cloud, name="p", metrics=prometheus)

        def start() -> None:
            with contextlib.suppress(PoolClosed):  # it may be stopped before it is ready
                pool.start()

        starting = threading.Thread(target=start)
        starting.start()
        eventually(lambda: "booting" in [each.phase for each in pool.heard(events.NodePhase)])
        eventually(lambda: lines(scraped(prometheus), "skypool_nodes", 'skypool_state="booting"')[0].endswith(" 1.0"))
        assert lines(scraped(prometheus), "skypool_cost_usd_per_hour", 'skypool_node="0"')
        cloud.control.relent()
        pool.stop()
        starting.join(60)
    assert [each.text for each in pool.heard(events.Notice) if "metrics" in each.text] == []


def test_orders_are_counted_by_outcome(tmp_path: Path) -> None:
    prometheus = sky.Prometheus(port=0)
    stock = [Stock("cheap", usd_per_hour=1.0), Stock("dear", usd_per_hour=2.0)]
    with FakeCloud(tmp_path, stock) as cloud:
        cloud.control.refuse(CapacityError, instance_type="cheap")
        with sky.ComputePool(cloud, console="off", metrics=prometheus):
            found = lines(scraped(prometheus), "skypool_launches_total")
    assert len(found) == 2
    assert 'skypool_offer="cheap",skypool_outcome="refused"' in found[0]
    assert 'skypool_offer="dear",skypool_outcome="rented"' in found[1]


@pytest.mark.slow
def test_values_of_strangers_are_marked_as_claims_and_old_ones_are_left_out() -> None:
    prometheus = sky.Prometheus(port=0)
    with sky.ComputePool(console="off", trust="data", metrics=prometheus) as pool:
        eventually(lambda: pool.samples.latest(), 60, "a sample")
        [memory] = lines(scraped(prometheus), "skypool_node_memory_limit_bytes")
        assert 'skypool_claimed="true"' in memory
        agent = pool.submit(os.getppid).result(60)
        os.kill(agent, signal.SIGSTOP)  # so that the link cannot come back
        link = pool._engine.connections.links[0]  # type: ignore[union-attr]  # it has started
        link._loop.call_soon_threadsafe(link._break, "cut by the test", link._stream)
        eventually(lambda: pool.nodes[0].startswith("unreachable"), 60, "the broken link")
        text = scraped(prometheus)
        os.kill(agent, signal.SIGCONT)
        assert lines(text, "skypool_nodes", 'skypool_state="unreachable"')[0].endswith(" 1.0")
        assert lines(text, "skypool_node_memory_limit_bytes") == []
        assert lines(text, "skypool_node_slots")


def test_without_metrics_nothing_is_imported_and_no_thread_runs() -> None:
    program = """
import sys, threading
import skypool as sky
with sky.ComputePool(console="off") as pool:
    assert pool.submit(len, "abc").result(60) == 3
    assert not [name for name in sys.modules if name.startswith(("prometheus_client", "opentelemetry", "grpc"))]
    assert not [each for each in threading.enumerate() if "metrics" in each.name]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# --- Prometheus itself ---------------------------------------------------------------------------------------


def program(name: str) -> str:
    """Return the path of a program of Debian's package prometheus. Skip the test without it, but fail in CI."""
    found = shutil.which(name)
    if found is None:
        skip_or_fail(f"{name} is not installed: tests/lab/setup installs it")
    return found


GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "metrics.md").read_text()


def guide_queries() -> list[tuple[str, str]]:
    """Return the queries of the guide, each with what it shows."""
    found = re.findall(r"^\| ([^|]*) \| `([^`]*skypool_[^`]*|[^`]*hw_[^`]*)` \|$", GUIDE, re.MULTILINE)
    assert len(found) > 10
    return [(query, shows) for shows, query in found]


@pytest.mark.parametrize(("number", "kind"), [(0, "config"), (1, "rules")])
def test_the_configuration_of_the_guide_is_one_of_prometheus(number: int, kind: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    file = tmp_path / "prometheus.yml"
    file.write_text(blocks[number])
    argv = [program("promtool"), "check", kind, str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


class Server:
    """A Prometheus that scrapes one address.

    Args:
        target: the address, such as "127.0.0.1:9464".
        folder: an empty folder for its configuration and data.
    """

    def __init__(self, target: str, folder: Path) -> None:
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 300ms, scrape_timeout: 300ms}\n"
            f"scrape_configs: [{{job_name: skypool, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        argv = [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)

    def ask(self, query: str) -> dict[str, float]:
        """Return the values of a PromQL query, by all their labels as text."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                said = json.load(reply)
        except urllib.error.HTTPError as e:
            if e.code == 503:  # it is not ready yet
                return {}
            raise AssertionError(f"{query} is refused: {e.read().decode()}") from e
        except urllib.error.URLError:
            assert self.process.poll() is None, self.log.read_text()
            return {}
        assert said["status"] == "success", said
        return {json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in said["data"]["result"]}

    def until(self, query: str, *expected: float) -> None:
        """Wait until a query has these values, in ascending order."""
        seen: list[float] = []

        def same() -> bool:
            seen[:] = sorted(self.ask(query).values())
            return seen == [pytest.approx(each, abs=1e-6) for each in expected]

        try:
            eventually(same, 60, query)
        except AssertionError as e:
            raise AssertionError(f"{query} has {seen}, not {expected}: {self.ask('up')}") from e


@contextlib.contextmanager
def scraping(prometheus: sky.Prometheus, folder: Path) -> Iterator[Server]:
    folder.mkdir()
    server = Server(f"127.0.0.1:{prometheus.port}", folder)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)


@pytest.mark.slow
def test_prometheus_scrapes_a_pool_and_its_queries_give_what_the_pool_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 USD/h is a cent a second, by a clock of money that stands still until it is moved."""
    build(tmp_path)
    nvml = FakeNvml(tmp_path, tmp_path)
    nvml.say(0, count=2, busy=88, memory=2048, milliwatts=300_000, celsius=61)
    nvml.say(1, busy=12, uncorrected=2)
    script = Script()
    monkeypatch.setattr(clock, "now", script)
    prometheus = sky.Prometheus(port=0)
    with CloudWithCards(
        tmp_path / "cloud", [Stock(usd_per_hour=36.0, accelerator="H100:2")], tells_billing=False
    ) as cloud:
        with (
            Watched(cloud, accelerator="H100:2", name="p", budget=50, metrics=prometheus) as pool,
            scraping(prometheus, tmp_path / "server") as server,
        ):
            assert [pool.submit(abs, -n).result(60) for n in range(3)] == [0, 1, 2]
            with pytest.raises(ZeroDivisionError):
                pool.submit(divmod, 1, 0).result(60)
            script.pass_(100.0)
            server.until('up{job="skypool"}', 1)
            server.until('hw_gpu_utilization_ratio{hw_gpu_task="general"}', 0.12, 0.88)
            server.until('hw_gpu_memory_usage_bytes{hw_name="cuda 0"}', 2048 << 20)
            server.until("sum(hw_power_watts)", 370)
            server.until('hw_temperature_celsius{skypool_device_index="0"}', 61)
            server.until('hw_status{hw_state="ok"}', 0, 1)
            server.until('hw_status{hw_state="degraded"}', 0, 1)
            server.until('hw_errors_total{error_type="uncorrected",hw_name="cuda 1"}', 2)
            server.until('hw_errors_total{error_type="xid"}', 0, 0)
            server.until("sum by (skypool_outcome) (skypool_calls_total)", 0, 1, 3)
            server.until("skypool_call_duration_seconds_count", 4)
            server.until("histogram_quantile(0.99, skypool_call_duration_seconds_bucket) < bool 1", 1)
            server.until('skypool_launches_total{skypool_outcome="rented"}', 1)
            server.until('skypool_nodes{skypool_state="ready"}', 1)
            receipt = pool.receipt
            assert receipt.usd == receipt.idle_usd == pytest.approx(1.0)
            server.until("sum(skypool_cost_usd)", receipt.usd)
            server.until("sum(skypool_idle_usd)", 1.0)
            server.until("sum(skypool_idle_time_seconds)", 100.0)
            server.until("sum(skypool_cost_usd_per_hour)", 36)
            server.until("skypool_budget_usd - on(skypool_pool) sum by (skypool_pool) (skypool_cost_usd)", 49)

            text = scraped(prometheus)
            checked = subprocess.run(
                [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
            )
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
            told = {each.partition("{")[0].partition(" ")[0] for each in text.splitlines() if each[0] != "#"}
            assert {each for each in told if each.startswith("hw_")} == {
                name_of(each) for each in names.ALL if each.name.startswith("hw.")
            }
            assert label_of("hw.gpu.task") in text

            for query, _ in guide_queries():
                if not any(sign in query for sign in ("<", ">", "== 1", "refused")):
                    eventually(lambda query=query: server.ask(query), 60, query)  # type: ignore[misc]
                else:  # nothing is wrong here, but the query must be one
                    server.ask(query)

            nvml.xid(0, 45)  # an error of a program: the GPU goes on
            server.until('hw_errors_total{error_type="xid",hw_name="cuda 0"}', 1)
            server.until('skypool_device_xids_total{skypool_xid="45"}', 1)
            call = pool.send(where(str(tmp_path / "go")), node=0)
            pool.until_busy(0)
            script.pass_(50.0)
            server.until("skypool_calls_running", 1)
            server.until("sum(skypool_cost_usd)", 1.5)
            server.until("sum(skypool_idle_usd)", 1.0)
            nvml.say(1, lost=1)
            server.until('hw_status{hw_name="cuda 1",hw_state="failed",skypool_node="0"}', 1)
            server.until('hw_status{hw_name="cuda 1",hw_state="ok",skypool_node="0"}', 0)
            server.until('hw_gpu_utilization_ratio{skypool_node="0"}', 0.88)
            nvml.say(1, lost=0)
            nvml.say(0, hang=1)
            server.until('skypool_device_health{hw_name="cuda 0",skypool_health="unknown",skypool_node="0"}', 1)
            server.until('hw_gpu_utilization_ratio{skypool_node="0"}')
            (tmp_path / "go").touch()
            assert call.result(60) == 0
            assert [each.idle_usd for each in pool.receipt.lines if each.node == 0] == [pytest.approx(1.0)]
        assert [each.text for each in pool.heard(events.Notice) if "metrics" in each.text] == []


# --- kept folders --------------------------------------------------------------------------------------------


def test_what_is_saved_of_a_folder_is_measured_and_nothing_when_it_has_ended() -> None:
    state = FolderState("out", "saving", files=3, bytes=30, unsaved=2, unsaved_bytes=20, oldest=7.0, rate=5.0)
    found = list(calls_and_costs.folder_measurements(state, NODE))
    assert {each.metric.name.removeprefix("skypool.folder."): each.value for each in found} == {
        "trouble": 0, "files": 3, "saved": 30, "unsaved.files": 2, "unsaved.size": 20, "unsaved.time": 7.0, "rate": 5.0
    }  # fmt: skip
    assert all(each.attributes == {**NODE, "skypool.folder": "out"} for each in found)
    restoring = calls_and_costs.folder_measurements(FolderState("out", "restoring", trouble="refused"), NODE)
    assert [(each.metric, each.value) for each in restoring] == [(names.FOLDER_TROUBLE, 1)]
    assert not list(calls_and_costs.folder_measurements(FolderState("out", "ended", trouble="refused"), NODE))


def test_data_is_no_folder_that_is_saved() -> None:
    folders = {
        (0, each.id): each
        for each in (
            FolderState("out", "saving", files=3),
            FolderState("/data", "fetching", trouble="slow", is_data=True),
            FolderState("/more", "there", is_data=True),
        )
    }
    given = Given(state=Pool(1, 1, nodes={0: Node(0, Phase.READY)}), folders=folders)
    metering = Metering(())
    metering.begin(given)
    named = {each.attributes.get("skypool.folder") for each in metering.read()} - {None}
    assert named == {"out"}
    told: Any = Observed(given).info()["nodes"]
    assert [each["id"] for each in told[0]["folders"]] == ["out"]

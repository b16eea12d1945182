"""Metrics that are sent by OTLP, OpenTelemetry's protocol, to receivers over gRPC and HTTP."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

import skypool as sky
from skypool import clock, events
from skypool.errors import UsageError
from skypool.metrics import names
from skypool.metrics.otlp_data import MOST, pairs, requests, resource_attributes
from skypool.metrics.values import Distribution, Measurement, Metric
from skypool.testing import Stock
from tests.conftest import eventually, served
from tests.nvml import FakeNvml, build
from tests.nvml.cloud import CloudWithCards
from tests.test_idle import Script
from tests.watched import Watched
from tests.work import where

Key = frozenset[tuple[str, Any]]


class Inbox:
    """The requests that a receiver got.

    Attributes:
        requests: the requests.
        headers: the headers of each request, with names in lower case.
        busy: so many requests more are refused, and not kept.
    """

    def __init__(self) -> None:
        self.busy = 0
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []

    @property
    def resource(self) -> dict[str, Any]:
        return attributes(self.requests[-1].resource_metrics[0].resource.attributes)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last request, by name."""
        [about] = self.requests[-1].resource_metrics
        [scope] = about.scope_metrics
        assert scope.scope.name == "skypool"
        return {each.name: each for each in scope.metrics}

    def values(self, metric: Metric, *keys: str) -> dict[Any, float]:
        """Return the numbers of a metric in the last request, by the values of these attributes."""
        said = self.metrics()[metric.name]
        points = said.gauge.data_points if metric.kind == "gauge" else said.sum.data_points
        return {
            tuple(attributes(each.attributes).get(key) for key in keys): getattr(each, each.WhichOneof("value"))
            for each in points
        }


def attributes(said: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in said}


@contextlib.contextmanager
def grpc_receiver(inbox: Inbox, rejected: int = 0) -> Iterator[str]:
    """Take requests over gRPC, at the address that is yielded."""
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import add_MetricsServiceServicer_to_server

    class Service:
        """A receiver that keeps what it gets."""

        def Export(self, request: Any, context: Any) -> Any:
            if inbox.busy:
                inbox.busy -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
            inbox.headers.append({key: str(value) for key, value in context.invocation_metadata()})
            inbox.requests.append(request)
            partly = messages.ExportMetricsPartialSuccess(rejected_data_points=rejected, error_message="too old")
            return messages.ExportMetricsServiceResponse(partial_success=partly)

    server = grpc.server(ThreadPoolExecutor(2))
    add_MetricsServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait(30)


@contextlib.contextmanager
def http_receiver(inbox: Inbox, status: int = 200, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Take requests over HTTP, at the address that is yielded, and answer with a status. `context` encrypts them."""
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages

    class Handler(http.server.BaseHTTPRequestHandler):
        """A receiver that keeps what it gets."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/metrics", "application/x-protobuf")
            if inbox.busy:
                inbox.busy -= 1
                self.send_error(503)
                return
            inbox.headers.append({key.lower(): value for key, value in self.headers.items()})
            inbox.requests.append(messages.ExportMetricsServiceRequest.FromString(body))
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        yield f"http{'s' if context else ''}://127.0.0.1:{server.server_address[1]}"


RECEIVERS: dict[str, Callable[..., contextlib.AbstractContextManager[str]]] = {
    "grpc": grpc_receiver,
    "http": http_receiver,
}


# --- requests ------------------------------------------------------------------------------------------------


def test_a_request_has_the_kinds_and_units_of_the_metrics() -> None:
    measured = [
        Measurement(names.GPU_UTILIZATION, 0.5, {"skypool.node": 3}),
        Measurement(names.CALLS, 7, {"skypool.outcome": "ok"}),
        Measurement(names.COST, 1.5, {"skypool.claimed": True}),
        Measurement(names.CALL_DURATION, Distribution((0.1, 1.0), (4, 2, 1), 9.5), {}),
    ]
    [request] = map(encode_metrics, requests(measured, {"service.name": "s"}, 100.0, 200.5))
    inbox = Inbox()
    inbox.requests.append(request)
    assert inbox.resource == {"service.name": "s"}
    found = inbox.metrics()
    assert [each.WhichOneof("data") for each in found.values()] == ["gauge", "sum", "sum", "histogram"]
    assert {each.name: (each.unit, each.description) for each in found.values()} == {
        each.metric.name: (each.metric.unit, each.metric.description) for each in measured
    }
    calls, cost = found["skypool.calls"].sum, found["skypool.cost.usd"].sum
    assert (calls.is_monotonic, cost.is_monotonic) == (True, False)
    assert calls.aggregation_temporality == cost.aggregation_temporality == 2  # cumulative
    assert (calls.data_points[0].as_int, cost.data_points[0].as_double) == (7, 1.5)
    assert attributes(cost.data_points[0].attributes) == {"skypool.claimed": True}
    assert calls.data_points[0].start_time_unix_nano == 100 * 10**9
    [gauge] = found["hw.gpu.utilization"].gauge.data_points
    assert (gauge.start_time_unix_nano, gauge.time_unix_nano) == (0, 200_500_000_000)
    assert attributes(gauge.attributes) == {"skypool.node": 3}
    [point] = found["skypool.call.duration"].histogram.data_points
    assert (point.count, point.sum, [*point.bucket_counts], [*point.explicit_bounds]) == (7, 9.5, [4, 2, 1], [0.1, 1.0])
    assert not point.HasField("min")


def test_many_measurements_go_in_several_requests_below_the_limit_of_receivers() -> None:
    labels = {f"skypool.label{number}": "x" * 40 for number in range(12)}
    measured = [Measurement(names.POWER, float(n), {**labels, "skypool.node": n}) for n in range(2 * MOST + 1)]
    made = [encode_metrics(each) for each in requests(measured, {}, 0.0, 1.0)]
    counts = [len(each.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points) for each in made]
    assert counts == [MOST, MOST, 1]
    assert max(each.ByteSize() for each in made) < 4 << 20


def test_environment_variables_of_opentelemetry_are_read() -> None:
    assert pairs(" api-key=a%20b, tenant=7,,x") == {"api-key": "a b", "tenant": "7"}
    assert resource_attributes({}) == {"service.name": "skypool"}
    environ = {"OTEL_RESOURCE_ATTRIBUTES": "team=ml,service.name=train"}
    assert resource_attributes(environ) == {"team": "ml", "service.name": "train"}
    assert resource_attributes({**environ, "OTEL_SERVICE_NAME": "other"})["service.name"] == "other"


@pytest.mark.parametrize(
    "arguments",
    [
        {"endpoint": "localhost:4317"},
        {"endpoint": "http://"},
        {"endpoint": "http://localhost:port"},
        {"endpoint": "http://localhost:99999"},
        {"endpoint": 4317},
        {"endpoint": "http://localhost:4318/v1/metrics"},
        {"endpoint": "http://localhost", "protocol": "http/protobuf"},
        {"endpoint": "http://localhost", "every": 0},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        sky.OTLP(**arguments)


def test_headers_are_not_shown() -> None:
    assert "secret" not in repr(sky.OTLP("http://localhost:4317", headers={"api-key": "secret"}))


# --- receivers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [pytest.param("grpc", marks=pytest.mark.slow), "http"])
def test_a_pool_sends_its_values_regularly_and_once_more_at_its_end(
    protocol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k1")
    heard: list[events.Event] = []
    regular, last = Inbox(), Inbox()
    with RECEIVERS[protocol](regular) as often, RECEIVERS[protocol](last) as once:
        exporters = [sky.OTLP(often, protocol, every=0.2), sky.OTLP(once, protocol, every="1h", headers={"A-B": "k2"})]
        pool = sky.ComputePool(name="p", slots=2, console="off", metrics=exporters)
        pool.events.listen(heard.append)
        with pool:
            assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]
            eventually(
                lambda: regular.requests and regular.values(names.CALLS, "skypool.outcome")["ok",] == 3, 60, "the calls"
            )
            assert last.requests == []
            assert regular.values(names.NODES, "skypool.state")["ready",] == 1
        assert len(last.requests) == 1
        sent = len(regular.requests)
        for inbox in (regular, last):
            assert inbox.resource == {"service.name": "skypool"}
            assert inbox.metrics().keys() <= {each.name for each in names.ALL}
            assert inbox.values(names.NODES, "skypool.state")["ended",] == 1
            [duration] = inbox.metrics()["skypool.call.duration"].histogram.data_points
            assert (duration.count, attributes(duration.attributes)) == (3, {"skypool.pool": "p"})
        assert regular.headers[0]["api-key"] == "k1"
        assert (last.headers[0]["a-b"], last.headers[0].get("api-key")) == ("k2", None)
        assert not [each for each in threading.enumerate() if "metrics" in each.name]
        time.sleep(0.5)
        assert len(regular.requests) == sent
    assert [each.text for each in heard if isinstance(each, events.Notice)] == []


@pytest.mark.slow
def test_receivers_get_what_a_pool_with_gpus_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path)
    nvml = FakeNvml(tmp_path, tmp_path)
    nvml.say(0, count=2, busy=88, memory=2048)
    nvml.say(1, busy=12)
    script = Script()
    monkeypatch.setattr(clock, "now", script)
    over_grpc, over_http = Inbox(), Inbox()
    stock = [Stock(usd_per_hour=36.0, accelerator="H100:2")]
    with (
        CloudWithCards(tmp_path / "cloud", stock, tells_billing=False) as cloud,
        grpc_receiver(over_grpc) as first,
        http_receiver(over_http) as second,
    ):
        exporters = [sky.OTLP(first, every=0.3), sky.OTLP(second, "http", every=0.3)]
        with Watched(cloud, accelerator="H100:2", name="p", metrics=exporters) as pool:
            with pytest.raises(ZeroDivisionError):
                pool.submit(divmod, 1, 0).result(60)
            script.pass_(100.0)
            call = pool.send(where(str(tmp_path / "go")), node=0)  # it keeps the node when a card is lost
            nvml.xid(0, 45)
            nvml.say(1, lost=1)
            for inbox in (over_grpc, over_http):
                eventually(lambda inbox=inbox: lost(inbox), 60, "the lost card")  # type: ignore[misc]
                # a replacement may be there already, with the same cards
                busy = inbox.values(names.GPU_UTILIZATION, "skypool.node", "hw.name")
                assert {name: share for (node, name), share in busy.items() if node == 0} == {"cuda 0": 0.88}
                used = inbox.values(names.GPU_MEMORY_USAGE, "skypool.node", "hw.id")
                assert {card: size for (node, card), size in used.items() if node == 0} == {"cuda-0": 2048 << 20}
                assert inbox.values(names.ERRORS, "skypool.node", "hw.name", "error.type")[0, "cuda 0", "xid"] == 1
                assert inbox.values(names.DEVICE_XIDS, "skypool.node", "skypool.xid") == {(0, 45): 1}
                assert inbox.values(names.CALLS, "skypool.outcome") == {("ok",): 0, ("failed",): 1, ("cancelled",): 0}
                assert inbox.values(names.COST, "skypool.node", "skypool.provider")[0, "fake"] == pytest.approx(1.0)
                assert inbox.values(names.IDLE_COST, "skypool.node")[0,] == pytest.approx(1.0)
            nvml.say(1, lost=0)
            (tmp_path / "go").touch()
            assert call.result(60) == 0
        usd = pool.receipt.usd
    assert [each.text for each in pool.heard(events.Notice) if "metrics" in each.text] == []
    assert sum(over_grpc.values(names.COST, "skypool.node").values()) == pytest.approx(usd)
    assert sum(over_http.values(names.COST, "skypool.node").values()) == pytest.approx(usd)
    assert set(over_grpc.values(names.COST_RATE, "skypool.node").values()) == {0.0}


def lost(inbox: Inbox) -> bool:
    """Return True if the last request says that the second card of node 0 is lost, and has the error of the first."""
    found = inbox.metrics() if inbox.requests else {}
    if not {"hw.status", "hw.gpu.utilization", "skypool.device.xids"} <= found.keys():
        return False
    return inbox.values(names.STATUS, "skypool.node", "hw.name", "hw.state").get((0, "cuda 1", "failed")) == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_request_that_a_busy_endpoint_refuses_is_repeated_and_nobody_is_told(
    protocol: Any,
) -> None:
    inbox = Inbox()
    inbox.busy = 1
    with RECEIVERS[protocol](inbox) as address, told(sky.OTLP(address, protocol, every=0.2)) as heard:
        eventually(lambda: inbox.requests, 60, "the request, repeated")
    assert inbox.busy == 0
    assert heard == []


def test_texts_that_utf8_cannot_encode_are_sent_as_escapes() -> None:
    [data] = requests([Measurement(names.CALLS, 1, {"skypool.outcome": "caf\udce9"})], {"team": "\udce9"}, 0.0, 1.0)
    inbox = Inbox()
    inbox.requests.append(encode_metrics(data))
    assert inbox.values(names.CALLS, "skypool.outcome") == {("caf\\udce9",): 1}
    assert inbox.resource == {"team": "\\udce9"}


@pytest.mark.slow
def test_an_endpoint_may_have_a_certificate_that_the_system_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*made.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    for trusted, said in ((certificate, []), (Path(os.devnull), ["CERTIFICATE_VERIFY_FAILED"])):
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        inbox = Inbox()
        with (
            http_receiver(inbox, context=context) as address,
            told(sky.OTLP(address, "http", every="1h")) as heard,
        ):
            pass
        assert len(inbox.requests) == 1 - len(said)
        assert [word in text for word, text in zip(said, heard, strict=True)] == [True] * len(said)


# --- endpoints that do not work ------------------------------------------------------------------------------

PROGRAM = """
import sys, time
import skypool as sky
exporter = sky.OTLP(sys.argv[1], sys.argv[2], every=0.1)
with sky.ComputePool(name="p", console="plain", slots=1, metrics=exporter) as pool:
    assert pool.submit(abs, -3).result(60) == 3
    time.sleep(0.5)
    began = time.monotonic()
print(time.monotonic() - began)
"""


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize(
    "listens",
    [pytest.param(False, id="refuses"), pytest.param(True, id="never-answers", marks=pytest.mark.serial)],
)
@pytest.mark.slow
def test_an_endpoint_that_cannot_be_reached_is_told_once_and_delays_the_end_a_little(
    protocol: str, listens: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        argv = [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{port}", protocol]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("metrics cannot be sent") == 1, done.stderr
    assert all(re.match(r"\d\d:\d\d:\d\d p  ", each) for each in done.stderr.splitlines()), done.stderr
    assert (
        float(done.stdout) < 10.0
    )  # at most 5 s for the metrics; the rest is what a pool's end takes on a slow machine


@pytest.mark.parametrize(("status", "says"), [(401, "HTTP status 401"), (302, "HTTP status 302")])
def test_an_endpoint_that_refuses_is_told_with_its_reason(status: int, says: str) -> None:
    inbox = Inbox()
    with http_receiver(inbox, status) as address:
        assert_told_once(sky.OTLP(address, "http", every=0.05), inbox, says)


def test_values_that_a_receiver_drops_are_told_with_its_reason() -> None:
    inbox = Inbox()
    with grpc_receiver(inbox, rejected=3) as address:
        assert_told_once(sky.OTLP(address, every=0.05), inbox, "dropped 3 values: too old")


def assert_told_once(exporter: sky.OTLP, inbox: Inbox, says: str) -> None:
    with told(exporter) as heard:
        eventually(lambda: len(inbox.requests) > 2, 60, "three requests")
    [notice] = heard
    assert says in notice


@contextlib.contextmanager
def told(exporter: sky.OTLP) -> Iterator[list[str]]:
    """Run a pool, and yield the notices that its user gets, which are complete after the block."""
    heard: list[str] = []
    pool = sky.ComputePool(console="off", metrics=exporter)
    pool.events.listen(lambda event: heard.append(event.text) if isinstance(event, events.Notice) else None)
    with pool:
        yield heard


def test_an_answer_without_an_end_is_read_in_part() -> None:
    closed = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        """A receiver that answers for as long as it is listened to."""

        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(bytes(1 << 16))
            closed.set()

        def log_message(self, format: str, *args: object) -> None: ...

    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        with told(sky.OTLP(address, "http", every=0.05)) as heard:
            eventually(closed.is_set, 60, "the end of the connection")
    [notice] = heard
    assert "not that of an OTLP endpoint" in notice


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_log_of_the_program_has_what_its_own_exporters_say_and_nothing_of_the_pools(
    protocol: Any, caplog: pytest.LogCaptureFixture
) -> None:
    package = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.metric_exporter")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    with told(sky.OTLP(address, protocol, every=0.05)) as heard:
        pass
    assert len(heard) == 1
    assert [each for each in caplog.records if each.name.startswith("opentelemetry")] == []
    [data] = requests([Measurement(names.CALLS, 1, {})], {}, 0.0, 1.0)
    package.OTLPMetricExporter(address, timeout=0.5).export(data)
    assert [each for each in caplog.records if each.name.startswith("opentelemetry")]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_without_its_packages_the_extra_that_has_them_is_named(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{protocol}.metric_exporter", None)
    pool = sky.ComputePool(console="off", metrics=sky.OTLP("http://localhost:4317", protocol))
    with pytest.raises(UsageError, match=rf"-otlp-proto-{protocol} is not .*pip install 'skypool\[metrics\]'"):
        pool.start()


def test_a_setting_in_the_environment_that_opentelemetry_refuses_is_told_before_anything_is_rented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli")
    pool = sky.ComputePool(console="off", metrics=sky.OTLP("http://localhost:4317"))
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_COMPRESSION"):
        pool.start()


@pytest.mark.slow
def test_a_pool_that_ends_at_exit_sends_its_last_values() -> None:
    inbox = Inbox()
    program = """
import sys
import skypool as sky
pool = sky.ComputePool(console="plain", slots=1, metrics=sky.OTLP(sys.argv[1], sys.argv[2], every="1h")).start()
assert pool.submit(abs, -3).result(60) == 3
"""
    for protocol, receiver in RECEIVERS.items():
        with receiver(inbox) as address:
            argv = [sys.executable, "-c", program, address, protocol]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert inbox.values(names.CALLS, "skypool.outcome")["ok",] == 1
    assert len(inbox.requests) == 2

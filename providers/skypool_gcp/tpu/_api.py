"""Calls to the API of Cloud TPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from skypool.drivers import retry
from skypool_gcp import _api
from skypool_gcp._sdk import exceptions, field_mask_pb2, grpc, locations_pb2, tpu_transports, tpu_v2

if TYPE_CHECKING:
    from google.api_core.operation import Operation
    from google.auth.credentials import Credentials
    from google.cloud.location import locations_pb2 as locations
    from google.rpc.status_pb2 import Status

V = TypeVar("V")

_TIMEOUT = 60.0
"""Seconds for the answer to one request."""

_ZONES = 500
"""Zones that are listed at most."""

_GONE = ("NotFound",)
"""The error code for what is not there."""

_EXISTS = ("AlreadyExists", "Conflict")
"""Error codes for what is to be created and is there already."""

PASSING = ("FailedPrecondition", "BadRequest", "Aborted", "Conflict")
"""Error codes of a change that the state of a slice does not allow now."""


class _Page(Protocol):
    @property
    def unreachable(self) -> Iterable[str]: ...


Page = TypeVar("Page", bound=_Page)


@dataclass(frozen=True, slots=True)
class TpuApi:
    """The methods of Cloud TPU's API that the driver uses, for one project.

    Each raises a ProviderError where the API refuses. Lists are of all pages; they raise NoAnswer where some zones did
    not answer, as what is there is not known then. `what` says in words what is asked for, for the error's message.
    """

    settings: _api.Settings

    def zone_path(self, zone: str) -> str:
        """Return the path of a zone. "-" stands for all zones in lists."""
        return f"projects/{self.settings.billed()}/locations/{zone}"

    def queued_path(self, zone: str, slice: str) -> str:
        """Return the path of a slice's queued resource."""
        return f"{self.zone_path(zone)}/queuedResources/{slice}"

    def node_path(self, zone: str, slice: str) -> str:
        """Return the path of a slice's node."""
        return f"{self.zone_path(zone)}/nodes/{slice}"

    # --- what there is ---------------------------------------------------------------------------------------

    def zones(self) -> list[str]:
        """Return the names of the zones that have TPUs, sorted."""
        request = locations_pb2.ListLocationsRequest(name=f"projects/{self.settings.billed()}", page_size=_ZONES)

        def ask() -> locations.ListLocationsResponse:
            return _current_client().list_locations(request=request, timeout=_TIMEOUT)

        return sorted(each.location_id for each in _api.call("its zones", ask).locations)

    def accelerator_types(self, zone: str) -> list[tpu_v2.AcceleratorType]:
        request = tpu_v2.ListAcceleratorTypesRequest(parent=self.zone_path(zone))
        what = f"what TPUs {zone} has"
        pages = _pages(what, lambda: _current_client().list_accelerator_types(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.accelerator_types]

    def queued_resources(self, zone: str) -> list[tpu_v2.QueuedResource]:
        request = tpu_v2.ListQueuedResourcesRequest(parent=self.zone_path(zone))
        what = "a list of slices"
        pages = _pages(what, lambda: _current_client().list_queued_resources(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.queued_resources]

    def nodes(self, zone: str) -> list[tpu_v2.Node]:
        request = tpu_v2.ListNodesRequest(parent=self.zone_path(zone))
        what = "a list of slices"
        pages = _pages(what, lambda: _current_client().list_nodes(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.nodes]

    def queued_resource(self, zone: str, slice: str, what: str) -> tpu_v2.QueuedResource | None:
        """Return the queued resource of a slice, or None if there is none."""
        request = tpu_v2.GetQueuedResourceRequest(name=self.queued_path(zone, slice))
        return _unless(
            _GONE,
            what,
            lambda: _current_client().get_queued_resource(request=request, timeout=_TIMEOUT),
        )

    def node(self, zone: str, slice: str, what: str) -> tpu_v2.Node | None:
        """Return the node of a slice, or None if there is none."""
        request = tpu_v2.GetNodeRequest(name=self.node_path(zone, slice))
        return _unless(
            _GONE,
            what,
            lambda: _current_client().get_node(request=request, timeout=_TIMEOUT),
        )

    # --- changes ---------------------------------------------------------------------------------------------

    def create_queued_resource(
        self, zone: str, slice: str, resource: tpu_v2.QueuedResource, request_id: str, what: str
    ) -> Operation | None:
        """Ask for a slice. Return the operation, or None if the slice is there already.

        Args:
            request_id: A UUID. The API makes one slice for it, however often it is asked.
        """
        request = tpu_v2.CreateQueuedResourceRequest(
            parent=self.zone_path(zone),
            queued_resource_id=slice,
            request_id=request_id,
            queued_resource=resource,
        )
        return _unless(
            (*_GONE, *_EXISTS),
            what,
            lambda: _current_client().create_queued_resource(request=request, timeout=_TIMEOUT),
        )

    def delete_queued_resource(self, zone: str, slice: str, what: str) -> None:
        """Delete a queued resource, and its node with it. Does not raise if it is gone."""
        request = tpu_v2.DeleteQueuedResourceRequest(name=self.queued_path(zone, slice), force=True)
        _unless(
            _GONE,
            what,
            lambda: _current_client().delete_queued_resource(request=request, timeout=_TIMEOUT),
        )

    def delete_node(self, zone: str, slice: str, what: str) -> None:
        """Delete a node. Does not raise if it is gone."""
        request = tpu_v2.DeleteNodeRequest(name=self.node_path(zone, slice))
        _unless(
            _GONE,
            what,
            lambda: _current_client().delete_node(request=request, timeout=_TIMEOUT),
        )

    def set_labels(self, zone: str, slice: str, labels: Mapping[str, str], what: str) -> None:
        """Replace the labels of a node. Does nothing if it is gone, or in a state in which it cannot be changed."""
        request = tpu_v2.UpdateNodeRequest(
            node=tpu_v2.Node(name=self.node_path(zone, slice), labels=labels),
            update_mask=field_mask_pb2.FieldMask(paths=["labels"]),
        )
        _unless(
            (*_GONE, *PASSING),
            what,
            lambda: _current_client().update_node(request=request, timeout=_TIMEOUT),
        )


def is_over(operation: Operation, what: str) -> bool:
    """Return True if an operation has ended.

    Raises:
        ProviderError: The operation has failed.
    """
    over: bool = _api.call(what, operation.done)
    if over:
        error = operation.exception()
        if error is not None:
            raise _api.error_of(error, what) from error
    return over


def raise_status(status: Status, what: str) -> NoReturn:
    """Raise the error that a google.rpc.Status tells of.

    Raises:
        ProviderError: Always.
    """
    error = exceptions.from_grpc_status(status.code, status.message)
    raise _api.error_of(error, what) from error


def _pages(what: str, ask: Callable[[], Iterable[Page]]) -> list[Page]:
    """Return all pages of a list. They are read as they are iterated over, so that happens within the call.

    Raises:
        NoAnswer: Some zones did not answer.
    """
    pages = _api.call(what, lambda: list(ask()))
    silent = sorted({place for page in pages for place in page.unreachable})
    if silent:
        raise _api.REFUSALS.error(what, "Unreachable", f"no answer came from {', '.join(silent)}")
    return pages


def _unless(codes: tuple[str, ...], what: str, ask: Callable[[], V]) -> V | None:
    """Return the answer, or None if the API refuses with one of these codes."""
    return retry.quietly(partial(_api.call, what, ask), *codes)


def _current_client() -> tpu_v2.TpuClient:
    """Return the client for the endpoint and the credentials of this moment."""
    return _client(_api.endpoint("tpu") or "", _api.credentials("tpu"))


@lru_cache(maxsize=16)
def _client(address: str, credentials: Credentials) -> tpu_v2.TpuClient:
    """Return a client, which uses gRPC unless an address of HTTP is named."""
    if address.startswith("grpc://"):
        channel = grpc.insecure_channel(address.removeprefix("grpc://"))
        return tpu_v2.TpuClient(transport=tpu_transports.TpuGrpcTransport(channel=channel))
    if not address:
        return tpu_v2.TpuClient(credentials=credentials)
    return tpu_v2.TpuClient(
        credentials=credentials,
        transport="rest",
        client_options={"api_endpoint": address},
    )

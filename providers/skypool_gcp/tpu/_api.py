"""Calls the API of Cloud TPU, and raises skypool's errors if it refuses a request."""

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
"""Seconds within which a request must be answered."""

_ZONES = 500
"""The most zones in a list."""

_GONE = ("NotFound",)
"""The error code for a resource that does not exist."""

_EXISTS = ("AlreadyExists", "Conflict")
"""Error codes for a resource that is to be created and exists already."""

PASSING = ("FailedPrecondition", "BadRequest", "Aborted", "Conflict")
"""Error codes for a change that the state of a slice does not allow now."""


class _Page(Protocol):
    """A page of a list.

    Attributes:
        unreachable: The zones that did not answer.
    """

    @property
    def unreachable(self) -> Iterable[str]: ...


Page = TypeVar("Page", bound=_Page)


@dataclass(frozen=True, slots=True)
class TpuApi:
    """The methods of Cloud TPU's API that the driver uses, for one project.

    Each method raises a ProviderError if the API refuses the request. Lists contain all pages. They raise NoAnswer if a
    zone did not answer, because its items would be missing. The argument `what` names the request in words, for the
    error's message.
    """

    settings: _api.Settings

    def zone_path(self, zone: str) -> str:
        """Return the path of a zone. In lists, "-" stands for all zones."""
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

        return sorted(each.location_id for each in _api.call("the list of zones with TPUs", ask).locations)

    def accelerator_types(self, zone: str) -> list[tpu_v2.AcceleratorType]:
        """Return the types of slices that a zone has."""
        request = tpu_v2.ListAcceleratorTypesRequest(parent=self.zone_path(zone))
        what = f"the list of TPU types in {zone}"
        pages = _pages(what, lambda: _current_client().list_accelerator_types(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.accelerator_types]

    def queued_resources(self, zone: str) -> list[tpu_v2.QueuedResource]:
        """Return the queued resources of a zone; of all zones for "-"."""
        request = tpu_v2.ListQueuedResourcesRequest(parent=self.zone_path(zone))
        what = "the list of TPU slices"
        pages = _pages(what, lambda: _current_client().list_queued_resources(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.queued_resources]

    def nodes(self, zone: str) -> list[tpu_v2.Node]:
        """Return the nodes of a zone; of all zones for "-"."""
        request = tpu_v2.ListNodesRequest(parent=self.zone_path(zone))
        what = "the list of TPU nodes"
        pages = _pages(what, lambda: _current_client().list_nodes(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.nodes]

    def queued_resource(self, zone: str, slice: str, what: str) -> tpu_v2.QueuedResource | None:
        """Return the queued resource of a slice; None if there is none."""
        request = tpu_v2.GetQueuedResourceRequest(name=self.queued_path(zone, slice))
        return _unless(
            _GONE,
            what,
            lambda: _current_client().get_queued_resource(request=request, timeout=_TIMEOUT),
        )

    def node(self, zone: str, slice: str, what: str) -> tpu_v2.Node | None:
        """Return the node of a slice; None if there is none."""
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
        """Request a slice. Return the operation; None if the slice exists already.

        Args:
            zone: The zone of the slice.
            slice: The name of the slice.
            resource: The queued resource to create.
            request_id: A UUID. The API makes only one slice for it, even if the request is repeated.
            what: The request in words, for an error message.
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
        """Delete a queued resource and its node. Does not raise if it is gone."""
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
        """Replace the labels of a node.

        Does nothing if the node is gone, or in a state in which it cannot be changed.
        """
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
    """Return True if an operation has ended, and False if it is still running.

    Args:
        operation: The operation.
        what: The request in words, for an error message.

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
    """Raise the ProviderError that corresponds to a google.rpc.Status.

    Args:
        status: The status that Google returned.
        what: The request in words, for an error message.

    Raises:
        ProviderError: Always.
    """
    error = exceptions.from_grpc_status(status.code, status.message)
    raise _api.error_of(error, what) from error


def _pages(what: str, ask: Callable[[], Iterable[Page]]) -> list[Page]:
    """Return all pages of a list. They are fetched inside the call, so that all errors are translated.

    Raises:
        NoAnswer: Some zones did not answer.
    """
    pages = _api.call(what, lambda: list(ask()))
    silent = sorted({place for page in pages for place in page.unreachable})
    if silent:
        raise _api.REFUSALS.error(what, "Unreachable", f"no answer came from {', '.join(silent)}")
    return pages


def _unless(codes: tuple[str, ...], what: str, ask: Callable[[], V]) -> V | None:
    """Send a request with `ask` and return its result; None if the API refuses it with one of these error codes."""
    return retry.quietly(partial(_api.call, what, ask), *codes)


def _current_client() -> tpu_v2.TpuClient:
    """Return the client for the present endpoint and credentials."""
    return _client(_api.endpoint("tpu") or "", _api.credentials("tpu"))


@lru_cache(maxsize=16)
def _client(address: str, credentials: Credentials) -> tpu_v2.TpuClient:
    """Return a client of the API. Equal arguments give the same object.

    It uses gRPC for Google's own address ("") and for an address with "grpc://", and REST for any other.
    """
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

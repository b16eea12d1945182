"""Sends requests to the API of Google's Cloud TPU. If the API refuses a request, skypool's errors are raised.

Google has two objects for a slice of TPU hosts: a queued resource, which is the request for the slice, and a node,
which is the running slice. An operation is Google's record of a change in progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from skypool.drivers import retry
from skypool.errors import NoAnswer, ProviderError, RateLimitError
from skypool_gcp import _api
from skypool_gcp._sdk import exceptions, field_mask_pb2, grpc, locations_pb2, tpu_transports, tpu_v2
from skypool_gcp._settings import Settings

if TYPE_CHECKING:
    from google.api_core.operation import Operation
    from google.auth.credentials import Credentials
    from google.cloud.location import locations_pb2 as locations
    from google.rpc.status_pb2 import Status

V = TypeVar("V")

_TIMEOUT = 60.0
"""Seconds that one request may take. A request that takes longer counts as not answered."""

_ZONES = 500
"""The number of zones on a page of the list of zones."""

_GONE = ("NotFound",)
"""The error code for a resource that does not exist."""

_EXISTS = ("AlreadyExists", "Conflict")
"""Error codes with which the creation of a resource is refused because the resource exists already."""

PASSING = ("FailedPrecondition", "BadRequest", "Aborted", "Conflict")
"""Error codes with which a change is refused because of the present state of a slice."""


class _Page(_api.Paged, Protocol):
    """The type of a page of a list. The page lacks the items of zones in `unreachable`. For type checkers only."""

    @property
    def unreachable(self) -> Iterable[str]: ...


Page = TypeVar("Page", bound=_Page)


@dataclass(frozen=True, slots=True)
class TpuApi:
    """The requests to Cloud TPU's API that the driver sends, one method for each, for one Google Cloud project.

    Each method that sends a request blocks, with a time limit of 60 s. It raises ProviderError if the API refuses the
    request, and NoAnswer, a subclass of ProviderError, if the API does not answer. The methods `accelerator_types`,
    `queued_resources` and `nodes` also raise NoAnswer if one of the zones does not answer.

    Methods that make a change do not wait until it is complete. They do nothing if the object to change does not exist.
    The argument `slice` is the name of a slice, and `zone` is the slice's zone. The argument `what` names the request
    in words, for error messages.
    """

    settings: Settings

    def zone_path(self, zone: str) -> str:
        """Return the path of a zone, "projects/P/locations/ZONE". For lists, the zone "-" means all zones.

        Raises:
            CredentialsError: The project that pays is not known.
        """
        return f"projects/{self.settings.billed()}/locations/{zone}"

    def queued_path(self, zone: str, slice: str) -> str:
        """Return the path of the queued resource of a slice, which need not exist."""
        return f"{self.zone_path(zone)}/queuedResources/{slice}"

    def node_path(self, zone: str, slice: str) -> str:
        """Return the path of the node of a slice, which need not exist."""
        return f"{self.zone_path(zone)}/nodes/{slice}"

    # --- what there is ---------------------------------------------------------------------------------------

    def zones(self) -> list[str]:
        """Return the sorted names of the zones that have TPUs."""
        request = locations_pb2.ListLocationsRequest(name=f"projects/{self.settings.billed()}", page_size=_ZONES)

        def ask() -> Iterator[locations.ListLocationsResponse]:  # the SDK has no iterator for this list
            while True:
                page = _current_client().list_locations(request=request, timeout=_TIMEOUT)
                yield page
                request.page_token = page.next_page_token

        pages = _api.pages("the list of zones with TPUs", ask)
        return sorted(each.location_id for page in pages for each in page.locations)

    def accelerator_types(self, zone: str) -> list[tpu_v2.AcceleratorType]:
        """Return the records of the types of slices that a zone has, such as "v5p-8", in stock or not."""
        request = tpu_v2.ListAcceleratorTypesRequest(parent=self.zone_path(zone))
        what = f"the list of TPU types in {zone}"
        pages = _pages(what, lambda: _current_client().list_accelerator_types(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.accelerator_types]

    def runtime_versions(self, zone: str) -> list[tpu_v2.RuntimeVersion]:
        """Return the records of the runtime versions, which are images of TPU hosts, that a zone has."""
        request = tpu_v2.ListRuntimeVersionsRequest(parent=self.zone_path(zone))
        what = f"the list of TPU runtime versions in {zone}"
        pages = _pages(what, lambda: _current_client().list_runtime_versions(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.runtime_versions]

    def queued_resources(self, zone: str) -> list[tpu_v2.QueuedResource]:
        """Return the queued resources of a zone, or of all zones if the zone is "-"."""
        request = tpu_v2.ListQueuedResourcesRequest(parent=self.zone_path(zone))
        what = "the list of TPU slices"
        pages = _pages(what, lambda: _current_client().list_queued_resources(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.queued_resources]

    def nodes(self, zone: str) -> list[tpu_v2.Node]:
        """Return the nodes of a zone in any state, or of all zones if the zone is "-"."""
        request = tpu_v2.ListNodesRequest(parent=self.zone_path(zone))
        what = "the list of TPU nodes"
        pages = _pages(what, lambda: _current_client().list_nodes(request=request, timeout=_TIMEOUT).pages)
        return [each for page in pages for each in page.nodes]

    def queued_resource(self, zone: str, slice: str, what: str) -> tpu_v2.QueuedResource | None:
        """Return the queued resource of a slice, or None if it does not exist."""
        request = tpu_v2.GetQueuedResourceRequest(name=self.queued_path(zone, slice))
        return _unless(
            _GONE,
            what,
            lambda: _current_client().get_queued_resource(request=request, timeout=_TIMEOUT),
        )

    def node(self, zone: str, slice: str, what: str) -> tpu_v2.Node | None:
        """Return the node of a slice, or None if it does not exist."""
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
        """Request a slice, and return the operation. Return None if the slice exists, or if the API says "not found".

        Args:
            resource: The queued resource to create, which describes the slice.
            request_id: A UUID. The API makes only one slice for this UUID, even if the request is repeated.
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
        """Start to delete the queued resource of a slice together with its node, without waiting for the end."""
        request = tpu_v2.DeleteQueuedResourceRequest(name=self.queued_path(zone, slice), force=True)
        _unless(
            _GONE,
            what,
            lambda: _current_client().delete_queued_resource(request=request, timeout=_TIMEOUT),
        )

    def delete_node(self, zone: str, slice: str, what: str) -> None:
        """Start to delete the node of a slice, without waiting for the end."""
        request = tpu_v2.DeleteNodeRequest(name=self.node_path(zone, slice))
        _unless(
            _GONE,
            what,
            lambda: _current_client().delete_node(request=request, timeout=_TIMEOUT),
        )

    def set_labels(self, zone: str, slice: str, labels: Mapping[str, str], what: str) -> None:
        """Start to replace all labels of a slice's node. Labels that are not in `labels` are removed.

        Does nothing if the node is in a state in which the API does not change labels.
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
    """Read an operation's state once, and return True if it has ended.

    Raises:
        ProviderError: The operation has failed, or its state could not be read.
    """
    over: bool = _api.call(what, operation.done)
    if over:
        error = operation.exception()
        if error is not None:
            raise _final(error, what) from error
    return over


def raise_status(status: Status, what: str) -> NoReturn:
    """Raise skypool's error for a `google.rpc.Status`, the record in which Google reports why a request failed.

    Raises:
        ProviderError: Always. The code and the text of the status decide its subclass. It is neither NoAnswer nor
            RateLimitError, because a repeated request would only find the same status.
    """
    error = exceptions.from_grpc_status(status.code, status.message)
    raise _final(error, what) from error


def _final(error: BaseException, what: str) -> ProviderError:
    """Return skypool's error for one that Google has stored. It is never NoAnswer or RateLimitError: do not retry."""
    found = _api.error_of(error, what)
    if isinstance(found, (NoAnswer, RateLimitError)):
        return _api.REFUSALS.error(what, "FAILED", found.text)
    return found


def _pages(what: str, ask: Callable[[], Iterable[Page]]) -> list[Page]:
    """Return all pages of a list. Raises NoAnswer, which names the zones, if a zone did not answer."""
    pages = _api.pages(what, ask)
    silent = sorted({place for page in pages for place in page.unreachable})
    if silent:
        raise _api.REFUSALS.error(what, "Unreachable", f"no answer came from {', '.join(silent)}")
    return pages


def _unless(codes: tuple[str, ...], what: str, ask: Callable[[], V]) -> V | None:
    """Send a request and return the answer, or None if the API refuses with one of these error codes."""
    return retry.quietly(partial(_api.call, what, ask), *codes)


def _current_client() -> tpu_v2.TpuClient:
    """Return the client for the API's present address and the present credentials. It is made once for these."""
    return _client(_api.endpoint("tpu") or "", _api.credentials("tpu"))


@lru_cache(maxsize=16)
def _client(address: str, credentials: Credentials) -> tpu_v2.TpuClient:
    """Make a client for Cloud TPU. It uses gRPC for Google's own address ("") and for "grpc://…", else REST."""
    if address and not address.startswith("grpc://"):
        client = tpu_v2.TpuClient(credentials=credentials, transport="rest", client_options={"api_endpoint": address})
        _api.attend(client, "tpu")
        return client
    from skypool_gcp import _channel  # imports gRPC

    transport = tpu_transports.TpuGrpcTransport
    if address:
        channel = _channel.recorded(grpc.insecure_channel, "tpu")(address.removeprefix("grpc://"))
        return tpu_v2.TpuClient(transport=transport(channel=channel))
    create = _channel.recorded(transport.create_channel, "tpu")
    return tpu_v2.TpuClient(credentials=credentials, transport=partial(transport, channel=create))

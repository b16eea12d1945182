"""Sends requests to the API of Google Compute Engine, and finds the resources that skypool tagged.

- `ComputeApi`: the collections of the API, such as `instances`. Each is a `Collection`, with get, list, insert, delete.
- `look`: repeats a request that only reads. `insist`: makes a change and repeats it. `done`: waits for a change.
- `labelled` and `described`: list the resources (machines, disks, firewall rules, …) that belong to this user's pools.

An operation is Google's record of a change in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

from skypool.drivers import tags
from skypool.drivers.contract import Answers, lacks
from skypool.drivers.retry import patiently, quietly, soon
from skypool.errors import NoAnswer, ProviderError
from skypool_gcp import _api
from skypool_gcp._sdk import client_options, compute_v1
from skypool_gcp._settings import Settings

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

_TIMEOUT = 60.0
"""Seconds that one request may take. A request that takes longer counts as not answered."""

_PATIENCE = 20.0
"""Seconds for which a request that changes nothing is repeated while the API does not answer."""

_PASSING = ("resourceNotReady", "resourceInUseByAnotherResource")
"""Error codes with which a change is refused temporarily, while another request changes the same resource."""

_SILENT = "UNREACHABLE"
"""Code of the warning with which a list says that a zone or region did not answer."""

_LACKING = frozenset({"PARTIAL_SUCCESS", "LIST_OVERHEAD_QUOTA_EXCEED"})
"""Codes of other warnings with which a list says that it is incomplete.

The second code means that the request's filter left out too many resources.

The meanings are those of `Warning.Code` in google-cloud-compute 1.57 (read 2026-11-26).
"""

_making = threading.Lock()

P = ParamSpec("P")
V = TypeVar("V")
Client = TypeVar("Client")
Record = TypeVar("Record")


class _Labelled(Protocol):
    """The type of a record that has labels, such as a machine. For type checkers only."""

    @property
    def labels(self) -> Mapping[str, str]: ...


class _Described(Protocol):
    """The type of a record that has a description text, such as a firewall rule. For type checkers only."""

    @property
    def description(self) -> str: ...


Labelled = TypeVar("Labelled", bound=_Labelled)
Described = TypeVar("Described", bound=_Described)


class _Place(TypedDict, total=False):
    """The fields of a request that say where a resource is. Without `project`, it is in the project that pays."""

    project: str
    zone: str
    region: str


@dataclass(frozen=True, slots=True)
class Collection(Generic[Record]):
    """A collection of the API: the resources of one kind in a project, such as its machines.

    Each method blocks, and sends its request once, with a time limit of 60 s. The functions `look` and `insist` repeat
    a request. The argument `what` is the request in words, for error messages.

    All methods raise ProviderError if the API refuses the request, and its subclass NoAnswer if it does not answer.

    Attributes:
        client: The class of the SDK that has the methods of this collection.
        one: The field of a request that names one resource, such as "disk".
        words: The resources in words, for error messages.
        many: The field with the resources in each part of a list, for a list with a part for each zone and region. ""
            for a list without parts.
        may_lack: True if `list` may leave out a zone or region that does not answer.
    """

    settings: Settings
    client: Callable[..., Any]
    one: str
    words: str
    many: str = ""
    may_lack: bool = False

    def get(self, name: str, what: str = "", **place: Unpack[_Place]) -> Record:
        """Return the record of one resource. Raise ProviderError with the code "notFound" if it does not exist."""
        record: Record = self.send("get", what or f"the {self.one} {name}", **place, **{self.one: name})
        return record

    def list(self, filter: str = "") -> Answers[Record]:
        """Return the records of all pages, and of all zones and regions, or [] if nothing matches.

        If a zone or region does not answer, NoAnswer is raised. With `may_lack`, the zone or region is left out
        instead, a RuntimeWarning is issued, and `lacks` of the result is ("offers",).

        Args:
            filter: A filter expression of the API, such as 'name eq "skypool-.*"'. "" means all records.
        """
        what = f"the list of {self.words}"
        ask = self._ready("aggregated_list" if self.many else "list", {"filter": filter} if filter else {})
        pages = _api.pages(what, lambda: ask().pages, project=self.settings.billed())
        if not self.many:
            if missing := _missing(what, pages):
                raise missing
            return Answers(each for page in pages for each in page.items)
        parts = [each for page in pages for each in page.items.items()]
        silent = {where for where, part in parts if part.warning.code == _SILENT}
        silent.update(where for page in pages for where in page.unreachables)
        error = _missing(what, [*pages, *(part for _, part in parts)], silent)
        if error and not self.may_lack:
            raise error
        records = (each for _, part in parts for each in getattr(part, self.many))
        return Answers(records, [lacks("offers", error)] if error else ())

    def insert(
        self, record: Record, what: str, *, request_id: str = "", **place: Unpack[_Place]
    ) -> compute_v1.Operation | None:
        """Start to create a resource, and return the operation.

        Returns None if there is a resource of this name already. It is not changed.

        Args:
            record: The resource to create.
            request_id: A UUID. The API creates only one resource for it, even if the request is sent again. "" for
                none.
        """
        once = {"request_id": request_id} if request_id else {}
        insert = partial(self.send, "insert_unary", what, **place, **once, **{f"{self.one}_resource": record})
        return quietly(insert, "alreadyExists")

    def delete(self, name: str, what: str, **place: Unpack[_Place]) -> compute_v1.Operation | None:
        """Start to delete a resource, and return the operation. The API refuses this while the resource is in use.

        Returns None if the resource does not exist.
        """
        return quietly(partial(self.send, "delete_unary", what, **place, **{self.one: name}), "notFound")

    def send(self, method: str, what: str, **fields: Any) -> Any:
        """Send a request by the SDK's method of this name, and return its answer. The method must answer at once."""
        return _api.call(what, self._ready(method, fields), project=self.settings.billed())

    def _ready(self, method: str, fields: Mapping[str, Any]) -> Callable[[], Any]:
        """Return a function that sends a request, without the SDK's own retries."""
        send = getattr(_client_of(self.client), method)
        request = {"project": self.settings.billed(), **fields}
        return partial(send, request=request, retry=None, timeout=_TIMEOUT)


@dataclass(frozen=True, slots=True)
class ComputeApi:
    """The collections of Compute Engine's API that the driver uses, for one Google Cloud project."""

    settings: Settings

    @property
    def project(self) -> str:
        """The id of the project that pays.

        Raises:
            CredentialsError: Neither the settings, the environment nor the credentials name a project.
        """
        return self.settings.billed()

    # --- what Google has -------------------------------------------------------------------------------------

    @property
    def zones(self) -> Collection[compute_v1.Zone]:
        """All zones, whatever their `status` is, such as "UP"."""
        return Collection(self.settings, compute_v1.ZonesClient, "zone", "zones")

    @property
    def regions(self) -> Collection[compute_v1.Region]:
        """All regions, with the project's quotas there."""
        return Collection(self.settings, compute_v1.RegionsClient, "region", "regions")

    @property
    def machine_types(self) -> Collection[compute_v1.MachineType]:
        """Each machine type once for each zone that has it. The list may lack zones that do not answer."""
        client = compute_v1.MachineTypesClient
        return Collection(self.settings, client, "machine_type", "machine types", "machine_types", may_lack=True)

    @property
    def accelerator_types(self) -> Collection[compute_v1.AcceleratorType]:
        """Each type of GPU once for each zone where machines can get it. The list may lack zones that do not answer."""
        client, kind = compute_v1.AcceleratorTypesClient, "accelerator_type"
        return Collection(self.settings, client, kind, "accelerator types", "accelerator_types", may_lack=True)

    @property
    def images(self) -> Collection[compute_v1.Image]:
        """Disk images. The argument `project` of `get` is the one that has the image."""
        return Collection(self.settings, compute_v1.ImagesClient, "image", "images")

    # --- what the project has --------------------------------------------------------------------------------

    @property
    def networks(self) -> Collection[compute_v1.Network]:
        """Networks, which have subnetworks in regions."""
        return Collection(self.settings, compute_v1.NetworksClient, "network", "networks")

    @property
    def subnetworks(self) -> Collection[compute_v1.Subnetwork]:
        """Subnetworks, in all regions."""
        return Collection(self.settings, compute_v1.SubnetworksClient, "subnetwork", "subnetworks", "subnetworks")

    @property
    def firewalls(self) -> Collection[compute_v1.Firewall]:
        """Firewall rules."""
        return Collection(self.settings, compute_v1.FirewallsClient, "firewall", "firewall rules")

    @property
    def reservations(self) -> Collection[compute_v1.Reservation]:
        """Reservations, in all zones."""
        return Collection(self.settings, compute_v1.ReservationsClient, "reservation", "reservations", "reservations")

    @property
    def instances(self) -> Collection[compute_v1.Instance]:
        """Machines, in all zones and in any state, also stopped ones."""
        return Collection(self.settings, compute_v1.InstancesClient, "instance", "machines", "instances")

    @property
    def disks(self) -> Collection[compute_v1.Disk]:
        """Disks, in all zones and regions."""
        return Collection(self.settings, compute_v1.DisksClient, "disk", "disks", "disks")

    @property
    def policies(self) -> Collection[compute_v1.ResourcePolicy]:
        """Resource policies, which tell Google where to place machines, or how to connect their TPU chips."""
        client, kind = compute_v1.ResourcePoliciesClient, "resource_policy"
        return Collection(self.settings, client, kind, "resource policies", "resource_policies")

    @property
    def templates(self) -> Collection[compute_v1.InstanceTemplate]:
        """Global instance templates, from which managed groups create their machines."""
        return Collection(self.settings, compute_v1.InstanceTemplatesClient, "instance_template", "templates")

    @property
    def groups(self) -> Collection[compute_v1.InstanceGroupManager]:
        """Managed instance groups, whose machines Google creates and deletes together."""
        client, kind = compute_v1.InstanceGroupManagersClient, "instance_group_manager"
        return Collection(self.settings, client, kind, "instance groups", "instance_group_managers")

    # --- requests beside those of a collection ---------------------------------------------------------------

    def project_record(self) -> compute_v1.Project:
        """Return Google's record of the project, which contains its quotas."""
        client = compute_v1.ProjectsClient
        projects: Collection[compute_v1.Project] = Collection(self.settings, client, "project", "projects")
        return projects.get(self.project, "the record of the project")

    def newest_image(self, project: str, family: str) -> compute_v1.Image:
        """Return the record of an image family's newest image. `project` is the one that contains the family."""
        what = f"the image family {family}"
        image: compute_v1.Image = self.images.send("get_from_family", what, project=project, family=family)
        return image

    def set_labels(
        self, zone: str, name: str, labels: Mapping[str, str], fingerprint: str, what: str
    ) -> compute_v1.Operation | None:
        """Start to replace all labels of a machine. Returns None if the machine does not exist.

        Args:
            fingerprint: The `label_fingerprint` of the machine's record from which the present labels were read.

        Raises:
            ProviderError: Its `code` is "conditionNotMet" if the labels have changed since the fingerprint was read.
        """
        wanted = compute_v1.InstancesSetLabelsRequest(label_fingerprint=fingerprint, labels=labels)
        fields = {"zone": zone, "instance": name, "instances_set_labels_request_resource": wanted}
        return quietly(partial(self.instances.send, "set_labels_unary", what, **fields), "notFound")

    def operation(self, begun: compute_v1.Operation) -> compute_v1.Operation:
        """Return the present record of the operation `begun`. If it has failed, the record has the error."""
        place: _Place = {}
        client: Callable[..., Any] = compute_v1.GlobalOperationsClient
        if begun.zone:
            client, place = compute_v1.ZoneOperationsClient, {"zone": _api.last_part(begun.zone)}
        elif begun.region:
            client, place = compute_v1.RegionOperationsClient, {"region": _api.last_part(begun.region)}
        operations: Collection[compute_v1.Operation] = Collection(self.settings, client, "operation", "operations")
        return operations.get(begun.name, "the state of an operation", **place)


def _missing(what: str, parts: Iterable[Any], silent: Iterable[str] = ()) -> ProviderError | None:
    """Return the error for a list if its `parts` have warnings or `silent` places did not answer; else None."""
    codes = {part.warning.code for part in parts}
    if silent or _SILENT in codes:
        places = ", ".join(sorted(silent)) or "a part of Google Cloud"
        return _api.REFUSALS.error(what, "Unreachable", f"no answer came from {places}")
    if lacking := sorted(codes & _LACKING):
        return _api.REFUSALS.incomplete(what, f"it has the warning {', '.join(lacking)}")
    return None


def _client_of(kind: Callable[..., Client]) -> Client:
    """Return the shared client of the SDK for one kind of resource. `kind` is its class, such as `DisksClient`."""
    with _making:
        client: Client = _client(_api.endpoint("compute"), kind, _api.credentials("compute"))
    return client


@lru_cache(maxsize=64)
def _client(endpoint: str | None, kind: Any, credentials: Credentials) -> Any:
    """Make a client of the SDK, and cache it. An `endpoint` of None means Google's own address."""
    options = client_options.ClientOptions(api_endpoint=endpoint)
    client = kind(credentials=credentials, client_options=options)
    _api.attend(client, "compute")
    return client


# --- retries -------------------------------------------------------------------------------------------------


def look(method: Callable[P, V], *args: P.args, **kwargs: P.kwargs) -> V:
    """Call `method`, which only reads, with these arguments, and return its result.

    The call is repeated for up to 20 s, with random pauses, while the API does not answer or gets too many requests.

    Raises:
        NoAnswer, RateLimitError: The last error, if no call succeeded within 20 s.
        ProviderError: The API refused the request for another reason. The call is then not repeated.
    """
    return patiently(partial(method, *args, **kwargs), _PATIENCE)


def insist(api: ComputeApi, what: str, change: Callable[[], compute_v1.Operation | None], seconds: float) -> None:
    """Make a change, and block until it is complete.

    The change is started again if the API does not answer or refuses temporarily. The API refuses temporarily if too
    many requests were sent, if another request is changing the resource, or if the resource is still in use.

    Args:
        api: Sends the requests for the state of the change.
        what: The change in words, for error messages.
        change: Starts the change, and returns its operation, or None if there is nothing to do. May be called several
            times.
        seconds: The time limit for starting a new attempt. Each attempt waits that long for its operation, so the whole
            call may take up to twice as long.

    Raises:
        NoAnswer: The change was not complete in time, or the API did not answer.
        ProviderError: The API refused the change, or its operation failed.
    """

    def make() -> None:
        if not done(api, change(), what, seconds):
            raise NoAnswer(
                f"Google Cloud did not complete this request within {seconds:g} s: {what}; try again in a few minutes",
                provider="gcp",
            )

    patiently(make, seconds, *_PASSING)


def done(api: ComputeApi, operation: compute_v1.Operation | None, what: str, seconds: float) -> bool:
    """Wait until an operation has ended. Return True if it ended in time, and False if it still runs after `seconds`.

    Args:
        operation: None means that no change was needed: the function returns True at once.
        seconds: The longest time to wait. With 0, the state is read once.

    Raises:
        ProviderError: The operation has failed, or its state could not be read.
    """
    if operation is None:
        return True
    return bool(soon(partial(_has_ended, api, operation, what), seconds))


def _has_ended(api: ComputeApi, operation: compute_v1.Operation, what: str) -> bool:
    """Read an operation's state once, and return True if it has ended. Raises the ProviderError that it reports."""
    now = look(api.operation, operation)
    for each in now.error.errors:
        raise _api.REFUSALS.error(what, each.code, each.message, project=api.project)
    if now.http_error_status_code:
        raise _api.REFUSALS.error(what, str(now.http_error_status_code), now.http_error_message)
    return bool(now.status == compute_v1.Operation.Status.DONE)


# --- tags ----------------------------------------------------------------------------------------------------


def labelled(collection: Collection[Labelled], pool: str | None = None) -> Iterator[tuple[Labelled, dict[str, str]]]:
    """Yield the resources that belong to this user's pools, each with the tags that skypool encoded in its labels.

    The request is sent when the first item is taken, and is repeated for up to 20 s if there is no answer.

    Args:
        pool: The name of a pool that was started from this machine. None means all pools of this user, started from any
            machine.

    Raises:
        ProviderError: The list could not be read.
    """
    label = f"labels.{tags.POOL}"
    exact = pool is not None and _api.labels({tags.POOL: pool}) == {tags.POOL: pool}
    for each in look(collection.list, f"{label}={pool}" if exact else f"{label}:*"):
        said = _api.said(each.labels)
        if tags.ours(said, pool):
            yield each, said


def described(collection: Collection[Described], pool: str | None = None) -> Iterator[tuple[Described, dict[str, str]]]:
    """Yield the resources that belong to this user's pools, each with the tags that skypool wrote into its description.

    This is for kinds of resources that have no labels, such as firewall rules. Only resources whose names begin with
    "skypool-" are read. The request is sent when the first item is taken, and is repeated for up to 20 s if there is no
    answer.

    Args:
        pool: The name of a pool that was started from this machine. None means all pools of this user, started from any
            machine.

    Raises:
        ProviderError: The list could not be read.
    """
    for each in look(collection.list, 'name eq "skypool-.*"'):
        said = _api.tags_in(each.description)
        if tags.ours(said, pool):
            yield each, said

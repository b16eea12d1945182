"""Sends requests to the API of Google Compute Engine, and finds the resources that skypool tagged.

- `ComputeApi`: one method for each request of the API that the driver uses.
- `look`: repeats a request that only reads. `insist`: makes a change and repeats it. `done`: waits for a change.
- `labelled` and `described`: list the resources (machines, disks, firewall rules, …) that belong to this user's pools.

An operation is Google's record of a change in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from skypool.drivers import tags
from skypool.drivers.contract import Answers, lacks
from skypool.drivers.retry import patiently, quietly, soon
from skypool.errors import NoAnswer, ProviderError
from skypool_gcp import _api
from skypool_gcp._sdk import client_options, compute_v1

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
"""Codes of other warnings with which a list says that results are missing: the second one, that its filter has left out
too many. The meanings are those of `Warning.Code` in google-cloud-compute 1.57 (read 2026-11-26).
"""

_making = threading.Lock()

P = ParamSpec("P")
V = TypeVar("V")
Client = TypeVar("Client")
Request = TypeVar("Request", contravariant=True)
Answer = TypeVar("Answer", covariant=True)
Item = TypeVar("Item", covariant=True)
Paged = TypeVar("Paged", bound=_api.Paged, covariant=True)
Page = TypeVar("Page", bound=_api.Paged)


class _Method(Protocol[Request, Answer]):
    """The type of an SDK method that sends one request and returns the answer. For type checkers only."""

    def __call__(self, request: Request, *, retry: None, timeout: float) -> Answer: ...


class _Scope(Protocol):
    """The type of one zone's or region's part of a list; `warning` says if it lacks results. For type checkers only."""

    @property
    def warning(self) -> compute_v1.Warning: ...


class _Pager(Protocol[Paged]):
    """The type of the SDK's iterator over a list, which requests the pages. For type checkers only."""

    @property
    def pages(self) -> Iterable[Paged]: ...


class _Warned(_api.Paged, Protocol):
    """The type of one page of any list of Compute Engine. For type checkers only."""

    @property
    def warning(self) -> compute_v1.Warning: ...


class _Items(_Warned, Protocol[Item]):
    """The type of one page of a list of one zone, or of things without a zone. For type checkers only."""

    @property
    def items(self) -> Iterable[Item]: ...


class _Scopes(_Warned, Protocol[Item]):
    """The type of one page of a list of all zones and regions. For type checkers only."""

    @property
    def items(self) -> Mapping[str, Item]: ...

    @property
    def unreachables(self) -> Iterable[str]: ...


class _Labelled(Protocol):
    """The type of a record that has labels, such as a machine. For type checkers only."""

    @property
    def labels(self) -> Mapping[str, str]: ...


class _Described(Protocol):
    """The type of a record that has a description text, such as a firewall rule. For type checkers only."""

    @property
    def description(self) -> str: ...


Scope = TypeVar("Scope", bound=_Scope)
Labelled = TypeVar("Labelled", bound=_Labelled)
Described = TypeVar("Described", bound=_Described)


@dataclass(frozen=True, slots=True)
class ComputeApi:
    """The requests to Compute Engine's API that the driver sends, one method for each, for one Google Cloud project.

    Each method blocks, and sends its request once, with a time limit of 60 s. The functions `look` and `insist` repeat
    a request. Methods that return a list return the items of all pages and all zones, or [] if nothing matches.

    Methods whose names begin with "insert", "delete" or "set" only start a change, and return its operation without
    waiting for its end. They return None if the resource to delete or change does not exist. They also return None if
    the resource to create exists already, which then stays as it is.

    These arguments mean the same in all methods:

    - `filter`: a filter expression of the API, such as 'name eq "skypool-.*"'.
    - `what`: the request in words, for error messages.
    - `request_id`: a UUID. The API creates only one resource for a UUID, even if the request is sent again.

    All methods raise ProviderError if the API refuses the request; its `code` is "notFound" if a single record to read
    does not exist. They raise NoAnswer, a subclass of it, if the API does not answer. Methods that return a list also
    raise NoAnswer if a zone or region does not answer. Only `machine_types` and `accelerator_types` leave that zone out
    instead.
    """

    settings: _api.Settings

    @property
    def project(self) -> str:
        """The id of the project that pays.

        Raises:
            CredentialsError: Neither the settings, the environment nor the credentials name a project.
        """
        return self.settings.billed()

    # --- what Google has -------------------------------------------------------------------------------------

    def project_record(self) -> compute_v1.Project:
        """Return Google's record of the project, which contains its quotas."""
        request = compute_v1.GetProjectRequest(project=self.project)
        return self._get("the record of the project", _client_of(compute_v1.ProjectsClient).get, request)

    def zones(self) -> list[compute_v1.Zone]:
        """Return the records of all zones, whatever their `status` is, such as "UP"."""
        request = compute_v1.ListZonesRequest(project=self.project)
        return self._list("the list of zones", _client_of(compute_v1.ZonesClient).list, request)

    def network(self, name: str) -> compute_v1.Network:
        """Return the record of the project's network of this name."""
        request = compute_v1.GetNetworkRequest(project=self.project, network=name)
        return self._get(f"the network {name}", _client_of(compute_v1.NetworksClient).get, request)

    def regions(self) -> list[compute_v1.Region]:
        """Return the records of all regions, which contain the project's quotas there."""
        request = compute_v1.ListRegionsRequest(project=self.project)
        return self._list("the list of regions", _client_of(compute_v1.RegionsClient).list, request)

    def subnetworks(self, filter: str) -> list[compute_v1.Subnetwork]:
        """Return the project's subnetworks, in all regions."""
        request = compute_v1.AggregatedListSubnetworksRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.SubnetworksClient)
        scopes = self._list_everywhere("the list of subnetworks", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.subnetworks]

    def machine_types(self, filter: str) -> Answers[compute_v1.MachineType]:
        """Return one record for each machine type in each zone that has the type.

        If a zone does not answer, its types are left out, a RuntimeWarning is issued, and `lacks` of the result is
        ("offers",).
        """
        request = compute_v1.AggregatedListMachineTypesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.MachineTypesClient)
        scopes = self._list_everywhere("the list of machine types", client.aggregated_list, request, may_lack=True)
        return Answers((each for scope in scopes for each in scope.machine_types), scopes.lacks)

    def accelerator_types(self, filter: str) -> Answers[compute_v1.AcceleratorType]:
        """Return one record for each type of GPU in each zone where machines can get it.

        If a zone does not answer, its types are left out, a RuntimeWarning is issued, and `lacks` of the result is
        ("offers",).
        """
        request = compute_v1.AggregatedListAcceleratorTypesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.AcceleratorTypesClient)
        scopes = self._list_everywhere("the list of accelerator types", client.aggregated_list, request, may_lack=True)
        return Answers((each for scope in scopes for each in scope.accelerator_types), scopes.lacks)

    def image(self, project: str, name: str) -> compute_v1.Image:
        """Return the record of one disk image. `project` is the one that contains the image."""
        request = compute_v1.GetImageRequest(project=project, image=name)
        return self._get(f"the image {name}", _client_of(compute_v1.ImagesClient).get, request)

    def newest_image(self, project: str, family: str) -> compute_v1.Image:
        """Return the record of an image family's newest image. `project` is the one that contains the family."""
        request = compute_v1.GetFromFamilyImageRequest(project=project, family=family)
        return self._get(f"the image family {family}", _client_of(compute_v1.ImagesClient).get_from_family, request)

    # --- what the project has --------------------------------------------------------------------------------

    def reservations(self, filter: str) -> list[compute_v1.Reservation]:
        """Return the project's reservations, in all zones."""
        request = compute_v1.AggregatedListReservationsRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.ReservationsClient)
        scopes = self._list_everywhere("the list of reservations", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.reservations]

    def instances(self, filter: str) -> list[compute_v1.Instance]:
        """Return the machines of the project, in all zones and in any state, also stopped ones."""
        request = compute_v1.AggregatedListInstancesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.InstancesClient)
        scopes = self._list_everywhere("the list of machines", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.instances]

    def instance(self, zone: str, name: str, what: str = "the record of a machine") -> compute_v1.Instance:
        """Return the record of one machine."""
        request = compute_v1.GetInstanceRequest(project=self.project, zone=zone, instance=name)
        return self._get(what, _client_of(compute_v1.InstancesClient).get, request)

    def disks(self, filter: str) -> list[compute_v1.Disk]:
        """Return the project's disks, in all zones and regions."""
        request = compute_v1.AggregatedListDisksRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.DisksClient)
        scopes = self._list_everywhere("the list of disks", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.disks]

    def firewalls(self, filter: str) -> list[compute_v1.Firewall]:
        """Return the project's firewall rules."""
        request = compute_v1.ListFirewallsRequest(project=self.project, filter=filter)
        return self._list("the list of firewall rules", _client_of(compute_v1.FirewallsClient).list, request)

    def policies(self, filter: str) -> list[compute_v1.ResourcePolicy]:
        """Return the project's resource policies, in all regions.

        A resource policy tells Google where to place machines, or how to connect their TPU chips.
        """
        request = compute_v1.AggregatedListResourcePoliciesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.ResourcePoliciesClient)
        scopes = self._list_everywhere("the list of resource policies", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.resource_policies]

    def templates(self, filter: str) -> list[compute_v1.InstanceTemplate]:
        """Return the project's global instance templates, from which managed groups create their machines."""
        request = compute_v1.ListInstanceTemplatesRequest(project=self.project, filter=filter)
        return self._list("the list of templates", _client_of(compute_v1.InstanceTemplatesClient).list, request)

    def groups(self, filter: str) -> list[compute_v1.InstanceGroupManager]:
        """Return the project's managed instance groups, in all zones."""
        request = compute_v1.AggregatedListInstanceGroupManagersRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.InstanceGroupManagersClient)
        scopes = self._list_everywhere("the list of instance groups", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.instance_group_managers]

    def group(self, zone: str, name: str) -> compute_v1.InstanceGroupManager | None:
        """Return the managed instance group of this name in a zone, or None if it does not exist."""
        request = compute_v1.GetInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            instance_group_manager=name,
        )
        client = _client_of(compute_v1.InstanceGroupManagersClient)
        return quietly(partial(self._get, f"the instance group {name}", client.get, request), "notFound")

    def operation(self, begun: compute_v1.Operation) -> compute_v1.Operation:
        """Fetch the present state of an operation. If it has failed, nothing is raised: the record has the error."""
        if begun.zone:
            in_zone = compute_v1.GetZoneOperationRequest(
                project=self.project,
                zone=_api.last_part(begun.zone),
                operation=begun.name,
            )
            return self._get("the state of an operation", _client_of(compute_v1.ZoneOperationsClient).get, in_zone)
        if begun.region:
            in_region = compute_v1.GetRegionOperationRequest(
                project=self.project,
                region=_api.last_part(begun.region),
                operation=begun.name,
            )
            return self._get("the state of an operation", _client_of(compute_v1.RegionOperationsClient).get, in_region)
        in_project = compute_v1.GetGlobalOperationRequest(project=self.project, operation=begun.name)
        return self._get("the state of an operation", _client_of(compute_v1.GlobalOperationsClient).get, in_project)

    # --- changes ---------------------------------------------------------------------------------------------

    def insert_instance(
        self, zone: str, instance: compute_v1.Instance, request_id: str, what: str
    ) -> compute_v1.Operation | None:
        """Start to create a machine. Returns None if a machine of this name exists already in the zone."""
        request = compute_v1.InsertInstanceRequest(
            project=self.project,
            zone=zone,
            request_id=request_id,
            instance_resource=instance,
        )
        return self._create(what, _client_of(compute_v1.InstancesClient).insert_unary, request)

    def delete_instance(self, zone: str, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a machine."""
        request = compute_v1.DeleteInstanceRequest(project=self.project, zone=zone, instance=name)
        return self._change(what, _client_of(compute_v1.InstancesClient).delete_unary, request)

    def set_labels(
        self, zone: str, name: str, labels: Mapping[str, str], fingerprint: str, what: str
    ) -> compute_v1.Operation | None:
        """Start to replace all labels of a machine; labels that are not in `labels` are removed.

        Args:
            fingerprint: The `label_fingerprint` of the machine's record from which the present labels were read.

        Raises:
            ProviderError: Its `code` is "conditionNotMet" if the labels have changed since the fingerprint was read.
        """
        request = compute_v1.SetLabelsInstanceRequest(
            project=self.project,
            zone=zone,
            instance=name,
            instances_set_labels_request_resource=compute_v1.InstancesSetLabelsRequest(
                label_fingerprint=fingerprint,
                labels=labels,
            ),
        )
        return self._change(what, _client_of(compute_v1.InstancesClient).set_labels_unary, request)

    def delete_disk(self, zone: str, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a disk in a zone. The API refuses this while a machine uses the disk."""
        request = compute_v1.DeleteDiskRequest(project=self.project, zone=zone, disk=name)
        return self._change(what, _client_of(compute_v1.DisksClient).delete_unary, request)

    def insert_firewall(self, rule: compute_v1.Firewall, what: str) -> compute_v1.Operation | None:
        """Start to create a firewall rule."""
        request = compute_v1.InsertFirewallRequest(project=self.project, firewall_resource=rule)
        return self._create(what, _client_of(compute_v1.FirewallsClient).insert_unary, request)

    def delete_firewall(self, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a firewall rule."""
        request = compute_v1.DeleteFirewallRequest(project=self.project, firewall=name)
        return self._change(what, _client_of(compute_v1.FirewallsClient).delete_unary, request)

    def insert_policy(self, region: str, policy: compute_v1.ResourcePolicy, what: str) -> compute_v1.Operation | None:
        """Start to create a resource policy. See `policies` for what it is."""
        request = compute_v1.InsertResourcePolicyRequest(
            project=self.project,
            region=region,
            resource_policy_resource=policy,
        )
        return self._create(what, _client_of(compute_v1.ResourcePoliciesClient).insert_unary, request)

    def delete_policy(self, region: str, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a resource policy. The API refuses this while the policy is in use."""
        request = compute_v1.DeleteResourcePolicyRequest(project=self.project, region=region, resource_policy=name)
        return self._change(what, _client_of(compute_v1.ResourcePoliciesClient).delete_unary, request)

    def insert_template(self, template: compute_v1.InstanceTemplate, what: str) -> compute_v1.Operation | None:
        """Start to create a global instance template."""
        request = compute_v1.InsertInstanceTemplateRequest(
            project=self.project,
            instance_template_resource=template,
        )
        return self._create(what, _client_of(compute_v1.InstanceTemplatesClient).insert_unary, request)

    def delete_template(self, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete an instance template. The API refuses this while a group uses the template."""
        request = compute_v1.DeleteInstanceTemplateRequest(project=self.project, instance_template=name)
        return self._change(what, _client_of(compute_v1.InstanceTemplatesClient).delete_unary, request)

    def insert_group(
        self, zone: str, group: compute_v1.InstanceGroupManager, request_id: str, what: str
    ) -> compute_v1.Operation | None:
        """Start to create a managed instance group, whose machines Google creates and deletes together."""
        request = compute_v1.InsertInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            request_id=request_id,
            instance_group_manager_resource=group,
        )
        return self._create(what, _client_of(compute_v1.InstanceGroupManagersClient).insert_unary, request)

    def delete_group(self, zone: str, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a managed instance group with all its machines."""
        request = compute_v1.DeleteInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            instance_group_manager=name,
        )
        return self._change(what, _client_of(compute_v1.InstanceGroupManagersClient).delete_unary, request)

    # --- calling a method of the SDK -------------------------------------------------------------------------

    def _get(self, what: str, method: _Method[Request, V], request: Request) -> V:
        """Send a request once, without the SDK's own retries, and translate the SDK's errors."""
        return _api.call(
            what,
            lambda: method(request=request, retry=None, timeout=_TIMEOUT),
            project=self.project,
        )

    def _list(self, what: str, method: _Method[Request, _Pager[_Items[V]]], request: Request) -> list[V]:
        """Return the items of all pages of a list. Raises ProviderError if the list may be incomplete."""
        pages = self._pages(what, method, request)
        if missing := _missing(what, pages):
            raise missing
        return [each for page in pages for each in page.items]

    def _pages(self, what: str, method: _Method[Request, _Pager[Page]], request: Request) -> list[Page]:
        """Return all pages of a list, which are at least one. Each page has a time limit of 60 s."""
        return _api.pages(
            what,
            lambda: method(request=request, retry=None, timeout=_TIMEOUT).pages,
            project=self.project,
        )

    def _list_everywhere(
        self,
        what: str,
        method: _Method[Request, _Pager[_Scopes[Scope]]],
        request: Request,
        *,
        may_lack: bool = False,
    ) -> Answers[Scope]:
        """Return the parts of a list of the whole project, one for each zone and region.

        Args:
            may_lack: True to issue a RuntimeWarning if a zone or region does not answer, and to set the result's
                `lacks` to ("offers",). False to raise NoAnswer then.
        """
        pages = self._pages(what, method, request)
        scopes = [each for page in pages for each in page.items.items()]
        silent = {where for where, scope in scopes if scope.warning.code == _SILENT}
        silent.update(where for page in pages for where in page.unreachables)
        error = _missing(what, [*pages, *(scope for _, scope in scopes)], silent)
        if error and not may_lack:
            raise error
        return Answers((scope for _, scope in scopes), [lacks("offers", error)] if error else ())

    def _create(self, what: str, method: _Method[Request, V], request: Request) -> V | None:
        """Send a request that creates a resource. Returns None if the resource exists already."""
        return quietly(partial(self._get, what, method, request), "alreadyExists")

    def _change(self, what: str, method: _Method[Request, V], request: Request) -> V | None:
        """Send a request that changes or deletes a resource. Returns None if the resource does not exist."""
        return quietly(partial(self._get, what, method, request), "notFound")


def _missing(what: str, parts: Iterable[_Scope], silent: Iterable[str] = ()) -> ProviderError | None:
    """Return the error for an incomplete list, or None if it has no warning that results are missing.

    `parts` are the list's pages, and its parts for zones and regions, which have the warnings. `silent` has the names
    of the zones and regions that did not answer.
    """
    codes = {part.warning.code for part in parts}
    if silent or _SILENT in codes:
        places = ", ".join(sorted(silent)) or "a part of Google Cloud"
        return _api.REFUSALS.error(what, "Unreachable", f"no answer came from {places}")
    if lacking := sorted(codes & _LACKING):
        return _api.REFUSALS.incomplete(what, f"it has the warning {', '.join(lacking)}")
    return None


def _client_of(kind: Callable[..., Client]) -> Client:
    """Return the SDK's client for one kind of resource, such as `compute_v1.DisksClient`. Safe in several threads.

    A new client is made only if the API's address or the credentials have changed. Raises CredentialsError if there are
    none.
    """
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
    """Call a function that only reads, and return its result.

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


def labelled(
    method: Callable[[str], list[Labelled]], pool: str | None = None
) -> Iterator[tuple[Labelled, dict[str, str]]]:
    """Yield the resources that belong to this user's pools, each with the tags that skypool encoded in its labels.

    The request is sent when the first item is taken, and is repeated for up to 20 s if there is no answer.

    Args:
        method: A method of `ComputeApi` that lists resources for a filter, such as `ComputeApi.instances`.
        pool: The name of a pool that was started from this machine. None means all pools of this user, started from any
            machine.

    Raises:
        ProviderError: The list could not be read.
    """
    label = f"labels.{tags.POOL}"
    exact = pool is not None and _api.labels({tags.POOL: pool}) == {tags.POOL: pool}
    for each in look(method, f"{label}={pool}" if exact else f"{label}:*"):
        said = _api.said(each.labels)
        if tags.ours(said, pool):
            yield each, said


def described(
    method: Callable[[str], list[Described]], pool: str | None = None
) -> Iterator[tuple[Described, dict[str, str]]]:
    """Yield the resources that belong to this user's pools, each with the tags that skypool wrote into its description.

    This is for kinds of resources that have no labels, such as firewall rules. Only resources whose names begin with
    "skypool-" are read. Otherwise it works like `labelled`.
    """
    for each in look(method, 'name eq "skypool-.*"'):
        said = _api.tags_in(each.description)
        if tags.ours(said, pool):
            yield each, said

"""Calls to Compute Engine's API, with patience; and the tags of what the API can give no labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from skypool.drivers import tags
from skypool.drivers.contract import Answers, lacks
from skypool.drivers.retry import patiently, quietly, soon
from skypool.errors import NoAnswer
from skypool_gcp import _api
from skypool_gcp._sdk import client_options, compute_v1

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

_TIMEOUT = 60.0
"""Seconds for the answer to one request."""

_PATIENCE = 20.0
"""Seconds for which a request that changes nothing is sent again while there is no answer."""

_PASSING = ("resourceNotReady", "resourceInUseByAnotherResource")
"""Error codes of a change that is refused for now: what it is about is being changed by another request."""

_making = threading.Lock()

P = ParamSpec("P")
V = TypeVar("V")
Client = TypeVar("Client")
Request = TypeVar("Request", contravariant=True)
Answer = TypeVar("Answer", covariant=True)


class _Method(Protocol[Request, Answer]):
    """A method of one of the SDK's clients."""

    def __call__(self, request: Request, *, retry: None, timeout: float) -> Answer: ...


class _Scope(Protocol):
    """The part of an aggregated list that comes from one zone or region."""

    @property
    def warning(self) -> compute_v1.Warning: ...


class _Labelled(Protocol):
    @property
    def labels(self) -> Mapping[str, str]: ...


class _Described(Protocol):
    @property
    def description(self) -> str: ...


Scope = TypeVar("Scope", bound=_Scope)
Labelled = TypeVar("Labelled", bound=_Labelled)
Described = TypeVar("Described", bound=_Described)


@dataclass(frozen=True, slots=True)
class ComputeApi:
    """The methods of Compute Engine's API that the driver uses, for one project.

    Each sends its request once; `look` and `insist` send it again. Lists are of all pages. Each method raises a
    ProviderError where the API refuses, and NoAnswer where a zone or region did not answer. `what` says in words what
    is asked for, for the error's message.

    Methods that create, delete or change something return the operation that was begun. They return None if there is
    nothing to do: what is to be created is there already, or what is to be deleted or changed is gone.
    """

    settings: _api.Settings

    @property
    def project(self) -> str:
        return self.settings.billed()

    # --- what Google has -------------------------------------------------------------------------------------

    def project_record(self) -> compute_v1.Project:
        """Return the project, with its quotas."""
        request = compute_v1.GetProjectRequest(project=self.project)
        return self._get("project", _client_of(compute_v1.ProjectsClient).get, request)

    def zones(self) -> list[compute_v1.Zone]:
        request = compute_v1.ListZonesRequest(project=self.project)
        return self._list("zones", _client_of(compute_v1.ZonesClient).list, request)

    def network(self, name: str) -> compute_v1.Network:
        request = compute_v1.GetNetworkRequest(project=self.project, network=name)
        return self._get("network", _client_of(compute_v1.NetworksClient).get, request)

    def machine_types(self, filter: str) -> Answers[compute_v1.MachineType]:
        """Return machine types of all zones. A zone that does not answer is missing, with a warning."""
        request = compute_v1.AggregatedListMachineTypesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.MachineTypesClient)
        scopes = self._list_everywhere("types", client.aggregated_list, request, may_lack=True)
        return Answers((each for scope in scopes for each in scope.machine_types), scopes.lacks)

    def accelerator_types(self, filter: str) -> Answers[compute_v1.AcceleratorType]:
        """Return types of accelerators of all zones. A zone that does not answer is missing, with a warning."""
        request = compute_v1.AggregatedListAcceleratorTypesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.AcceleratorTypesClient)
        scopes = self._list_everywhere("accelerators", client.aggregated_list, request, may_lack=True)
        return Answers((each for scope in scopes for each in scope.accelerator_types), scopes.lacks)

    def image(self, project: str, name: str) -> compute_v1.Image:
        request = compute_v1.GetImageRequest(project=project, image=name)
        return self._get("image", _client_of(compute_v1.ImagesClient).get, request)

    def newest_image(self, project: str, family: str) -> compute_v1.Image:
        """Return the newest image of a family."""
        request = compute_v1.GetFromFamilyImageRequest(project=project, family=family)
        return self._get("family", _client_of(compute_v1.ImagesClient).get_from_family, request)

    # --- what the project has --------------------------------------------------------------------------------

    def reservations(self, filter: str) -> list[compute_v1.Reservation]:
        request = compute_v1.AggregatedListReservationsRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.ReservationsClient)
        scopes = self._list_everywhere("reservations", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.reservations]

    def instances(self, filter: str) -> list[compute_v1.Instance]:
        request = compute_v1.AggregatedListInstancesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.InstancesClient)
        scopes = self._list_everywhere("instances", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.instances]

    def instance(self, zone: str, name: str, what: str = "instance") -> compute_v1.Instance:
        request = compute_v1.GetInstanceRequest(project=self.project, zone=zone, instance=name)
        return self._get(what, _client_of(compute_v1.InstancesClient).get, request)

    def disks(self, filter: str) -> list[compute_v1.Disk]:
        request = compute_v1.AggregatedListDisksRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.DisksClient)
        scopes = self._list_everywhere("disks", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.disks]

    def firewalls(self, filter: str) -> list[compute_v1.Firewall]:
        request = compute_v1.ListFirewallsRequest(project=self.project, filter=filter)
        return self._list("firewalls", _client_of(compute_v1.FirewallsClient).list, request)

    def policies(self, filter: str) -> list[compute_v1.ResourcePolicy]:
        """Return resource policies: placements and workload policies."""
        request = compute_v1.AggregatedListResourcePoliciesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.ResourcePoliciesClient)
        scopes = self._list_everywhere("policies", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.resource_policies]

    def templates(self, filter: str) -> list[compute_v1.InstanceTemplate]:
        request = compute_v1.ListInstanceTemplatesRequest(project=self.project, filter=filter)
        return self._list("templates", _client_of(compute_v1.InstanceTemplatesClient).list, request)

    def groups(self, filter: str) -> list[compute_v1.InstanceGroupManager]:
        request = compute_v1.AggregatedListInstanceGroupManagersRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.InstanceGroupManagersClient)
        scopes = self._list_everywhere("groups", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.instance_group_managers]

    def group(self, zone: str, name: str) -> compute_v1.InstanceGroupManager | None:
        """Return a managed instance group, or None if there is none of this name."""
        request = compute_v1.GetInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            instance_group_manager=name,
        )
        client = _client_of(compute_v1.InstanceGroupManagersClient)
        return quietly(partial(self._get, "group", client.get, request), "notFound")

    def operation(self, begun: compute_v1.Operation) -> compute_v1.Operation:
        """Return an operation as it is now."""
        if begun.zone:
            in_zone = compute_v1.GetZoneOperationRequest(
                project=self.project,
                zone=_api.last_part(begun.zone),
                operation=begun.name,
            )
            return self._get("zone operation", _client_of(compute_v1.ZoneOperationsClient).get, in_zone)
        if begun.region:
            in_region = compute_v1.GetRegionOperationRequest(
                project=self.project,
                region=_api.last_part(begun.region),
                operation=begun.name,
            )
            return self._get("region operation", _client_of(compute_v1.RegionOperationsClient).get, in_region)
        in_project = compute_v1.GetGlobalOperationRequest(project=self.project, operation=begun.name)
        return self._get("operation", _client_of(compute_v1.GlobalOperationsClient).get, in_project)

    # --- changes ---------------------------------------------------------------------------------------------

    def insert_instance(
        self, zone: str, instance: compute_v1.Instance, request_id: str, what: str
    ) -> compute_v1.Operation | None:
        """Create a machine.

        Args:
            request_id: A UUID. The API makes one machine for it, however often it is asked.
        """
        request = compute_v1.InsertInstanceRequest(
            project=self.project,
            zone=zone,
            request_id=request_id,
            instance_resource=instance,
        )
        return self._create(what, _client_of(compute_v1.InstancesClient).insert_unary, request)

    def delete_instance(self, zone: str, name: str, what: str) -> compute_v1.Operation | None:
        request = compute_v1.DeleteInstanceRequest(project=self.project, zone=zone, instance=name)
        return self._change(what, _client_of(compute_v1.InstancesClient).delete_unary, request)

    def set_labels(
        self, zone: str, name: str, labels: Mapping[str, str], fingerprint: str, what: str
    ) -> compute_v1.Operation | None:
        """Replace all labels of a machine.

        Args:
            fingerprint: The `label_fingerprint` with which the labels were read. The API refuses the request with
                "conditionNotMet" if somebody else changed them since.
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
        request = compute_v1.DeleteDiskRequest(project=self.project, zone=zone, disk=name)
        return self._change(what, _client_of(compute_v1.DisksClient).delete_unary, request)

    def insert_firewall(self, rule: compute_v1.Firewall, what: str) -> compute_v1.Operation | None:
        request = compute_v1.InsertFirewallRequest(project=self.project, firewall_resource=rule)
        return self._create(what, _client_of(compute_v1.FirewallsClient).insert_unary, request)

    def delete_firewall(self, name: str, what: str) -> compute_v1.Operation | None:
        request = compute_v1.DeleteFirewallRequest(project=self.project, firewall=name)
        return self._change(what, _client_of(compute_v1.FirewallsClient).delete_unary, request)

    def insert_policy(self, region: str, policy: compute_v1.ResourcePolicy, what: str) -> compute_v1.Operation | None:
        request = compute_v1.InsertResourcePolicyRequest(
            project=self.project,
            region=region,
            resource_policy_resource=policy,
        )
        return self._create(what, _client_of(compute_v1.ResourcePoliciesClient).insert_unary, request)

    def delete_policy(self, region: str, name: str, what: str) -> compute_v1.Operation | None:
        request = compute_v1.DeleteResourcePolicyRequest(project=self.project, region=region, resource_policy=name)
        return self._change(what, _client_of(compute_v1.ResourcePoliciesClient).delete_unary, request)

    def insert_template(self, template: compute_v1.InstanceTemplate, what: str) -> compute_v1.Operation | None:
        request = compute_v1.InsertInstanceTemplateRequest(
            project=self.project,
            instance_template_resource=template,
        )
        return self._create(what, _client_of(compute_v1.InstanceTemplatesClient).insert_unary, request)

    def delete_template(self, name: str, what: str) -> compute_v1.Operation | None:
        request = compute_v1.DeleteInstanceTemplateRequest(project=self.project, instance_template=name)
        return self._change(what, _client_of(compute_v1.InstanceTemplatesClient).delete_unary, request)

    def insert_group(
        self, zone: str, group: compute_v1.InstanceGroupManager, request_id: str, what: str
    ) -> compute_v1.Operation | None:
        """Create a managed instance group.

        Args:
            request_id: A UUID. The API makes one group for it, however often it is asked.
        """
        request = compute_v1.InsertInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            request_id=request_id,
            instance_group_manager_resource=group,
        )
        return self._create(what, _client_of(compute_v1.InstanceGroupManagersClient).insert_unary, request)

    def delete_group(self, zone: str, name: str, what: str) -> compute_v1.Operation | None:
        """Delete a managed instance group, and its machines with it."""
        request = compute_v1.DeleteInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            instance_group_manager=name,
        )
        return self._change(what, _client_of(compute_v1.InstanceGroupManagersClient).delete_unary, request)

    # --- how a method is called ------------------------------------------------------------------------------

    def _get(self, what: str, method: _Method[Request, V], request: Request) -> V:
        return _api.call(
            what,
            lambda: method(request=request, retry=None, timeout=_TIMEOUT),
            project=self.project,
        )

    def _list(self, what: str, method: _Method[Request, Iterable[V]], request: Request) -> list[V]:
        """Return all items. Their pages are read as they are iterated over, so that happens within the call."""
        return _api.call(
            what,
            lambda: list(method(request=request, retry=None, timeout=_TIMEOUT)),
            project=self.project,
        )

    def _list_everywhere(
        self,
        what: str,
        method: _Method[Request, Iterable[tuple[str, Scope]]],
        request: Request,
        *,
        may_lack: bool = False,
    ) -> Answers[Scope]:
        """Return what each zone and region has.

        Args:
            may_lack: If a zone or region does not answer, warn instead of raising. The result lacks "offers" then.

        Raises:
            NoAnswer: A zone or region did not answer.
        """
        scopes = self._list(what, method, request)
        lacking: list[str] = []
        silent = sorted(where for where, scope in scopes if scope.warning.code == "UNREACHABLE")
        if silent:
            error = _api.REFUSALS.error(what, "Unreachable", f"no answer came from {', '.join(silent)}")
            if not may_lack:
                raise error
            lacking.append(lacks("offers", error))
        return Answers((scope for _, scope in scopes), lacking)

    def _create(self, what: str, method: _Method[Request, V], request: Request) -> V | None:
        return quietly(partial(self._get, what, method, request), "alreadyExists")

    def _change(self, what: str, method: _Method[Request, V], request: Request) -> V | None:
        return quietly(partial(self._get, what, method, request), "notFound")


def _client_of(kind: Callable[..., Client]) -> Client:
    """Return the client of one kind of resource, for the endpoint and the credentials of this moment.

    Args:
        kind: The class of the client.
    """
    with _making:
        client: Client = _client(_api.endpoint("compute"), kind, _api.credentials("compute"))
    return client


@lru_cache(maxsize=64)
def _client(endpoint: str | None, kind: Any, credentials: Credentials) -> Any:
    options = client_options.ClientOptions(api_endpoint=endpoint)
    return kind(credentials=credentials, client_options=options)


# --- patience ------------------------------------------------------------------------------------------------


def look(method: Callable[P, V], *args: P.args, **kwargs: P.kwargs) -> V:
    """Call a method that changes nothing, again for some seconds while there is no answer."""
    return patiently(partial(method, *args, **kwargs), _PATIENCE)


def insist(api: ComputeApi, what: str, change: Callable[[], compute_v1.Operation | None], seconds: float) -> None:
    """Make a change and wait until it is made. Make it again as long as it is refused for now.

    Raises:
        NoAnswer: The change is not made within so many seconds.
    """

    def make() -> None:
        if not done(api, change(), what, seconds):
            raise NoAnswer(f"Google Cloud has not made {what} within {seconds:g} s; try again", provider="gcp")

    patiently(make, seconds, *_PASSING)


def done(api: ComputeApi, operation: compute_v1.Operation | None, what: str, seconds: float) -> bool:
    """Wait for an operation, and return True if it ended within so many seconds.

    Args:
        operation: None for a change that there was no need for, which counts as ended.

    Raises:
        ProviderError: The operation has failed.
    """
    if operation is None:
        return True
    return bool(soon(partial(_has_ended, api, operation, what), seconds))


def _has_ended(api: ComputeApi, operation: compute_v1.Operation, what: str) -> bool:
    """Return True if an operation has ended.

    Raises:
        ProviderError: The operation has failed.
    """
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
    """Yield what this user's pools have of one kind, with its tags as its labels tell them.

    Args:
        method: Lists resources by a filter.
        pool: Only what this pool has.
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
    """Yield what this user's pools have of a kind without labels, with its tags as its description tells them.

    Args:
        method: Lists resources by a filter.
        pool: Only what this pool has.
    """
    for each in look(method, 'name eq "skypool-.*"'):
        said = _api.tags_in(each.description)
        if tags.ours(said, pool):
            yield each, said

"""Calls Compute Engine's API, with retries, and finds resources by their tags."""

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
"""Seconds within which a request must be answered."""

_PATIENCE = 20.0
"""Seconds for which a request that changes nothing is repeated while there is no answer."""

_PASSING = ("resourceNotReady", "resourceInUseByAnotherResource")
"""Error codes with which a change is refused temporarily, while another request changes the same resource."""

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
    """A resource that has labels."""

    @property
    def labels(self) -> Mapping[str, str]: ...


class _Described(Protocol):
    """A resource that has a description."""

    @property
    def description(self) -> str: ...


Scope = TypeVar("Scope", bound=_Scope)
Labelled = TypeVar("Labelled", bound=_Labelled)
Described = TypeVar("Described", bound=_Described)


@dataclass(frozen=True, slots=True)
class ComputeApi:
    """The methods of Compute Engine's API that the driver uses, for one project.

    Each method sends its request once; `look` and `insist` repeat it. Lists contain all pages. Each method raises a
    ProviderError if the API refuses, and NoAnswer if a zone or region did not answer. The argument `what` names the
    request in words, for the error's message.

    Methods that create, delete or change a resource return the operation that was started. They return None if there is
    nothing to do: the resource to create exists already, or the resource to delete or change is gone.
    """

    settings: _api.Settings

    @property
    def project(self) -> str:
        """Return the id of the project that pays."""
        return self.settings.billed()

    # --- what Google has -------------------------------------------------------------------------------------

    def project_record(self) -> compute_v1.Project:
        """Return the project's record, with its quotas."""
        request = compute_v1.GetProjectRequest(project=self.project)
        return self._get("the record of the project", _client_of(compute_v1.ProjectsClient).get, request)

    def zones(self) -> list[compute_v1.Zone]:
        """Return the records of all zones, with their names and states."""
        request = compute_v1.ListZonesRequest(project=self.project)
        return self._list("the list of zones", _client_of(compute_v1.ZonesClient).list, request)

    def network(self, name: str) -> compute_v1.Network:
        """Return the network of this name.

        Raises:
            ProviderError: There is none.
        """
        request = compute_v1.GetNetworkRequest(project=self.project, network=name)
        return self._get(f"the network {name}", _client_of(compute_v1.NetworksClient).get, request)

    def machine_types(self, filter: str) -> Answers[compute_v1.MachineType]:
        """Return machine types of all zones. A zone that does not answer is left out, with a warning."""
        request = compute_v1.AggregatedListMachineTypesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.MachineTypesClient)
        scopes = self._list_everywhere("the list of machine types", client.aggregated_list, request, may_lack=True)
        return Answers((each for scope in scopes for each in scope.machine_types), scopes.lacks)

    def accelerator_types(self, filter: str) -> Answers[compute_v1.AcceleratorType]:
        """Return accelerator types of all zones. A zone that does not answer is left out, with a warning."""
        request = compute_v1.AggregatedListAcceleratorTypesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.AcceleratorTypesClient)
        scopes = self._list_everywhere("the list of accelerator types", client.aggregated_list, request, may_lack=True)
        return Answers((each for scope in scopes for each in scope.accelerator_types), scopes.lacks)

    def image(self, project: str, name: str) -> compute_v1.Image:
        """Return the image of this name in a project.

        Raises:
            ProviderError: There is none.
        """
        request = compute_v1.GetImageRequest(project=project, image=name)
        return self._get(f"the image {name}", _client_of(compute_v1.ImagesClient).get, request)

    def newest_image(self, project: str, family: str) -> compute_v1.Image:
        """Return the newest image of a family in a project.

        Raises:
            ProviderError: There is no such family.
        """
        request = compute_v1.GetFromFamilyImageRequest(project=project, family=family)
        return self._get(f"the image family {family}", _client_of(compute_v1.ImagesClient).get_from_family, request)

    # --- what the project has --------------------------------------------------------------------------------

    def reservations(self, filter: str) -> list[compute_v1.Reservation]:
        """Return the reservations of all zones that match a filter."""
        request = compute_v1.AggregatedListReservationsRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.ReservationsClient)
        scopes = self._list_everywhere("the list of reservations", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.reservations]

    def instances(self, filter: str) -> list[compute_v1.Instance]:
        """Return the machines of all zones that match a filter."""
        request = compute_v1.AggregatedListInstancesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.InstancesClient)
        scopes = self._list_everywhere("the list of machines", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.instances]

    def instance(self, zone: str, name: str, what: str = "the record of a machine") -> compute_v1.Instance:
        """Return the machine of this name in a zone.

        Raises:
            ProviderError: There is none; its code is "notFound".
        """
        request = compute_v1.GetInstanceRequest(project=self.project, zone=zone, instance=name)
        return self._get(what, _client_of(compute_v1.InstancesClient).get, request)

    def disks(self, filter: str) -> list[compute_v1.Disk]:
        """Return the disks of all zones and regions that match a filter."""
        request = compute_v1.AggregatedListDisksRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.DisksClient)
        scopes = self._list_everywhere("the list of disks", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.disks]

    def firewalls(self, filter: str) -> list[compute_v1.Firewall]:
        """Return the firewall rules that match a filter."""
        request = compute_v1.ListFirewallsRequest(project=self.project, filter=filter)
        return self._list("the list of firewall rules", _client_of(compute_v1.FirewallsClient).list, request)

    def policies(self, filter: str) -> list[compute_v1.ResourcePolicy]:
        """Return the resource policies of all regions that match a filter: placement policies and workload policies."""
        request = compute_v1.AggregatedListResourcePoliciesRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.ResourcePoliciesClient)
        scopes = self._list_everywhere("the list of resource policies", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.resource_policies]

    def templates(self, filter: str) -> list[compute_v1.InstanceTemplate]:
        """Return the instance templates that match a filter."""
        request = compute_v1.ListInstanceTemplatesRequest(project=self.project, filter=filter)
        return self._list("the list of templates", _client_of(compute_v1.InstanceTemplatesClient).list, request)

    def groups(self, filter: str) -> list[compute_v1.InstanceGroupManager]:
        """Return the managed instance groups of all zones that match a filter."""
        request = compute_v1.AggregatedListInstanceGroupManagersRequest(project=self.project, filter=filter)
        client = _client_of(compute_v1.InstanceGroupManagersClient)
        scopes = self._list_everywhere("the list of instance groups", client.aggregated_list, request)
        return [each for scope in scopes for each in scope.instance_group_managers]

    def group(self, zone: str, name: str) -> compute_v1.InstanceGroupManager | None:
        """Return the managed instance group of this name; None if there is none."""
        request = compute_v1.GetInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            instance_group_manager=name,
        )
        client = _client_of(compute_v1.InstanceGroupManagersClient)
        return quietly(partial(self._get, f"the instance group {name}", client.get, request), "notFound")

    def operation(self, begun: compute_v1.Operation) -> compute_v1.Operation:
        """Return the present record of an operation."""
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
        """Start to create a machine, and return the operation; None if the machine exists already.

        Args:
            zone: The zone of the machine.
            instance: The machine to create.
            request_id: A UUID. The API makes only one machine for it, even if the request is repeated.
            what: The request in words, for an error message.
        """
        request = compute_v1.InsertInstanceRequest(
            project=self.project,
            zone=zone,
            request_id=request_id,
            instance_resource=instance,
        )
        return self._create(what, _client_of(compute_v1.InstancesClient).insert_unary, request)

    def delete_instance(self, zone: str, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a machine, and return the operation; None if the machine is gone."""
        request = compute_v1.DeleteInstanceRequest(project=self.project, zone=zone, instance=name)
        return self._change(what, _client_of(compute_v1.InstancesClient).delete_unary, request)

    def set_labels(
        self, zone: str, name: str, labels: Mapping[str, str], fingerprint: str, what: str
    ) -> compute_v1.Operation | None:
        """Start to replace all labels of a machine, and return the operation; None if the machine is gone.

        Args:
            zone: The zone of the machine.
            name: The name of the machine.
            labels: The new labels.
            fingerprint: The `label_fingerprint` with which the labels were read. The API refuses the request with
                "conditionNotMet" if they have changed since.
            what: The request in words, for an error message.
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
        """Start to delete a disk, and return the operation; None if the disk is gone."""
        request = compute_v1.DeleteDiskRequest(project=self.project, zone=zone, disk=name)
        return self._change(what, _client_of(compute_v1.DisksClient).delete_unary, request)

    def insert_firewall(self, rule: compute_v1.Firewall, what: str) -> compute_v1.Operation | None:
        """Start to create a firewall rule, and return the operation; None if the rule exists already."""
        request = compute_v1.InsertFirewallRequest(project=self.project, firewall_resource=rule)
        return self._create(what, _client_of(compute_v1.FirewallsClient).insert_unary, request)

    def delete_firewall(self, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a firewall rule, and return the operation; None if the rule is gone."""
        request = compute_v1.DeleteFirewallRequest(project=self.project, firewall=name)
        return self._change(what, _client_of(compute_v1.FirewallsClient).delete_unary, request)

    def insert_policy(self, region: str, policy: compute_v1.ResourcePolicy, what: str) -> compute_v1.Operation | None:
        """Start to create a resource policy in a region, and return the operation; None if it exists already."""
        request = compute_v1.InsertResourcePolicyRequest(
            project=self.project,
            region=region,
            resource_policy_resource=policy,
        )
        return self._create(what, _client_of(compute_v1.ResourcePoliciesClient).insert_unary, request)

    def delete_policy(self, region: str, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a resource policy in a region, and return the operation; None if the policy is gone."""
        request = compute_v1.DeleteResourcePolicyRequest(project=self.project, region=region, resource_policy=name)
        return self._change(what, _client_of(compute_v1.ResourcePoliciesClient).delete_unary, request)

    def insert_template(self, template: compute_v1.InstanceTemplate, what: str) -> compute_v1.Operation | None:
        """Start to create an instance template, and return the operation; None if the template exists already."""
        request = compute_v1.InsertInstanceTemplateRequest(
            project=self.project,
            instance_template_resource=template,
        )
        return self._create(what, _client_of(compute_v1.InstanceTemplatesClient).insert_unary, request)

    def delete_template(self, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete an instance template, and return the operation; None if the template is gone."""
        request = compute_v1.DeleteInstanceTemplateRequest(project=self.project, instance_template=name)
        return self._change(what, _client_of(compute_v1.InstanceTemplatesClient).delete_unary, request)

    def insert_group(
        self, zone: str, group: compute_v1.InstanceGroupManager, request_id: str, what: str
    ) -> compute_v1.Operation | None:
        """Start to create a managed instance group, and return the operation; None if the group exists already.

        Args:
            zone: The zone of the group.
            group: The group to create.
            request_id: A UUID. The API makes only one group for it, even if the request is repeated.
            what: The request in words, for an error message.
        """
        request = compute_v1.InsertInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            request_id=request_id,
            instance_group_manager_resource=group,
        )
        return self._create(what, _client_of(compute_v1.InstanceGroupManagersClient).insert_unary, request)

    def delete_group(self, zone: str, name: str, what: str) -> compute_v1.Operation | None:
        """Start to delete a managed instance group and its machines.

        Return the operation; None if the group is gone.
        """
        request = compute_v1.DeleteInstanceGroupManagerRequest(
            project=self.project,
            zone=zone,
            instance_group_manager=name,
        )
        return self._change(what, _client_of(compute_v1.InstanceGroupManagersClient).delete_unary, request)

    # --- calling a method of the SDK -------------------------------------------------------------------------

    def _get(self, what: str, method: _Method[Request, V], request: Request) -> V:
        """Send a request once, and return the answer.

        Args:
            what: The request in words, for an error message.
            method: The method of the SDK's client.
            request: The request.

        Raises:
            ProviderError: Google refused the request, or did not answer.
        """
        return _api.call(
            what,
            lambda: method(request=request, retry=None, timeout=_TIMEOUT),
            project=self.project,
        )

    def _list(self, what: str, method: _Method[Request, Iterable[V]], request: Request) -> list[V]:
        """Return all items of a list. All pages are fetched inside the call, so that all errors are translated."""
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
        """Return the parts of an aggregated list, one for each zone and region.

        Args:
            what: The request in words, for an error message.
            method: The method of the SDK's client.
            request: The request.
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
        """Send a request that creates a resource. Return None if it exists already."""
        return quietly(partial(self._get, what, method, request), "alreadyExists")

    def _change(self, what: str, method: _Method[Request, V], request: Request) -> V | None:
        """Send a request that changes or deletes a resource. Return None if it is gone."""
        return quietly(partial(self._get, what, method, request), "notFound")


def _client_of(kind: Callable[..., Client]) -> Client:
    """Return the client for one kind of resource, for the present endpoint and credentials.

    Args:
        kind: The class of the client.
    """
    with _making:
        client: Client = _client(_api.endpoint("compute"), kind, _api.credentials("compute"))
    return client


@lru_cache(maxsize=64)
def _client(endpoint: str | None, kind: Any, credentials: Credentials) -> Any:
    """Return a client of the SDK for one kind of resource. Equal arguments give the same object."""
    options = client_options.ClientOptions(api_endpoint=endpoint)
    return kind(credentials=credentials, client_options=options)


# --- retries -------------------------------------------------------------------------------------------------


def look(method: Callable[P, V], *args: P.args, **kwargs: P.kwargs) -> V:
    """Call a method that changes nothing, and return its result.

    Without an answer, or after a rate limit, the call is repeated for up to 20 s.

    Raises:
        ProviderError: Google refused the request, or did not answer in that time.
    """
    return patiently(partial(method, *args, **kwargs), _PATIENCE)


def insist(api: ComputeApi, what: str, change: Callable[[], compute_v1.Operation | None], seconds: float) -> None:
    """Make a change, and wait until it is complete. Repeat it while it is refused temporarily.

    Args:
        api: The API.
        what: The change in words, for an error message.
        change: Starts the change and returns its operation; None if there is nothing to do.
        seconds: The time within which the change must be complete.

    Raises:
        NoAnswer: The change is not complete in time.
        ProviderError: The change was refused.
    """

    def make() -> None:
        if not done(api, change(), what, seconds):
            raise NoAnswer(
                f"Google Cloud did not complete a request within {seconds:g} s: {what}; try again", provider="gcp"
            )

    patiently(make, seconds, *_PASSING)


def done(api: ComputeApi, operation: compute_v1.Operation | None, what: str, seconds: float) -> bool:
    """Wait for an operation, and return True if it ended in time.

    Args:
        api: The API.
        operation: The operation; None, for a change that was not needed, counts as ended.
        what: The change in words, for an error message.
        seconds: How long to wait.

    Raises:
        ProviderError: The operation has failed.
    """
    if operation is None:
        return True
    return bool(soon(partial(_has_ended, api, operation, what), seconds))


def _has_ended(api: ComputeApi, operation: compute_v1.Operation, what: str) -> bool:
    """Return True if an operation has ended, and False if it is still running.

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
    """Yield the resources of this user's pools that the method lists, each with the tags in its labels.

    Args:
        method: Lists resources that match a filter.
        pool: The pool's name; None for all pools.
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
    """Yield the resources of this user's pools that the method lists, each with the tags in its description.

    This is for kinds of resources that have no labels.

    Args:
        method: Lists resources that match a filter.
        pool: The pool's name; None for all pools.
    """
    for each in look(method, 'name eq "skypool-.*"'):
        said = _api.tags_in(each.description)
        if tags.ours(said, pool):
            yield each, said

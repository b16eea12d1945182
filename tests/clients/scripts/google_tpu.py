"""Google's own client of Cloud TPU, over REST or gRPC, with operations that are waited for."""

import sys
from datetime import UTC, datetime, timedelta

import grpc
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2 as tpu
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.oauth2.credentials import Credentials
from report import Report

way, address, project, zone, kind, sold_out, wrong = sys.argv[1:]
at = f"projects/{project}/locations/{zone}"


def client(token=""):
    """Return a client for the lab, with a token or without one."""
    if way == "grpc":
        return tpu.TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(address)))
    later = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    key = Credentials(token=token, refresh_handler=lambda request, scopes: (token, later)) if token else None
    options = {"api_endpoint": address}
    return tpu.TpuClient(credentials=key or AnonymousCredentials(), transport="rest", client_options=options)


def slice_of(accelerator):
    """Return a slice as the library's samples describe it."""
    network = {"network": "default", "enable_external_ips": True}
    told = {"accelerator_type": accelerator, "runtime_version": "v2-alpha-tpuv5", "network_config": network}
    return {**told, "labels": {"team": "blue"}, "metadata": {"startup-script": "#!/bin/sh\necho hello\n"}}


def shown(node):
    """Return the fields of a node that the test compares."""
    return {
        "name": node.name, "state": node.state.name, "type": node.accelerator_type, "labels": dict(node.labels),
        "version": node.runtime_version, "hosts": [each.ip_address for each in node.network_endpoints],
    }  # fmt: skip


with Report() as report:
    tpus = client()
    places = report.call("list", tpus.list_locations, {"name": f"projects/{project}"}).locations
    kinds = report.call("list", tpus.list_accelerator_types, parent=at)
    versions = report.call("list", tpus.list_runtime_versions, parent=at)
    report.show(
        zones=[each.location_id for each in places],
        types=[each.type_ for each in kinds],
        versions=[each.version for each in versions],
    )

    asked = {"parent": at, "node_id": "first", "node": slice_of(kind)}
    made = report.call("create", tpus.create_node, request=asked)
    node = report.call("create", made.result, timeout=60, as_="Operation.result")
    report.show(made=shown(node))
    spec = {"tpu": {"node_spec": [{"parent": at, "node_id": "second", "node": slice_of(kind)}]}}
    queued = {"parent": at, "queued_resource_id": "second", "queued_resource": spec}
    waiting = report.call("create", tpus.create_queued_resource, request=queued).result(timeout=60)
    for _ in range(600):
        state = report.call("get", tpus.get_queued_resource, name=waiting.name).state.state.name
        if state == "ACTIVE":
            break
    report.show(queued=state)

    change = {"node": {"name": node.name, "labels": {"owner": "somebody"}}, "update_mask": {"paths": ["labels"]}}
    report.call("tag", tpus.update_node, request=change).result(timeout=60)
    report.show(
        got=shown(report.call("get", tpus.get_node, name=node.name)),
        nodes=[shown(each) for each in report.call("list", tpus.list_nodes, parent=at)],
        requests=[each.name for each in report.call("list", tpus.list_queued_resources, parent=at)],
    )

    scarce = {"parent": at, "node_id": "none", "node": slice_of(sold_out)}
    late = tpus.create_node(request=scarce)
    report.refused("no stock", late.result, timeout=60, as_="Operation.result")
    report.refused("bad id", tpus.get_node, name=f"{at}/nodes/nobody")
    report.refused("bad id", tpus.delete_node, name=f"{at}/nodes/nobody")
    shows = [("authorization", f"Bearer {wrong}")] if way == "grpc" else []
    report.refused("bad key", client(wrong).list_nodes, parent=at, metadata=shows)

    report.call("end", tpus.delete_node, name=node.name).result(timeout=60)
    delete = {"name": waiting.name, "force": True}
    report.call("end", tpus.delete_queued_resource, request=delete).result(timeout=60)
    report.show(left=[each.name for each in tpus.list_nodes(parent=at)])

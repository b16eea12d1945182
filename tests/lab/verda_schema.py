"""What Verda's API takes and answers, as an OpenAPI document: paths, fields, types and enums.

Verda publishes its API at https://api.verda.com/v1/docs, which could not be reached. The facts are those of the typed
models of its two SDKs: verda 1.25.0 for Python (https://pypi.org/project/verda/) and
https://github.com/verda-cloud/verdacloud-sdk-go, commit ca1aa5c of 2026-08-13 (both read 2026-11-24). A field of either
SDK is allowed, and a field of neither is not. A field of a request is required if the Go SDK's `Validate` requires it;
one of a reply, if the Python SDK reads it without a default.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    more = optional or {}
    return {
        "type": "object",
        "properties": required | more,
        "required": [*required],
        "additionalProperties": False,
    }


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _or_null(schema: Schema) -> Schema:
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else {"anyOf": [schema, {"type": "null"}]}


def _enum(*values: str) -> Schema:
    return {"enum": [*values]}


TEXT: Schema = {"type": "string"}
FILLED: Schema = {"type": "string", "minLength": 1}
MAYBE = _or_null(TEXT)
INT: Schema = {"type": "integer"}
SIZE: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}
MONEY: Schema = {"anyOf": [NUMBER, {"type": "string", "pattern": r"^\d+(\.\d+)?$"}]}
"""The Go SDK's FlexibleFloat: a number, or a text that is one."""
TEXTS = _list(TEXT)
IDS = {"anyOf": [TEXT, _list(TEXT, minItems=1)]}
TIME: Schema = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"}
CURRENCY = _enum("usd", "eur")
CONTRACT = _enum("LONG_TERM", "PAY_AS_YOU_GO", "SPOT")
PRICING = _enum("DYNAMIC_PRICE", "FIXED_PRICE")
ON_DISCONTINUE = _enum("keep_detached", "move_to_trash", "delete_permanently")
ACTION = _enum(
    "boot", "start", "shutdown", "delete", "discontinue", "hibernate", "configure_spot", "force_shutdown",
    "delete_stuck", "deploy", "transfer", "restore",
)  # fmt: skip
INSTANCE_STATUS = _enum(
    "new", "ordered", "provisioning", "validating", "running", "offline", "pending", "discontinued", "unknown",
    "notfound", "error", "deleting", "no_capacity", "starting_hibernation", "hibernating", "restoring",
)  # fmt: skip
VOLUME_STATUS = _enum(
    "ordered", "attached", "attaching", "detached", "deleted", "cloning", "detaching", "deleting", "restoring",
    "created", "creating", "exported", "canceled", "canceling",
)  # fmt: skip
VOLUME_TYPE = _enum(
    "HDD", "NVMe", "HDD_Shared", "NVMe_Shared", "NVMe_Local_Storage", "NVMe_Shared_Cluster", "NVMe_OS_Cluster"
)
TAG = _object({"id": TEXT, "key": TEXT, "value": TEXT})
NEW_TAG = _object({"key": {**FILLED, "maxLength": 63}}, {"value": {**TEXT, "maxLength": 127}})
NEW_TAGS = _list(NEW_TAG, maxItems=10)

CPU = _object({"description": TEXT, "number_of_cores": INT})
GPU = _object({"description": TEXT, "number_of_gpus": INT})
MEMORY = _object({"description": TEXT, "size_in_gigabytes": INT})
STORAGE = _object({"description": TEXT})
HARDWARE = {"cpu": CPU, "gpu": GPU, "gpu_memory": MEMORY, "memory": MEMORY}

OS_VOLUME = _object({"name": FILLED, "size": SIZE}, {"on_spot_discontinue": _or_null(ON_DISCONTINUE)})
NEW_VOLUME = _object(
    {"type": VOLUME_TYPE, "name": FILLED, "size": SIZE},
    {"location_code": TEXT, "on_spot_discontinue": ON_DISCONTINUE, "instance_id": MAYBE, "instance_ids": TEXTS,
     "tags": NEW_TAGS},
)  # fmt: skip
NEW_INSTANCE = _object(
    {"instance_type": FILLED, "image": FILLED, "hostname": FILLED, "description": FILLED},
    {"ssh_key_ids": TEXTS, "location_code": TEXT, "contract": CONTRACT, "pricing": PRICING, "startup_script_id": MAYBE,
     "volumes": _list(NEW_VOLUME), "existing_volumes": TEXTS, "os_volume": _or_null(OS_VOLUME), "is_spot": BOOL,
     "coupon": MAYBE, "tags": NEW_TAGS},
)  # fmt: skip
INSTANCE = _object(
    {"id": TEXT, "instance_type": TEXT, "price_per_hour": MONEY, "hostname": TEXT, "description": TEXT,
     "status": INSTANCE_STATUS, "created_at": TIME, "ssh_key_ids": TEXTS, "storage": STORAGE, **HARDWARE},
    {"ip": MAYBE, "os_volume_id": MAYBE, "location": TEXT, "image": MAYBE, "os_name": TEXT, "startup_script_id": MAYBE,
     "is_spot": BOOL, "contract": _or_null(CONTRACT), "pricing": _or_null(PRICING), "jupyter_token": MAYBE,
     "volume_ids": TEXTS, "tags": _list(TAG)},
)  # fmt: skip
INSTANCE_TYPE = _object(
    {"id": TEXT, "instance_type": TEXT, "price_per_hour": MONEY, "spot_price": MONEY, "description": TEXT,
     "storage": STORAGE, "best_for": TEXTS, "model": TEXT, "name": TEXT, "p2p": TEXT, "currency": CURRENCY,
     "manufacturer": TEXT, "display_name": TEXT, "supported_os": TEXTS, **HARDWARE},
    {"dynamic_price": MONEY, "max_dynamic_price": MONEY, "serverless_price": _or_null(MONEY),
     "serverless_spot_price": _or_null(MONEY), "deploy_warning": MAYBE},
)  # fmt: skip
ACT = _object(
    {"id": IDS, "action": ACTION},
    {"volume_ids": _or_null(TEXTS), "delete_permanently": BOOL},
)
OUTCOMES = _list(_object({"action": ACTION, "instanceId": TEXT, "status": TEXT}, {"error": MAYBE, "statusCode": INT}))
VOLUME = _object(
    {"id": TEXT, "status": VOLUME_STATUS, "name": TEXT, "size": INT, "type": VOLUME_TYPE, "is_os_volume": BOOL,
     "created_at": TIME},
    {"target": MAYBE, "location": TEXT, "instance_id": MAYBE, "ssh_key_ids": TEXTS, "deleted_at": _or_null(TIME),
     "pseudo_path": MAYBE, "mount_command": MAYBE, "create_directory_command": MAYBE,
     "filesystem_to_fstab_command": MAYBE, "contract": TEXT, "base_hourly_cost": NUMBER, "monthly_price": NUMBER,
     "currency": CURRENCY, "is_permanently_deleted": BOOL, "tags": _list(TAG),
     "instances": _list(_object(
         {"id": TEXT, "instance_type": TEXT, "status": INSTANCE_STATUS, "hostname": TEXT},
         {"auto_rental_extension": _or_null(BOOL), "ip": MAYBE, "os_volume_id": MAYBE},
     ))},
)  # fmt: skip
ACT_ON_VOLUMES = _object(
    {"id": IDS, "action": _enum("attach", "detach", "rename", "resize", "delete", "clone")},
    {"name": MAYBE, "type": _or_null(VOLUME_TYPE), "size": SIZE, "instance_id": TEXT, "instance_ids": TEXTS,
     "is_permanent": BOOL, "location_code": TEXT},
)  # fmt: skip
SSH_KEY = _object({"id": TEXT, "name": TEXT, "key": TEXT}, {"fingerprint": TEXT, "created_at": TIME})
SCRIPT = _object({"id": TEXT, "name": TEXT, "script": TEXT}, {"created_at": TIME})
IMAGE = _object(
    {"id": TEXT, "name": TEXT, "image_type": TEXT, "details": TEXTS},
    {"is_default": BOOL, "is_cluster": BOOL, "category": TEXT},
)
VOLUME_PRICE = _object(
    {"type": VOLUME_TYPE, "price": _object({"price_per_month_per_gb": NUMBER}, {"cps_per_gb": NUMBER,
                                                                              "currency": CURRENCY})},
    {"is_shared_fs": BOOL, "burst_bandwidth": NUMBER, "continuous_bandwidth": NUMBER, "internal_network_speed": NUMBER,
     "throughput_gbps": NUMBER, "iops": TEXT},
)  # fmt: skip
AVAILABILITY = _list(_object({"location_code": TEXT, "availabilities": TEXTS}))
PERIODS = _list(_object(
    {"code": TEXT, "name": TEXT, "is_enabled": BOOL, "unit_name": TEXT, "unit_value": NUMBER,
     "discount_percentage": NUMBER}
))  # fmt: skip
NEW_CLUSTER = _object(
    {"cluster_type": FILLED, "image": FILLED, "hostname": FILLED, "description": FILLED,
     "shared_volume": _object({"name": FILLED, "size": SIZE})},
    {"ssh_key_ids": TEXTS, "location_code": TEXT, "contract": _enum("PAY_AS_YOU_GO", "LONG_TERM"),
     "startup_script_id": MAYBE, "auto_rent_extension": BOOL, "turn_to_pay_as_you_go": BOOL,
     "extension_settings": _enum("auto_renew", "pay_as_you_go", "end_contract"),
     "existing_volumes": _list(_object({"id": TEXT})), "tags": NEW_TAGS},
)  # fmt: skip
CLUSTER = _object(
    {"id": TEXT, "hostname": TEXT, "description": TEXT, "status": INSTANCE_STATUS, "created_at": TIME,
     "location": TEXT, "cluster_type": TEXT, "ssh_key_ids": TEXTS,
     "worker_nodes": _list(_object(
         {"id": TEXT, "status": TEXT, "hostname": TEXT, "private_ip": TEXT}, {"public_ip": TEXT}
     )),
     "shared_volumes": _list(_object(
         {"id": TEXT, "name": TEXT, "size_in_gigabytes": INT}, {"mount_point": MAYBE}
     ))},
    {"image": MAYBE, "os_name": TEXT, "startup_script_id": MAYBE, "ip": MAYBE, "price_per_hour": MONEY,
     "contract": CONTRACT, "tags": _list(TAG), **HARDWARE},
)  # fmt: skip
CLUSTER_TYPE = _object(
    {"id": TEXT, "model": TEXT, "name": TEXT, "cluster_type": TEXT, "price_per_hour": MONEY, "currency": CURRENCY,
     "manufacturer": TEXT, "node_details": {"type": "array"}, "supported_os": TEXTS, **HARDWARE}
)  # fmt: skip
ACT_ON_CLUSTERS = _object({"actions": _list(_object({"id": TEXT, "action": _enum("discontinue")}), minItems=1)})
CONTAINER_TYPE = _object(
    {"id": TEXT, "model": TEXT, "name": TEXT, "instance_type": TEXT, "serverless_price": MONEY,
     "serverless_spot_price": MONEY, "currency": CURRENCY, "manufacturer": TEXT, **HARDWARE}
)  # fmt: skip
TOKEN = _object({"access_token": TEXT, "refresh_token": TEXT, "scope": TEXT, "token_type": TEXT, "expires_in": INT})
LOGIN: Schema = {
    "oneOf": [
        _object({"grant_type": _enum("client_credentials"), "client_id": TEXT, "client_secret": TEXT}),
        _object({"grant_type": _enum("refresh_token"), "refresh_token": TEXT}),
    ]
}
ERROR = _object({"code": TEXT, "message": TEXT})
NOTHING: Schema = {"type": "null"}
SECRET = _object({"name": TEXT, "created_at": TIME, "secret_type": _enum("generic", "file-secret")})
CREDENTIAL = _object({"name": TEXT, "created_at": TIME})


def _operation(
    reply: Schema, *, status: int = 200, body: Schema | None = None, query: dict[str, Schema] | None = None,
    text: bool = False, others: dict[int, Schema] | None = None,
) -> Schema:  # fmt: skip
    """An operation of the document.

    Args:
        reply: the body of the answer; `NOTHING` for none.
        status: of the answer if all went well. others: further statuses and their bodies.
        body: of the request. query: its parameters, none of which is required.
        text: the answer is an id as `text/plain`.
    """

    def content(schema: Schema, kind: str = "application/json") -> Schema:
        return {} if schema is NOTHING else {"content": {kind: {"schema": schema}}}

    made: Schema = {
        "parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()],
        "responses": {
            str(status): content(reply, "text/plain" if text else "application/json"),
            **{str(other): content(schema) for other, schema in (others or {}).items()},
            "default": content(ERROR),
        },
    }
    if body is not None:
        made["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return made


_SPOT = {"is_spot": BOOL, "isSpot": BOOL, "location_code": TEXT}
_STATUS = {"status": TEXT}


def _things(name: str, field: str, new: Schema, thing: Schema) -> dict[str, Schema]:
    """The paths of keys or scripts, of which several can be deleted at once: `field` has their ids."""
    return {
        f"/{name}": {
            "get": _operation(_list(thing)),
            "post": _operation(TEXT, status=201, body=new, text=True),
            "delete": _operation(NOTHING, body=_object({field: TEXTS})),
        },
        f"/{name}/{{id}}": {"get": _operation(_list(thing, minItems=1)), "delete": _operation(NOTHING)},
    }


def _named(name: str, new: Schema, thing: Schema) -> dict[str, Schema]:
    """The paths of things for serverless containers, which have no id."""
    return {
        f"/{name}": {"get": _operation(_list(thing)), "post": _operation(NOTHING, status=201, body=new)},
        f"/{name}/{{name}}": {"delete": _operation(NOTHING, query={"force": BOOL})},
    }


_NEW_KEY = _object({"name": FILLED, "key": FILLED})

DOCUMENT: Schema = {
    "openapi": "3.1.0",
    "paths": {
        "/oauth2/token": {"post": _operation(TOKEN, body=LOGIN)},
        "/balance": {"get": _operation(_object({"amount": NUMBER, "currency": CURRENCY}))},
        "/locations": {"get": _operation(_list(_object({"code": TEXT, "name": TEXT, "country_code": TEXT})))},
        "/images": {"get": _operation(_list(IMAGE), query={"instance_type": TEXT})},
        "/images/cluster": {"get": _operation(_list(IMAGE), query={"instance_type": TEXT})},
        "/volume-types": {"get": _operation(_list(VOLUME_PRICE))},
        "/instance-types": {"get": _operation(_list(INSTANCE_TYPE), query={"currency": CURRENCY})},
        "/instance-availability": {"get": _operation(AVAILABILITY, query=_SPOT)},
        "/instance-availability/{kind}": {"get": _operation(BOOL, query=_SPOT)},
        "/instances": {
            "get": _operation(_list(INSTANCE), query=_STATUS),
            "post": _operation(TEXT, status=202, body=NEW_INSTANCE, text=True),
            "put": _operation(NOTHING, status=204, body=ACT, others={202: OUTCOMES, 207: OUTCOMES}),
        },
        "/instances/{id}": {"get": _operation(INSTANCE)},
        "/instances/{id}/tags": {
            "post": _operation(_object({"key": TEXT, "value": TEXT}, {"id": TEXT}), status=201, body=NEW_TAG)
        },
        "/instances/{id}/tags/{key}": {"delete": _operation(NOTHING, status=204)},
        **_things("ssh-keys", "keys", _NEW_KEY, SSH_KEY),
        **_things("sshkeys", "keys", _NEW_KEY, SSH_KEY),
        **_things("scripts", "scripts", _object({"name": FILLED, "script": FILLED}), SCRIPT),
        "/volumes": {
            "get": _operation(_list(VOLUME), query=_STATUS),
            "post": _operation(TEXT, status=202, body=NEW_VOLUME, text=True),
            "put": _operation(TEXTS, status=202, body=ACT_ON_VOLUMES, others={204: NOTHING}),
        },
        "/volumes/trash": {"get": _operation(_list(VOLUME))},
        "/volumes/{id}": {
            "get": _operation(VOLUME),
            "delete": _operation(NOTHING, status=202, body=_object({}, {"is_permanent": BOOL})),
        },
        "/cluster-types": {"get": _operation(_list(CLUSTER_TYPE), query={"currency": CURRENCY})},
        "/cluster-availability": {"get": _operation(AVAILABILITY, query={"location_code": TEXT})},
        "/cluster-availability/{kind}": {"get": _operation(BOOL, query={"location_code": TEXT})},
        "/clusters": {
            "get": _operation(_list(CLUSTER), query=_STATUS),
            "post": _operation(_object({"id": TEXT}), status=202, body=NEW_CLUSTER),
            "put": _operation(NOTHING, status=204, body=ACT_ON_CLUSTERS),
        },
        "/clusters/{id}": {"get": _operation(CLUSTER)},
        "/long-term/periods": {"get": _operation(PERIODS)},
        "/long-term/periods/instances": {"get": _operation(PERIODS)},
        "/long-term/periods/clusters": {"get": _operation(PERIODS)},
        "/container-types": {"get": _operation(_list(CONTAINER_TYPE), query={"currency": CURRENCY})},
        "/serverless-compute-resources": {
            "get": _operation(_list(_object({"name": TEXT, "size": INT, "is_available": BOOL})))
        },
        "/container-deployments": {"get": _operation({"type": "array", "maxItems": 0})},
        "/job-deployments": {"get": _operation({"type": "array", "maxItems": 0})},
        **_named("secrets", _object({"name": FILLED, "value": TEXT}), SECRET),
        **_named(
            "file-secrets",
            _object({"name": FILLED, "files": _list(_object({"file_name": TEXT, "base64_content": TEXT}))}),
            SECRET,
        ),
        **_named(
            "container-registry-credentials",
            {"type": "object", "required": ["name", "type"], "properties": {"name": FILLED, "type": TEXT}},
            CREDENTIAL,
        ),
    },
}  # fmt: skip
"""The lab runs no serverless containers, so its lists of their deployments are empty."""

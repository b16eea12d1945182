"""Imports Google's client libraries when they are first used.

Importing the libraries takes a second, and only `pip install 'skypool[gcp]'` installs them. At run time, each name in
this module is a stand-in for a module of the libraries. Reading an attribute of a stand-in imports the real module.
Type checkers see the real modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skypool.drivers.sdk import imported
from skypool.errors import UsageError

__all__ = [
    "auth",
    "auth_credentials",
    "auth_exceptions",
    "auth_requests",
    "billing_transports",
    "billing_v1",
    "client_options",
    "compute_v1",
    "exceptions",
    "field_mask_pb2",
    "grpc",
    "locations_pb2",
    "requests",
    "tpu_transports",
    "tpu_v2",
]

if TYPE_CHECKING:
    from typing import Any

    import grpc
    import requests
    from google import auth
    from google.api_core import client_options, exceptions
    from google.auth import credentials as auth_credentials
    from google.auth import exceptions as auth_exceptions
    from google.auth.transport import requests as auth_requests
    from google.cloud import billing_v1, compute_v1, tpu_v2
    from google.cloud.billing_v1.services.cloud_catalog import transports as billing_transports
    from google.cloud.location import locations_pb2
    from google.cloud.tpu_v2.services.tpu import transports as tpu_transports
    from google.protobuf import field_mask_pb2
else:

    class _Module:
        """A stand-in for a module. The module is imported when an attribute of the stand-in is first read."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            """Return an attribute of the module. Raises UsageError, with how to install it, if it is missing."""
            try:
                module = imported(self._name)
            except ImportError as e:
                raise UsageError(
                    f"GCP needs Google's client libraries, which are not installed ({e}): "
                    "run `pip install 'skypool[gcp]'`"
                ) from e
            return getattr(module, attribute)

    auth = _Module("google.auth")
    auth_credentials = _Module("google.auth.credentials")
    auth_exceptions = _Module("google.auth.exceptions")
    auth_requests = _Module("google.auth.transport.requests")
    billing_transports = _Module("google.cloud.billing_v1.services.cloud_catalog.transports")
    billing_v1 = _Module("google.cloud.billing_v1")
    client_options = _Module("google.api_core.client_options")
    compute_v1 = _Module("google.cloud.compute_v1")
    exceptions = _Module("google.api_core.exceptions")
    field_mask_pb2 = _Module("google.protobuf.field_mask_pb2")
    grpc = _Module("grpc")
    locations_pb2 = _Module("google.cloud.location.locations_pb2")
    requests = _Module("requests")
    tpu_transports = _Module("google.cloud.tpu_v2.services.tpu.transports")
    tpu_v2 = _Module("google.cloud.tpu_v2")

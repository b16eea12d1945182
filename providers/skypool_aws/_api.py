"""How AWS is asked, and its errors as ours. The questions themselves are in questions.json."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from skypool.asking import Refusals, filled, patiently
from skypool.errors import ProviderError, UsageError

QUESTIONS: dict[str, dict[str, Any]] = json.loads((files("skypool_aws") / "questions.json").read_text())
REFUSALS = Refusals("skypool_aws", "aws", "AWS")
_making = threading.Lock()
WATCH = """\
import datetime, json, os, time, urllib.request as web
base = (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/") + "/latest/"
def ask(path, method, header):
    request = web.Request(base + path, headers=header, method=method)
    return web.build_opener(web.ProxyHandler({})).open(request, timeout=5).read().decode()
while True:
    try:
        token = ask("api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        notice = json.loads(ask("meta-data/spot/instance-action", "GET", {"X-aws-ec2-metadata-token": token}))
        print(datetime.datetime.fromisoformat(notice["time"].replace("Z", "+00:00")).timestamp(), flush=True)
        break
    except (OSError, ValueError, LookupError):  # 404 until there is a notice
        time.sleep(5)
"""


def client(profile: str | None, service: str, region: str = "", attempts: int = 4) -> Any:
    """A client, made once as long as $AWS_… stay the same. No region means the user's own, or else us-east-1."""
    environment = frozenset(each for each in os.environ.items() if each[0].startswith("AWS_"))
    with _making:  # clients are made for threads, sessions are not
        return _said("your settings", region, lambda: _client(profile, environment, service, region, attempts))


@lru_cache(maxsize=256)
def _client(
    profile: str | None, environment: frozenset[tuple[str, str]], service: str, region: str, attempts: int
) -> Any:
    from botocore.config import Config

    session, retries = _session(profile, environment), {"mode": "standard", "total_max_attempts": attempts}
    config = Config(retries=retries, connect_timeout=5, read_timeout=60, user_agent_extra="skypool")
    return session.client(service, region_name=region or session.region_name or "us-east-1", config=config)


@lru_cache(maxsize=4)
def _session(profile: str | None, _environment: frozenset[tuple[str, str]]) -> Any:
    import boto3

    return boto3.Session(profile_name=profile)


def ask(client: Any, question: str, **values: Any) -> Any:
    """The answer to one of the QUESTIONS, all its pages; an empty one where it is refused with one of its quiet codes.

    Raises:
        ProviderError: of the kind that its code means, with what to do.
    """
    asked = QUESTIONS[question]
    action, given = asked["do"], filled(asked.get("give", {}), values)
    paged = client.can_paginate(action)
    do = client.get_paginator(action).paginate(**given).build_full_result if paged else getattr(client, action)
    try:
        told = _said(action, client.meta.region_name, do if paged else lambda: do(**given))
        return told.get(asked["take"], []) if "take" in asked else told
    except ProviderError as e:
        if e.code not in asked.get("quiet", ()):
            raise
        return {}


def insist(seconds: float, client: Any, question: str, **values: Any) -> Any:
    """The same, asked again as long as it is refused in passing."""
    again = QUESTIONS[question].get("again", ())
    return patiently(lambda: ask(client, question, **values), seconds, lambda e: e.code in again or REFUSALS.passes(e))


def _said(action: str, region: str, do: Callable[[], Any]) -> Any:
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
    except ImportError as e:
        raise UsageError("AWS needs its SDK: pip install 'skypool[aws]'") from e
    try:
        return do()
    except (BotoCoreError, ResponseParserError, ClientError) as e:
        said: Mapping[str, str] = e.response.get("Error", {}) if isinstance(e, ClientError) else {}
        code = said["Code"] if "Code" in said else REFUSALS.known([each.__name__ for each in type(e).__mro__])
        text = said.get("Message", "" if said else str(e)).partition(" Encoded authorization failure")[0]
        raise REFUSALS.error(f"{action} in {region}" if region else action, code, text, region=region) from e

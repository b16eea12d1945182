"""How AWS is asked, and its errors as ours. The questions themselves are in questions.json."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from skypool.asking import Refusals, filled, imported, patiently, quietly, surroundings, table
from skypool.errors import UsageError

QUESTIONS: dict[str, dict[str, Any]] = table("skypool_aws", "questions.json")
REFUSALS = Refusals("skypool_aws", "aws", "AWS")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_making, _sessions = threading.Lock(), dict[tuple[str | None, Any], Any]()


def client(profile: str | None, service: str, region: str = "", attempts: int = 4) -> Any:
    """A client, made once as long as $AWS_… and its files stay the same. No region is the user's own, or us-east-1."""
    environment = surroundings("AWS_", _FILES)
    with _making:  # clients are made for threads, sessions are not
        return _said("your settings", region, partial(_client, profile, environment, service, region, attempts))


@lru_cache(maxsize=256)
def _client(profile: str | None, environment: Any, service: str, region: str, attempts: int) -> Any:
    session = _sessions.setdefault((profile, environment), imported("boto3").Session(profile_name=profile))
    retries = {"mode": "standard", "total_max_attempts": attempts}
    config = imported("botocore.config").Config(
        retries=retries, connect_timeout=5, read_timeout=60, max_pool_connections=16
    )
    return session.client(service, region_name=region or session.region_name or "us-east-1", config=config)


def ask(client: Any, question: str, **values: Any) -> Any:
    """The answer to one of the QUESTIONS, all its pages; an empty one where its refusal is one of the quiet ones."""
    asked = QUESTIONS[question]
    do, given = asked["do"], filled(asked.get("give", {}), values)
    paged = client.get_paginator(do).paginate(**given).build_full_result if client.can_paginate(do) else None
    say = partial(_said, do, client.meta.region_name, paged or partial(getattr(client, do), **given))
    if (told := quietly(say, *asked.get("quiet", ()))) is None:
        return {}
    found = told.get(asked["take"], []) if "take" in asked else told
    return [each for some in found for each in some[asked["of"]]] if "of" in asked else found


def insist(seconds: float, client: Any, question: str, **values: Any) -> Any:
    """The same, asked again as long as it is refused in passing, or with one of its codes for that."""
    return patiently(partial(ask, client, question, **values), seconds, *QUESTIONS[question].get("again", ()))


def _said(action: str, region: str, do: Callable[[], Any]) -> Any:
    try:
        failures, parsers = imported("botocore.exceptions"), imported("botocore.parsers")
    except ImportError as e:
        raise UsageError("AWS needs its SDK: pip install 'skypool[aws]'") from e
    try:
        return do()
    except (failures.BotoCoreError, parsers.ResponseParserError, failures.ClientError) as e:
        said = e.response["Error"] if isinstance(e, failures.ClientError) else {"Message": str(e)}
        code = said.get("Code") or REFUSALS.known([each.__name__ for each in type(e).__mro__])
        text = said.get("Message", "").partition(" Encoded authorization failure")[0]
        raise REFUSALS.error(f"{action} in {region}" if region else action, code, text, region=region) from e

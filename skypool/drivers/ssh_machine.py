"""Access to rented machines by SSH: the pool's keys, the host key, the guard, and the wait until machines are gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from skypool.drivers import userdata
from skypool.drivers.retry import at_once, soon
from skypool.errors import ProviderError, not_ended
from skypool.model import Access, Instance
from skypool.wire import host_keys, transport
from skypool.wire.keys import Keys

_WATCH = """\
import datetime, json, os, time, urllib.request as web
direct = web.build_opener(web.ProxyHandler({{}}))
base = os.environ.get({variable!r}) or {base!r}
def ask(path, method="GET", headers={{}}):
    request = web.Request(base.rstrip("/") + path, headers=headers, method=method)
    return direct.open(request, timeout=5).read().decode()
when = None
while when is None:
    try:
        headers = {headers!r}
        {token}
        said = ask({path!r}, headers=headers)
        when = {when}
    except (OSError, ValueError):  # 404 until there is a notice
        pass
    if when is None:
        time.sleep(5)
print(when, flush=True)
"""


def watch(
    base: str,
    path: str,
    when: str,
    *,
    variable: str = "",
    headers: Mapping[str, str] | None = None,
    token: tuple[str, str, str, str] | None = None,
) -> str:
    """Source for `Access.watch` that asks a metadata service every 5 s.

    Args:
        base, path: of what is asked; `variable` of the environment says another base.
        when: Python of `said`, the answer: the seconds since 1970 at which the machine is taken, None for no notice.
        headers: of the question.
        token: path, header and value by which a token is had (PUT), and the header in which it is shown.
    """
    asked = ""
    if token is not None:
        where, name, value, shown = token
        asked = f"headers[{shown!r}] = ask({where!r}, 'PUT', {{{name!r}: {value!r}}})"
    return _WATCH.format(
        base=base, path=path, when=when, variable=variable, headers=dict(headers or {}), token=asked or "pass"
    )


def access(
    instance: Instance,
    address: str,
    *,
    user: str,
    port: int = 22,
    booting: float = 420.0,
    settling: float = 120.0,
    keying: float = 0.0,
    watch: str = "",
) -> Access:
    """ssh with the pool's own key to a machine that was told the host key of its token at its boot, and no other one.

    Args:
        user, port: where it lets the pool in.
        booting, settling, keying, watch: as `Access` has them.
    """
    keys, folder = Keys.of(instance.pool), f"~/.skypool/pools/{instance.pool}.{instance.rank}"
    ssh = transport.SSH(address, user=user, port=port, identity=keys.identity)
    _, key = keys.host(instance.token)
    return Access(
        transport=host_keys.declared(ssh, f"{instance.provider}-{instance.id}", key),
        python=None,
        folder=folder,
        spool=folder,
        cwd="~/.skypool/work",
        booting=booting,
        settling=settling,
        keying=keying,
        guard=userdata.GUARD,
        watch=watch,
    )


def end_all(
    instances: Sequence[Instance],
    destroy: Callable[[str], object],
    there: Callable[[], Collection[str]],
    seconds: float,
    young: Collection[str] = (),
) -> None:
    """Ask for the end of each instance once, all at once, and then look until all are gone.

    Args:
        destroy: asks for the end of one, by its id; quiet if it is gone.
        there: the ids of all that there are; seconds: for how long it is looked.
        young: which `there` may lack though they are: where their end was refused, that proves nothing.

    Raises:
        StillRunning: which are not, and why.
    """
    left = {each.id: each for each in instances}
    refused = {id: e for id, e in zip(left, at_once(destroy, left), strict=True) if isinstance(e, Exception)}

    def look() -> bool:
        for id in set(left) - set(there()) - (refused.keys() & set(young)):
            del left[id]
        return set(left) <= set(refused)

    unseen = None
    try:
        if left:
            soon(look, seconds, 0.25, 5.0)
    except ProviderError as e:
        unseen = e
    if left:
        why = {id: refused.get(id) or unseen or f"it is still there, after {seconds:g} s" for id in left}
        raise not_ended(why, [*left.values()]) from unseen or next(iter(refused.values()), None)

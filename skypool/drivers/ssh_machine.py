"""Helpers for drivers of clouds whose machines run sshd.

`access` returns SSH access to a machine, `terminate_and_wait` terminates machines and waits for their end, and
`notice_program` returns a program that waits for a spot notice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files

from skypool.drivers import userdata
from skypool.drivers.retry import at_once, soon
from skypool.errors import ProviderError, not_ended
from skypool.model import Access, Instance
from skypool.wire import host_keys, transport
from skypool.wire.keys import Keys


def notice_program(
    base: str,
    path: str,
    when: str,
    *,
    variable: str = "",
    headers: Mapping[str, str] | None = None,
    token: tuple[str, str, str, str] | None = None,
) -> str:
    """Return the source of a program that waits on a rented machine for the provider's spot notice.

    A spot notice announces that the provider will take the machine back. The program requests it from the cloud's
    metadata service every 5 s. When there is one, the program prints the announced time and ends. A driver passes the
    source as `Access.watch`.

    Args:
        base: address of the metadata service.
        path: path of the notice; it is appended to `base`.
        when: Python expression that uses `said`, the text of the service's answer. Its value is the time at which the
            provider takes the machine back, in seconds since 1970, or None for no notice. It may use the modules `json`
            and `datetime`. If it raises ValueError, there is no notice.
        variable: name of an environment variable on the rented machine. Its value, if any, replaces `base`. "" for
            none.
        headers: headers of the request for the notice; None for none.
        token: None if the service needs no access token. Otherwise (path, name, value, carrier): a PUT request to the
            path, with a header of this name and value, gets the token. The header `carrier` then carries the token.
    """
    program = (files("skypool.drivers") / "notice_watch.py").read_text("utf-8")
    told = ", ".join(repr(each) for each in (base, variable, path, dict(headers or {}), token or ()))
    return f"{program}\nwait({told}, lambda said: {when})\n"


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
    """Return SSH access to a machine, with the pool's login key and the host key that the machine got at its boot.

    This function does not connect. It creates keys that do not exist yet, in skypool's folder for the user's state. A
    later connection fails if the machine has another host key. `booting`, `settling` and `keying` are counted from the
    first attempt to connect.

    Args:
        instance: the machine. `instance.token` selects the host key.
        address: host name or IP address of the machine.
        user: user name with which the client logs in.
        port: port on which the machine's sshd listens.
        booting: seconds in which a machine that does not answer counts as still booting.
        settling: seconds in which a machine that refuses the login counts as still booting.
        keying: seconds in which a machine with a wrong host key counts as still booting.
        watch: Python source of a program for the machine that waits for a spot notice, as `notice_program` returns it;
            "" for none.

    Raises:
        UsageError: a key must be created, and ssh-keygen is not installed on this computer.
    """
    keys = Keys.of(instance.pool)
    folder = f"~/.skypool/pools/{instance.pool}.{instance.node}"
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


def terminate_and_wait(
    instances: Sequence[Instance],
    destroy: Callable[[str], object],
    there: Callable[[], Collection[str]],
    seconds: float,
    young: Collection[str] = (),
) -> None:
    """Terminate instances with one request each, all in parallel, and poll until the provider lists none of them.

    An instance counts as ended if `there` does not return its id, even if `destroy` failed for it. Blocks until all
    instances have ended, or for `seconds`. Polling stops early if `destroy` failed for every instance that is left.

    Args:
        instances: instances to terminate.
        destroy: called with the id of each instance, to request its end. It must not raise for an instance that no
            longer exists.
        there: returns the ids of all instances that exist at the provider.
        seconds: time limit for polling.
        young: ids of new instances, which `there` may not list yet. If `destroy` failed for one of these, the instance
            does not count as ended, although `there` does not list it.

    Raises:
        StillRunning: names the instances that are not proved to have ended, and why. Also raised if `there` raised a
            ProviderError.
        Exception: any other error of `there`.
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
        listed = f"the provider still lists the instance after {seconds:g} s"
        why = {id: refused.get(id) or unseen or listed for id in left}
        raise not_ended(why, [*left.values()]) from unseen or next(iter(refused.values()), None)

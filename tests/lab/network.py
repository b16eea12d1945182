"""A lab's network: a /24 of its own with a way out, and one network namespace a machine.

Each machine hangs on a pair of veth devices of its own and routes everything through the host, also what goes to its
neighbours. So no frame is ever lost for want of an ARP answer, and a cut line is silent, as a broken network is.
"""

from __future__ import annotations

import ipaddress
import json
import random
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

METADATA = "169.254.169.254"
NETNS = Path("/run/netns")


def ip(*lines: str, netns: str = "") -> None:
    """Run some `ip` commands in one go, in a namespace."""
    argv = ["ip", *(["-netns", netns] if netns else []), "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip()} in {lines}")


@dataclass
class Network:
    """The network of one run; everything in it is called lab-<run>."""

    tag: str
    net: ipaddress.IPv4Network
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taken: set[int] = field(default_factory=set)
    _last: int = 9

    @classmethod
    def create(cls, tag: str) -> Network:
        """Take a /24 that nobody uses. The caller holds the lock over all labs of this host."""
        network = cls(tag, free_net())
        net = network.net
        ip(
            f"link add {tag} type bridge",
            f"addr add {network.gateway}/24 dev {tag}",
            f"link set {tag} up",
        )
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        mark = f'-m comment --comment "{tag}"'
        _iptables(
            ["*nat", f"-A POSTROUTING -s {net} ! -d {net} {mark} -j MASQUERADE", "COMMIT"],
            ["*filter", f"-I FORWARD -s {net} {mark} -j ACCEPT", f"-I FORWARD -d {net} {mark} -j ACCEPT", "COMMIT"],
        )
        return network

    @property
    def gateway(self) -> str:
        """The host's address in here; servers that tests run for machines listen on it."""
        return str(self.net.network_address + 1)

    def take(self) -> str:
        """Take an address that nobody has; `give_back` ends that."""
        with self._lock:
            hosts = [*range(self._last + 1, 255), *range(10, self._last + 1)]  # an old address comes back late
            free = [host for host in hosts if host not in self._taken]
            if not free:
                raise RuntimeError("a lab has room for 245 machines at once")
            self._last = free[0]
            self._taken.add(self._last)
            return str(self.net.network_address + self._last)

    def give_back(self, address: str) -> None:
        with self._lock:
            self._taken.discard(int(address.rpartition(".")[2]))

    def attach(self, number: int) -> str:
        """Make the namespace of machine `number` and connect it; its address."""
        address = self.take()
        netns, device = self.netns(number), self.device(number)
        ip(
            f"netns add {netns}",
            f"link add {device} mtu {outer_mtu()} type veth peer name eth0 mtu {outer_mtu()} netns {netns}",
            f"link set {device} up",
            f"route add {address}/32 dev {device} src {self.gateway}",
        )
        ip(
            "link set lo up",
            f"addr add {METADATA}/32 dev lo",
            f"addr add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add {self.gateway} dev eth0 scope link src {address}",
            f"route add default via {self.gateway} src {address}",
            netns=netns,
        )
        return address

    def lend(self, number: int, address: str) -> None:
        """Let machine `number` be reached at an address that was taken, too, until it is destroyed or `unlend`."""
        ip(f"route replace {address}/32 dev {self.device(number)} src {self.gateway}")
        ip(f"addr add {address}/32 dev eth0", netns=self.netns(number))

    def unlend(self, number: int, address: str) -> None:
        """Undo `lend`."""
        ip(f"route del {address}/32 dev {self.device(number)}")
        ip(f"addr del {address}/32 dev eth0", netns=self.netns(number))

    def netns(self, number: int) -> str:
        return f"{self.tag}-{number}"

    def device(self, number: int) -> str:
        return f"{self.tag.replace('lab-', 'lv')}-{number}"

    def cut(self, number: int, *, incoming: bool, outgoing: bool) -> None:
        """Drop what arrives at the machine, and what arrives from it. Nobody is told."""
        if incoming:
            subprocess.run(self._drop("-I", "eth0", self.netns(number)), check=True, capture_output=True)
        if outgoing:
            subprocess.run(self._drop("-I", self.device(number)), check=True, capture_output=True)

    def mend(self, number: int) -> None:
        """Undo every cut."""
        for argv in (self._drop("-D", "eth0", self.netns(number)), self._drop("-D", self.device(number))):
            while subprocess.run(argv, check=False, capture_output=True).returncode == 0:
                continue

    def _drop(self, what: str, device: str, netns: str = "") -> list[str]:
        inside = ["nsenter", f"--net={NETNS / netns}"] if netns else []
        rule = [what, "PREROUTING", "-i", device, "-m", "comment", "--comment", self.tag, "-j", "DROP"]
        return [*inside, "iptables", "-w", "-t", "raw", *rule]

    def detach(self, number: int, address: str) -> None:
        """Remove a machine's namespace and with it its devices."""
        self.mend(number)
        ip(f"netns del {self.netns(number)}")
        self.give_back(address)


def remove(tag: str) -> None:
    """Remove everything that a network made, whether or not its maker still lives."""
    namespaces = [path.name for path in NETNS.glob(f"{tag}-*")]
    if namespaces:
        ip(*[f"netns del {name}" for name in namespaces])
    if Path("/sys/class/net", tag).exists():
        ip(f"link del {tag}")
    tables: list[list[str]] = []
    for line in rules():
        if line.startswith("*"):
            tables.append([line])
        elif line.startswith("-A") and tag in line.replace('"', "").split():
            tables[-1].append("-D" + line[2:])
    _iptables(*[[*table, "COMMIT"] for table in tables if len(table) > 1])


def rules() -> list[str]:
    """Every iptables rule of the host, as iptables-save prints them."""
    return subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout.splitlines()


def _iptables(*tables: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for table in tables for line in table)
    if text:
        subprocess.run(["iptables-restore", "--noflush", "--wait"], input=text, text=True, check=True)


def free_net() -> ipaddress.IPv4Network:
    """A 10.x.y.0/24 that no route of this host and none of its name servers is in."""
    seen = subprocess.run(["ip", "-json", "-4", "route", "show"], capture_output=True, text=True, check=True)
    routes = [route["dst"] for route in json.loads(seen.stdout) if route["dst"] != "default"]
    taken = [ipaddress.IPv4Network(route, strict=False) for route in routes]
    for line in Path("/etc/resolv.conf").read_text().splitlines():
        if line.startswith("nameserver") and ":" not in line:
            taken.append(ipaddress.IPv4Network(line.split()[1]))
    while True:
        net = ipaddress.IPv4Network(f"10.{random.randrange(100, 250)}.{random.randrange(256)}.0/24")
        if not any(net.overlaps(other) for other in taken):
            return net


def outer_mtu() -> int:
    """What fits through this host's own way out; a machine must not send more."""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        device, destination, *_ = line.split()
        if destination == "00000000":
            return int(Path("/sys/class/net", device, "mtu").read_text())
    return 1500

"""Process 1 of a lab machine. Does what cloud-init does, starts sshd, reaps, and ends when the machine is switched off.

It runs inside the machine, with the standard library only, and reads /run/lab/boot.json (see tests/lab/userdata.py).
"""

from __future__ import annotations

import base64
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAB = Path("/run/lab")
SCHEDULED = Path("/run/systemd/shutdown/scheduled")
INSTANCE = Path("/var/lib/cloud/instance")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DISABLED_ROOT = (
    "no-port-forwarding,no-agent-forwarding,no-X11-forwarding,"
    'command="echo \'Please login as the user \\"{user}\\" rather than the user \\"root\\".\';echo;sleep 10;exit 142" '
)


def main() -> None:
    """Boot, then wait for the end."""
    # Blocked, so that they wait for sigwaitinfo(); children get the usual mask back.
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    plan: dict[str, Any] = json.loads((LAB / "boot.json").read_text())
    say(f"{plan['hostname']} boots")
    (LAB / "up").touch()
    if plan["first"]:
        os.waitpid(user_script(plan["first"], plan["env"], "boothook"), 0)
    host_keys(plan["host_keys"])
    authorized_keys(plan["user"], plan["keys"], plan["disable_root"])
    if plan["start"]:
        first = start(["/bin/sh", "-c", plan["start"]], {"HOME": "/root", **plan["env"]})
        watch({first: "start command"})
    for each in plan["write_files"]:
        write_file(**each)
    os.makedirs("/run/sshd", exist_ok=True)
    start(["/usr/sbin/sshd", "-D", "-e"], {})
    say("sshd started")
    watch({user_script(plan["script"], plan["env"]): "user data"} if plan["script"] else finished(0))


def say(text: str) -> None:
    """A line for the console."""
    print(f"[{time.strftime('%H:%M:%S')}] lab: {text}", flush=True)


def host_keys(given: dict[str, str]) -> None:
    """Those of the user data in place of any others; without such, ones that are made here and now."""
    folder = Path("/etc/ssh")
    if given:
        for old in folder.glob("ssh_host_*"):
            old.unlink()
    for name, text in given.items():
        kind, half = name.split("_", 1)
        path = folder / f"ssh_host_{kind}_key{'.pub' if half == 'public' else ''}"
        write(path, (text.rstrip("\n") + "\n").encode(), 0o644 if half == "public" else 0o600)
    for private in folder.glob("ssh_host_*_key"):
        if not private.with_name(private.name + ".pub").exists():
            public = subprocess.run(["ssh-keygen", "-y", "-f", private], stdout=subprocess.PIPE, check=True).stdout
            write(private.with_name(private.name + ".pub"), public, 0o644)
    if not list(folder.glob("ssh_host_*_key")):
        for kind in ("ed25519", "ecdsa"):  # an RSA key takes half a second
            key = folder / f"ssh_host_{kind}_key"
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", key], stdin=subprocess.DEVNULL, check=True)


def authorized_keys(user: str, keys: list[str], disable_root: bool) -> None:
    """Let `user` in; root is told to come as that user, as on most clouds."""
    _authorize(user, keys)
    if user != "root":
        _authorize("root", [DISABLED_ROOT.format(user=user) + key for key in keys] if disable_root else keys)


def _authorize(user: str, lines: list[str]) -> None:
    if not lines:
        return
    entry = pwd.getpwnam(user)
    folder = Path(entry.pw_dir) / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    write(folder / "authorized_keys", "".join(f"{line.strip()}\n" for line in lines).encode(), 0o600)
    for path in (folder, folder / "authorized_keys"):
        os.chown(path, entry.pw_uid, entry.pw_gid)


def write_file(path: str, content: str, permissions: str, owner: str, append: bool) -> None:
    """One entry of write_files; `content` is base64 here."""
    data = base64.b64decode(content)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if append and target.exists():
        data = target.read_bytes() + data
    write(target, data, int(permissions, 8))
    user, _, group = owner.partition(":")
    shutil.chown(target, user, group or user)


def write(path: Path, data: bytes, mode: int) -> None:
    """A file that never is readable by more than it ends up to be."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)


def user_script(text: str, env: dict[str, str], name: str = "part-001") -> int:
    """Run the user's script as cloud-init does: as root, without a HOME, its output in cloud-init's log."""
    script = INSTANCE / "scripts" / name
    script.parent.mkdir(parents=True, exist_ok=True)
    write(script, text.encode(), 0o700)
    with open("/var/log/cloud-init-output.log", "ab") as log:
        return start([str(script)], env, log.fileno())


def start(argv: list[str], env: dict[str, str], output: int | None = None) -> int:
    """Start a child in a session of its own; its process id."""
    environment = {"PATH": PATH, "LANG": "C.UTF-8", **env}
    with open(os.devnull, "rb") as nothing:
        actions: list[tuple[int, int, int]] = [(os.POSIX_SPAWN_DUP2, nothing.fileno(), 0)]
        if output is not None:
            actions += [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        return os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=[])


def watch(first: dict[int, str]) -> None:
    """Reap whatever ends, and end the machine when it is switched off, on time, or when a container's command ends."""
    while True:
        due = shutdown_due()
        left = 3600.0 if due is None else due - time.time()
        if left <= 0:
            end(SCHEDULED.read_text().rpartition("SAID=")[2].strip())
        signal.setitimer(signal.ITIMER_REAL, left)  # sigtimedwait() of CPython 3.11 invents signals after a pause
        if signal.sigwaitinfo(WATCHED).si_signo == signal.SIGTERM:
            end((LAB / "reason").read_text().strip() if (LAB / "reason").exists() else "SIGTERM")
        for pid, status in reaped():
            if (what := first.pop(pid, "")) == "user data":
                finished(status)
            elif what:
                end(f"{what} ended with {status}")


def reaped() -> list[tuple[int, int]]:
    """Children that have ended, orphans included, with their exit status."""
    found: list[tuple[int, int]] = []
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    except ChildProcessError:
        return found
    return found


def finished(status: int) -> dict[int, str]:
    """Say that user data is through."""
    INSTANCE.mkdir(parents=True, exist_ok=True)
    (LAB / "status").write_text(str(status))
    say(f"user data ended with {status}")
    (INSTANCE / "boot-finished").write_text(f"{time.time()}\n")
    return {}


def shutdown_due() -> float | None:
    """When `shutdown +5` is due, as time.time() counts."""
    try:
        return int(SCHEDULED.read_text().partition("USEC=")[2].partition("\n")[0]) / 1e6
    except FileNotFoundError:
        return None


def end(reason: str) -> None:
    """Process 1 ends, and the kernel takes everything else in the machine with it."""
    (LAB / "reason").write_text(reason + "\n")
    say(f"power off: {reason}")
    sys.stdout.flush()
    os._exit(0)


WATCHED = {signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGHUP}

if __name__ == "__main__":
    main()

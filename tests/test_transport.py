"""Transports: the command line of `ssh` and of containers, and what they mean by their complaints."""

from __future__ import annotations

from pathlib import Path

import pytest

from skypool.errors import ConnectionLost, HostKeyMismatch, LoginRefused
from skypool.wire import transport
from skypool.wire.transport import SSH, CommandStream, Exec, Subprocess, Trouble, refusal


def options(argv: list[str]) -> dict[str, str]:
    found = [argv[i + 1].partition("=") for i, word in enumerate(argv) if word == "-o"]
    return {name: value for name, _, value in found}


def test_ssh_checks_host_keys_and_asks_nobody() -> None:
    argv = SSH("gpu1", known_hosts=("/a b/known", "/c")).argv(["sh", "-c", "echo 'hi' $HOME"])
    assert options(argv)["StrictHostKeyChecking"] == "yes"
    assert options(argv)["BatchMode"] == "yes"
    assert options(argv)["UserKnownHostsFile"] == '"/a b/known" "/c"'
    assert argv[-3:] == ["--", "gpu1", "sh -c 'echo '\"'\"'hi'\"'\"' $HOME'"]
    assert not any("/dev/null" in word for word in argv)


def test_ssh_leaves_to_the_users_configuration_what_was_not_asked() -> None:
    argv = SSH("gpu1").argv(["true"])
    assert not {"-l", "-p", "-J", "-F", "-i"} & set(argv)
    assert not {"UserKnownHostsFile", "HostKeyAlias", "IdentityFile"} & set(options(argv))
    asked = SSH("gpu1", "me", 2222, "/key", "door", alias="pool-0", pin=True, config="/cfg").argv(["true"])
    assert asked[asked.index("-l") + 1] == "me"
    assert asked[asked.index("-p") + 1] == "2222"
    assert asked[asked.index("-J") + 1] == "door"
    assert asked[asked.index("-F") + 1] == "/cfg"
    assert options(asked)["HostKeyAlias"] == "pool-0"
    assert options(asked)["StrictHostKeyChecking"] == "accept-new"


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        ("ssh: connect to host 10.0.0.9 port 22: Connection refused", Trouble.UNREACHABLE),
        ("ssh: connect to host 10.0.0.9 port 22: Connection timed out", Trouble.UNREACHABLE),
        ("ssh: Could not resolve hostname gpu1: Name or service not known", Trouble.UNREACHABLE),
        ("kex_exchange_identification: read: Connection reset by peer", Trouble.UNREACHABLE),
        ("Connection timed out during banner exchange", Trouble.UNREACHABLE),
        ("me@10.0.0.9: Permission denied (publickey).", Trouble.LOGIN),
        ("Received disconnect: Too many authentication failures", Trouble.LOGIN),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", Trouble.HOST_KEY),
        ("No ED25519 host key is known for gpu1 and you have requested strict checking.", Trouble.HOST_KEY),
        ("command-line line 0: Bad configuration option: foo", Trouble.OTHER),
    ],
)
def test_what_ssh_says_is_understood(said: str, trouble: Trouble) -> None:
    assert SSH("gpu1").trouble(said) is trouble


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Host key verification failed.", HostKeyMismatch),
        ("me@gpu1: Permission denied (publickey).", LoginRefused),
        ("connect: Connection refused", ConnectionLost),
    ],
)
def test_a_refusal_names_the_node_and_keeps_the_words(said: str, kind: type[ConnectionLost]) -> None:
    error = refusal(SSH("gpu1"), 3, said)
    assert type(error) is kind
    assert "node 3" in str(error)
    assert said in str(error)
    assert error.node == 3


def test_a_command_in_a_container_keeps_its_stdin() -> None:
    argv = Exec(("podman", "--cgroup-manager", "cgroupfs"), "abc", "ubuntu").argv(["sh", "-c", "true"])
    words = ["podman", "--cgroup-manager", "cgroupfs", "exec", "-i", "--user", "ubuntu", "abc", "sh", "-c", "true"]
    assert argv == words


def test_a_stream_that_ended_tells_its_last_words_and_closes_twice() -> None:
    stream = CommandStream(Subprocess().argv(["sh", "-c", "echo why >&2; exit 3"]))
    assert stream.end() == "why"
    stream.close()
    assert stream.process.returncode == 3


@pytest.mark.parametrize(("release", "is_named"), [("8.2p1", False), ("8.7p1", True), ("10.0p2", True)])
def test_an_old_ssh_is_not_given_options_that_it_refuses(
    release: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\necho 'OpenSSH_{release} Debian-1, OpenSSL 3.0.2' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    transport._names_streams.cache_clear()
    try:
        assert ("StdinNull=no" in SSH("h").argv(["true"])) is is_named
    finally:
        transport._names_streams.cache_clear()

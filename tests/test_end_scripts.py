"""The programs with which machines end themselves. No key is among the arguments of a program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import served

ROOT = Path(__file__).parent.parent
KEY = "rpp_0123456789abcdef"
SCRIPTS = {
    "skypool_vastai": ("base", {"CONTAINER_ID": "7", "CONTAINER_API_KEY": KEY}, "/api/v0/instances/7/"),
    "skypool_runpod": ("url", {"RUNPOD_POD_ID": "p7", "RUNPOD_API_KEY": KEY}, "/v2/pods/p7"),
}
"""Of each driver: the variable with the API's address, the environment of its machine, and what is deleted."""


class Api:
    """An API that looks at all processes before it answers.

    Args:
        silent: so many requests get no answer.

    Attributes:
        asked: (method, path, key) of each request.
        seen: the words of each program that ran meanwhile on this computer.
        closing: ends the silence.
    """

    def __init__(self, silent: int) -> None:
        self.asked, self.seen = list[tuple[str, str, str]](), list[str]()
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answered(self) -> None:
                outer.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
                outer.seen += outer.arguments()
                if len(outer.asked) <= silent:
                    outer.closing.wait()
                    return
                self.send_response(204)
                self.end_headers()

            do_DELETE = do_POST = _answered

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def arguments(self) -> list[str]:
        """The words of all programs that run now."""
        found = []
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has just ended
                found.append(place.read_bytes().decode(errors="replace"))
        return found


@contextmanager
def api(silent: int = 0) -> Iterator[Api]:
    made = Api(silent)
    with served(made.server):
        try:
            yield made
        finally:
            made.closing.set()


def place(folder: Path, *names: str) -> dict[str, str]:
    """Put these programs into a folder, and return the environment in which there are no others."""
    for name in names:
        found = os.path.realpath(sys.executable) if name == "python3" else shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not installed")
        (folder / name).symlink_to(found)
    return {"PATH": str(folder), "TMPDIR": str(folder)}


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="needs Linux, whose /proc shows arguments")
@pytest.mark.parametrize("tool", ["curl", "python3", "wget"])
@pytest.mark.parametrize("driver", SCRIPTS)
def test_a_machine_ends_itself_without_its_key_in_the_arguments_of_a_program(
    driver: str, tool: str, tmp_path: Path
) -> None:
    if (driver, tool) == ("skypool_runpod", "wget"):
        pytest.skip("RunPod's images have curl or python3")
    programs = sorted({tool, "sh", "mktemp", "rm"})
    here = place(tmp_path, *programs)
    variable, environment, path = SCRIPTS[driver]
    script = (ROOT / "providers" / driver / "end.sh").read_text()
    with api() as there:
        env = {**here, variable: there.url, **environment}
        done = subprocess.run(["sh", "-s"], input=script, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert there.asked == [("DELETE", path, f"Bearer {KEY}")]
    assert "sh\0-s\0" in there.seen, "the script was seen while it asked"
    assert [each for each in there.seen if KEY in each] == []
    assert sorted(each.name for each in tmp_path.iterdir()) == programs, "no file is left"


@pytest.mark.parametrize(
    ("driver", "ways"),
    [("skypool_vastai", ["DELETE"] * 3), ("skypool_runpod", ["DELETE", "POST", "POST"] * 2)],
)
def test_a_machine_asks_for_its_end_in_every_way_before_the_guard_stops_the_program(
    driver: str, ways: list[str], tmp_path: Path
) -> None:
    here = place(tmp_path, "curl", "python3", "wget", "sh", "mktemp", "rm")
    variable, environment, _ = SCRIPTS[driver]
    script = (ROOT / "providers" / driver / "end.sh").read_text()
    limit = max(map(int, re.findall(r"(?:-m |-T |timeout=)(\d+)", script)))
    guard = (ROOT / "skypool" / "drivers" / "scripts" / "guard.sh").read_text()
    [allowed] = re.findall(r'timeout (\d+) sh -c "\$END"', guard)
    assert len(ways) * limit + 5 < int(allowed), "and some seconds for the start of the programs"
    short = re.sub(r"(-m |-T |timeout=)\d+", r"\g<1>1", script)
    with api(silent=len(ways) - 1) as there:
        env = {**here, variable: there.url, **environment}
        done = subprocess.run(["sh", "-s"], input=short, env=env, capture_output=True, text=True, timeout=60)
    assert [method for method, _, _ in there.asked] == ways
    assert done.returncode == 0
    assert not list(tmp_path.glob("tmp.*")), "no file with the key is left"

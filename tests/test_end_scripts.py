"""The programs with which machines end themselves. No key is among the arguments of a program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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

    Attributes:
        asked: (method, path, key) of each request.
        seen: the words of each program that ran meanwhile on this computer.
    """

    def __init__(self) -> None:
        self.asked, self.seen = list[tuple[str, str, str]](), list[str]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answered(self) -> None:
                outer.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
                outer.seen += outer.arguments()
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
def api() -> Iterator[Api]:
    made = Api()
    with served(made.server):
        yield made


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="needs Linux, whose /proc shows arguments")
@pytest.mark.parametrize("tool", ["curl", "python3", "wget"])
@pytest.mark.parametrize("driver", SCRIPTS)
def test_a_machine_ends_itself_without_its_key_in_the_arguments_of_a_program(
    driver: str, tool: str, tmp_path: Path
) -> None:
    programs = {each: shutil.which(each) for each in (tool, "sh", "mktemp", "rm")}
    if tool == "python3":
        programs[tool] = os.path.realpath(sys.executable)
    if programs[tool] is None:
        pytest.skip(f"{tool} is not installed")
    if (driver, tool) == ("skypool_runpod", "wget"):
        pytest.skip("RunPod's images have curl or python3")
    variable, environment, path = SCRIPTS[driver]
    for program, place in programs.items():
        (tmp_path / program).symlink_to(str(place))
    script = (ROOT / "providers" / driver / "end.sh").read_text()
    with api() as there:
        env = {"PATH": str(tmp_path), "TMPDIR": str(tmp_path), variable: there.url, **environment}
        done = subprocess.run(["sh", "-s"], input=script, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert there.asked == [("DELETE", path, f"Bearer {KEY}")]
    assert "sh\0-s\0" in there.seen, "the script was seen while it asked"
    assert [each for each in there.seen if KEY in each] == []
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(programs), "no file is left"

"""Errors of skypool show the user's lines, and no frames of libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

REFUSED = {
    "no credentials": """
        import skypool as sky
        with sky.ComputePool(provider=sky.AWS(region="us-east-1", ssh_from="203.0.113.7"), console="off"):
            pass
    """,
    "a wrong argument": """
        import skypool as sky
        def main():
            sky.ComputePool(acelerator="H100")
        main()
    """,
    "a wrong setting": """
        import skypool as sky
        sky.AWS(regions=["here"])
    """,
    "no call": """
        import skypool as sky
        2 >> sky.ComputePool()
    """,
    "in a thread": """
        import threading
        import skypool as sky
        thread = threading.Thread(target=lambda: 2 >> sky.ComputePool())
        thread.start()
        thread.join()
    """,
}


def said(tmp_path: Path, code: str, **env: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    nothing = {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
    env = {
        **os.environ,
        **nothing,
        "AWS_EC2_METADATA_DISABLED": "true",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # offers that another test kept would take other ways
        "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, (ROOT / "providers", ROOT / "images"))]),
        **env,
    }
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=env).stderr


@pytest.mark.parametrize("what", REFUSED)
def test_an_error_of_the_user_shows_the_users_lines_alone(tmp_path: Path, what: str) -> None:
    err = said(tmp_path, REFUSED[what])
    frames = [line for line in err.splitlines() if line.startswith("  File ")]
    assert frames, err
    assert all("script.py" in line for line in frames), err
    assert "skypool.errors." in err
    assert "SKYPOOL_DEBUG=1" in err
    more = said(tmp_path, REFUSED[what], SKYPOOL_DEBUG="1")
    assert any("/skypool/" in line for line in more.splitlines() if line.startswith("  File ")), more


@pytest.mark.slow
def test_what_a_function_raised_on_a_node_keeps_its_remote_traceback(tmp_path: Path) -> None:
    err = said(
        tmp_path,
        """
        import skypool as sky
        @sky.compute
        def fails():
            raise ValueError("here it is")
        if __name__ == "__main__":
            with sky.ComputePool(console="off") as pool:
                fails() >> pool
        """,
    )
    assert "RemoteTraceback" in err
    assert err.rstrip().endswith("ValueError: here it is")

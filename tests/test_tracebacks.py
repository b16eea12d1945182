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


WRONG = [
    "sky.AWS(region=3)",
    "sky.SSH(3)",
    "sky.Host(3)",
    "sky.Budget(-1)",
    "sky.Local(spool=3)",
    "sky.RunPod(cloud='x')",
    "sky.Container(image=3)",
    "sky.Image(pip=3)",
    "sky.ComputePool(nodes=-1)",
    "sky.compute(timeout=-1)",
    "sky.Prometheus(port=-1)",
    "sky.accelerators.H100(count=0)",
    "sky.plan(nodes=-1)",
    "sky.H100",
    "testing.FakeCloud(3)",
]


def test_a_wrong_argument_is_told_at_the_line_that_has_it(tmp_path: Path) -> None:
    """One process tries all of them: each is the first thing that its user does with skypool."""
    code = """
    import os, sys
    import skypool as sky
    from skypool import testing
    for number, code in enumerate(sys.stdin.read().splitlines()):
        if os.fork() == 0:
            exec(compile(code, f"{number}.py", "exec"))
        os.wait()
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    argv = [sys.executable, str(script)]
    err = subprocess.run(argv, input="\n".join(WRONG), capture_output=True, text=True, timeout=60).stderr
    frames = [line.split('"')[1] for line in err.splitlines() if line.startswith("  File ")]
    assert frames == [name for number in range(len(WRONG)) for name in (str(script), f"{number}.py")], err


FAILS = """
    import sys
    import skypool as sky
    @sky.compute
    def fails(_=None):
        raise ValueError("here it is")
    if __name__ == "__main__":
        with sky.ComputePool(console="off") as pool:
            try:
                {}
            except ValueError as e:
                if len(sys.argv) > 1:
                    raise
                raise RuntimeError("mine") from e
"""


WAYS = ["fails() >> pool", "fails() @ pool", "list(pool.map(fails, [1]))", "pool.submit(fails).result()"]

CHAINED = """
    import skypool as sky
    @sky.compute
    def fails(way):
        try:
            1 // 0
        except ZeroDivisionError as e:
            if way == "group":
                raise ExceptionGroup("here they are", [ValueError(1), ValueError(2)])
            raise ValueError("here it is") from e
    @sky.compute
    def items():
        yield 1
        fails.local("error")
    @sky.compute
    def take(items):
        for each in items:
            pass
    if __name__ == "__main__":
        import sys, traceback
        with sky.ComputePool(console="off", slots=1) as pool:
            for number, send in enumerate((
                lambda: fails("error") >> pool,
                lambda: fails("error") @ pool,
                lambda: fails("group") >> pool,
                lambda: list(items() >> pool),
                lambda: take(items.local()) >> pool,
                lambda: sky.cmd("false") >> pool,
            )):
                try:
                    send()
                except Exception as e:
                    print(number, file=sys.stderr)
                    sys.excepthook(type(e), e, e.__traceback__)
"""


@pytest.mark.parametrize("send", WAYS)
def test_an_error_of_a_function_on_a_node_shows_its_lines_there_and_the_users(tmp_path: Path, send: str) -> None:
    err = said(tmp_path, FAILS.format(send))
    assert "RemoteTraceback" in err
    assert err.rstrip().endswith("RuntimeError: mine")
    frames = [line for line in err.splitlines() if line.startswith("  File ")]
    assert len(frames) == 3, "on the node, where the call was sent, and where the second error was raised"
    assert all("script.py" in line for line in frames), err


def test_an_error_with_causes_of_its_own_or_with_items_shows_the_users_lines_alone(tmp_path: Path) -> None:
    err = said(tmp_path, CHAINED)
    assert [line for line in err.splitlines() if line.isdecimal()] == list("012345"), err
    frames = [line for line in err.splitlines() if line.lstrip(" |").startswith("File ")]
    assert all("script.py" in line for line in frames), err


def test_a_bug_of_skypool_keeps_its_frames(tmp_path: Path) -> None:
    err = said(tmp_path, "from skypool.wire import agent_config\nagent_config.AgentConfig.from_json(3)\n")
    assert 'skypool/wire/agent_config.py", line ' in err

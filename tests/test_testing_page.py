"""What docs/testing.md shows runs as it is, and what it lists is what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from skypool.testing.control import CALLS, FakeCloudControl
from skypool.testing.trial import ABILITIES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()


def test_what_the_page_shows_passes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for number, block in enumerate(each for each in blocks if "def test" in each or "class Test" in each):
        (tmp_path / f"test_page_{number}.py").write_text(block)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    words = ["-p", "no:cacheprovider", "-q", "-k", "training or launch_rents or pool_lives"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_the_page_lists_every_call_and_every_ability_and_no_string_that_is_not_there() -> None:
    for call in CALLS:
        assert f"`{call}`" in PAGE
    for name in ABILITIES:
        assert re.search(rf"^\| `{name}\(", PAGE, re.MULTILINE), name
    table = PAGE.partition("| `cloud.control` |")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)\(", table)
    assert names
    assert [name for name in names if not hasattr(FakeCloudControl, name)] == []

"""docs/multi-node.md: what it shows is sound Python, and what can be tried here runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.machines import Lab

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "multi-node.md").read_text(), re.DOTALL)


def test_what_the_page_shows_compiles() -> None:
    assert len(BLOCKS) == 12
    for block in BLOCKS:
        compile(block, "docs/multi-node.md", "exec")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_dask_runs_over_the_nodes_of_a_pool(lab: Lab, tmp_path: Path) -> None:
    machines = [lab.machine(keys=[lab.public_key]) for _ in range(2)]
    hosts = ", ".join(f"sky.Host({each.address!r}, host_key={each.host_key!r})" for each in machines)
    (shown,) = (block for block in BLOCKS if "def on_dask" in block)
    program = tmp_path / "program.py"
    program.write_text(
        f"import skypool as sky\n\n{shown}\n"
        f"provider = sky.SSH(hosts=[{hosts}], user='root', identity={str(lab.client_key)!r})\n"
        f"image = sky.Image(pip=['distributed'])\n"
        f"with sky.ComputePool(provider, nodes=2, slots=1, image=image, console='off') as pool:\n"
        f"    print(on_dask.with_options(timeout=100, output='silent')() @ pool)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"[{sorted(each.name for each in machines)}, None]\n"
    for each in machines:
        each.destroy()

"""What a type checker says of the factories: it knows the memory sizes, the forms and the partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api", reason="mypy is not installed")

GOOD = """\
from skypool import accelerators
from skypool.accelerators import A100, H100, RTX_4090, Accelerator, TPUv5p, TPUv5p_8

kept: list[Accelerator] = [
    H100(), H100(memory="94GB", form_factor="NVL", count=2), A100(memory="40GB"), RTX_4090(count=4),
    TPUv5p(count=4), TPUv5p_8(), A100.partition_2g_10gb, H100().partition("1g.10gb", count=7),
    accelerators.parse("H100:8"), accelerators.parse(A100), *accelerators.any(memory=">=40GB"),
]
"""
BAD = """\
from skypool import accelerators
from skypool.accelerators import A100, H100, RTX_4090, T4, TPUv5p_8

H100(memory="41GB")
A100(form_factor="NVL")
A100.partition_9g_90gb
T4.partition_1g_5gb
RTX_4090(form_factor="SXM")
TPUv5p_8(count=2)
H100(8)
accelerators.H1000
accelerators.suggest(7e9, "lara")
"""


def complaints(text: str, tmp_path: Path) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(text)
    root = Path(__file__).parents[1]
    out, err, _ = api.run(["--strict", "--config-file", str(root / "pyproject.toml"), str(program)])
    assert not err
    return [line.removeprefix(f"{program}:") for line in out.splitlines() if ": error: " in line]


@pytest.mark.slow
def test_mypy_accepts_what_exists(tmp_path: Path) -> None:
    assert complaints(GOOD, tmp_path) == []


@pytest.mark.slow
def test_mypy_refuses_on_every_line_what_does_not_exist(tmp_path: Path) -> None:
    found = complaints(BAD, tmp_path)
    refused = {int(line.partition(":")[0]) for line in found}
    assert refused == set(range(4, 4 + len(BAD.splitlines()[3:])))
    assert "41GB" in found[0]
    assert "NVL" in found[1]

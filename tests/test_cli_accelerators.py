"""The commands, run as the programs that users run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = "import sys; from skypool.cli import main; sys.exit(main())"
BLOCKS = re.compile(r"^\$ (skypool (?:accelerators|suggest).*)\n((?:.*\n)*?)(?=\$ |```)", re.MULTILINE)


def skypool(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return subprocess.run(
        [sys.executable, "-c", RUN, *args], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True
    )


def names(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.split()[0] for line in done.stdout.splitlines()[1:]]


def test_the_list_is_filtered_by_kind_memory_and_vendor() -> None:
    done = skypool("accelerators", "--kind", "gpu", "--memory", ">=80GB", "--vendor", "AMD")
    assert done.returncode == 0
    assert {"MI300X", "MI300A", "MI250X"} <= set(names(done))
    assert not {"H100-80GB-SXM", "MI210", "Gaudi3"} & set(names(done))


@pytest.mark.slow
def test_a_query_is_part_of_a_name_or_any_spelling_of_one() -> None:
    assert names(skypool("accelerators", "a100")) == [
        "A100-80GB-SXM", "A100-80GB-PCIe", "A100-40GB-SXM", "A100-40GB-PCIe", "A100X",
    ]  # fmt: skip
    assert names(skypool("accelerators", "p5.48xlarge")) == ["H100-80GB-SXM:8"]
    assert names(skypool("accelerators", "list", "TPUv6")) == ["TPUv6"]


@pytest.mark.slow
def test_json_is_json_without_colours_even_where_colours_are_forced() -> None:
    done = skypool("accelerators", "h100", "--json", FORCE_COLOR="1", CLICOLOR_FORCE="1")
    told = json.loads(done.stdout)
    assert [each["spelling"] for each in told][:2] == ["H100-80GB-SXM", "H100-80GB-PCIe"]
    assert "\x1b" not in done.stdout
    for args in (["accelerators", "compare", "H100", "TPUv6"], ["suggest", "--parameters", "7B"]):
        assert len(json.loads(skypool(*args, "--json", FORCE_COLOR="1").stdout)) >= 2


def test_compare_puts_what_is_asked_side_by_side() -> None:
    done = skypool("accelerators", "compare", "A100:8@40GB", "v5p-8")
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["A100-40GB:8", "v5p-8"]
    assert any(line.split() == ["memory,", "all", "320", "GB", "380", "GB"] for line in lines)


def test_suggest_says_the_arithmetic() -> None:
    done = skypool("suggest", "--parameters", "7B", "--workload", "lora")
    first = done.stdout.splitlines()[0]
    assert first.split()[:2] == ["minimum", "A10G"]
    assert "weights 14.1 + gradients 0.1 + optimizer 0.4 + activations 0.9 = 15.4 GB of 24 GB" in first


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["accelerators", "H1000"], "did you mean H100 or"),
        (["accelerators", "compare", "H100", "MI300Y"], "or MI300X?"),
        (["accelerators", "--memory", "big"], ">=40GB"),
        (["accelerators", "--kind", "toaster"], "no accelerator has kind 'toaster'"),
        (["suggest", "--parameters", "many"], "7B"),
        (["suggest", "--parameters", "70"], "for 70 billion write 70e9 or '70B'"),
        (["suggest", "--parameters", "7B", "--workload", "lara"], "did you mean lora"),
        (["suggest", "--parameters", "7B", "--precision", "bf8"], "bf16"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(args: list[str], says: str) -> None:
    done = skypool(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_mistake_is_red_where_there_are_colours() -> None:
    assert skypool("accelerators", "H1000", FORCE_COLOR="1").stderr.startswith("\x1b[31m")


def test_a_command_that_does_not_exist_is_status_2_too() -> None:
    done = skypool("acelerators")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_names_every_command() -> None:
    assert {"accelerators", "suggest"} <= set(skypool("--help").stdout.split())
    assert {"list", "compare"} <= set(skypool("accelerators", "--help").stdout.split())


@pytest.mark.slow
def test_the_page_shows_what_the_commands_print() -> None:
    shown = BLOCKS.findall((ROOT / "docs" / "accelerators.md").read_text())
    assert len(shown) >= 3
    for command, output in shown:
        assert skypool(*shlex.split(command)[1:]).stdout == output, command

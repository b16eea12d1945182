"""Small bars of measurements, and the live view with costs and measurements in it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from skypool import console, events
from skypool.console.board import Board, Figures, Picture, Row
from skypool.console.gauges import bar, bars, gauges, usd
from skypool.console.layout import draw
from skypool.devices.sample import DeviceSample, NodeSample

GPU = DeviceSample(
    "cuda", 0, utilization_percent=61.0, memory_used_mib=40960.0, memory_total_mib=81920.0, power_watts=350.0,
    power_limit_watts=700.0,
)  # fmt: skip


def of(*devices: DeviceSample, claimed: bool = False) -> NodeSample:
    return NodeSample(devices=devices, claimed=claimed)


def texts(sample: NodeSample | None, most: int = 8) -> list[str]:
    return [f"{each.name} {each.bars} {each.text}" for each in gauges(sample, most)]


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "░░░░░░░░"), (0.001, "█░░░░░░░"), (0.5, "████░░░░"), (0.999, "███████░"), (1.0, "████████"), (3.0, "█" * 8)],
)
def test_a_bar_tells_nothing_from_little_and_nearly_all_from_all(share: float, shown: str) -> None:
    assert bar(share) == shown


def test_each_device_has_a_bar_and_an_unknown_one_a_question_mark() -> None:
    assert bars([0.0, 0.5, None, 1.0]) == "▁▅?█"
    assert bars([0.5]) == "████░░░░"
    assert bars([None, None]) == ""
    assert bars([0.0, 1.0, 1.0, 0.0], most=3) == "████░░░░"


def test_one_device_has_a_horizontal_bar() -> None:
    assert texts(of(GPU)) == ["GPU █████░░░ 61%", "mem ████░░░░ 40.0/80 GiB", "power ████░░░░ 350 W"]


def test_more_devices_than_fit_have_their_lowest_highest_and_mean_value() -> None:
    seen = of(*(replace(GPU, index=n, utilization_percent=10.0 * n) for n in range(9)))
    assert texts(seen, 9)[0] == "GPU ▁▁▂▃▄▅▅▆▇ 40%"
    assert texts(seen, 8) == [
        "GPU ███░░░░░ 0%-80% mean 40%", "mem ████░░░░ 360/720 GiB", "power ████░░░░ 3.1 kW",
    ]  # fmt: skip


def test_what_is_unknown_is_never_zero() -> None:
    nothing = DeviceSample("cuda", 0, unknown="the monitor hangs")
    for seen in (None, of(nothing), of(nothing, nothing), NodeSample()):
        for each in gauges(seen):
            assert (each.bars, each.text) == ("", "unknown")
    assert gauges(of(GPU, nothing))[0].text == "61% of 1/2"
    assert gauges(of(GPU, nothing))[2].text == "350 W of 1/2"
    assert gauges(of(replace(GPU, power_limit_watts=None)))[2].bars == "", "without a limit there is no scale"


def test_a_node_without_devices_shows_its_cpus_and_its_memory() -> None:
    seen = NodeSample(cpu_percent=25.0, memory_used_mib=4096.0, memory_total_mib=16384.0)
    assert texts(seen) == ["CPU ██░░░░░░ 25%", "mem ██░░░░░░ 4.0/16 GiB", "power  unknown"]


@pytest.mark.parametrize(
    ("amount", "shown"), [(None, "unknown"), (0.0, "0.00"), (0.0042, "0.0042"), (1.005, "1.00"), (1234.5, "1,234.50")]
)
def test_small_amounts_have_more_decimals(amount: float | None, shown: str) -> None:
    assert usd(amount) == shown


# --- the live view -------------------------------------------------------------------------------------------


def screen(picture: Picture, width: int = 80, height: int = 24) -> list[str]:
    """What a terminal of this size shows."""
    out = io.StringIO()
    terminal = Console(file=out, width=width, height=height, force_terminal=False)
    terminal.print(draw([picture], 100.0, height, width=width))
    return out.getvalue().splitlines()


EIGHT = of(*(replace(GPU, index=n, utilization_percent=12.5 * (n + 1)) for n in range(8)))


def pool(nodes: int, figures: Figures | None, sample: NodeSample | None = EIGHT) -> Picture:
    rows = tuple(
        Row(n, "ready", 0.0, "", 8, 6, waiting=2, done=1200, running=("train",) * 6, tail="loss\n", sample=sample)
        for n in range(nodes)
    )
    return Picture("train", "ready", 1.0, done=1200 * nodes, rows=rows, figures=figures)


MONEY = Figures(1.25, 47.84, 0.4)


def test_the_view_shows_costs_and_each_nodes_measurements_in_80_columns() -> None:
    lines = screen(pool(2, MONEY))
    assert lines == [
        "train  ready  2 nodes  12/16 busy  2,400 done  1:39",
        "  spent 1.25 USD  rate 47.84 USD/h  idle 0.4000 USD",
        "  node 0  ready  ██████░░ 6/8  1,200 done  train ×6  loss",
        "          GPU ▂▃▄▅▆▇██ 56%  mem ▅▅▅▅▅▅▅▅ 320/640 GiB  power ▅▅▅▅▅▅▅▅ 2.8 kW",
        "  node 1  ready  ██████░░ 6/8  1,200 done  train ×6  loss",
        "          GPU ▂▃▄▅▆▇██ 56%  mem ▅▅▅▅▅▅▅▅ 320/640 GiB  power ▅▅▅▅▅▅▅▅ 2.8 kW",
    ]


def test_a_degraded_node_is_shown_as_such_with_the_device_and_the_reason() -> None:
    board = Board()
    for n in range(3):
        board.hear(events.NodePhase(pool="train", node=n, phase="ready", slots=8))
    reasons = ("cuda 3: 60 of 72 NVLinks\x1b[2J are active",)
    board.hear(events.HealthChanged(pool="train", node=1, state="degraded", reasons=reasons))
    board.hear(events.HealthChanged(pool="train", node=2, state="unknown", reasons=("cuda 0: no ECC",)))
    _, *lines = screen(board.picture())
    assert lines[0].split() == ["node", "0", "ready", "░░░░░░░░", "0/8", "0", "done"]
    assert lines[1].split()[:3] == ["node", "1", "degraded"]
    assert lines[1].endswith("cuda 3: 60 of 72 NVLinks are active")
    assert "ready" in lines[2]
    board.hear(events.HealthChanged(pool="train", node=1, state="ok"))
    assert "degraded" not in "\n".join(screen(board.picture()))


def test_without_figures_the_view_has_no_lines_for_them() -> None:
    assert screen(pool(1, None)) == [
        "train  ready  1 node  6/8 busy  1,200 done  1:39",
        "  node 0  ready  ██████░░ 6/8  1,200 done  train ×6  loss",
    ]


def test_unknown_costs_and_measurements_are_shown_as_unknown() -> None:
    lines = screen(pool(1, Figures(), None))
    assert lines[1] == "  spent unknown  rate unknown  idle unknown"
    assert lines[3] == "          busy unknown  mem unknown  power unknown"


def test_values_of_nodes_that_are_not_trusted_are_marked() -> None:
    claimed = replace(EIGHT, claimed=True)
    assert screen(pool(1, MONEY, claimed))[3].startswith("  claimed GPU ▂▃▄▅▆▇██ 56%")
    assert "claimed GPU 56%" in screen(pool(20, MONEY, claimed), 120)[2]


def test_many_nodes_have_one_line_each_with_measurements_without_bars() -> None:
    lines = screen(pool(15, MONEY), 140)
    assert len(lines) == 17
    assert lines[2].endswith("train ×6  GPU 56% mem 320/640 GiB power 2.8 kW  loss")


@pytest.mark.parametrize(
    ("width", "measured"),
    [(80, "GPU 56% mem 320/640 GiB"), (64, "GPU 56%"), (90, "GPU 56% mem 320/640 GiB power 2.8 kW")],
)
def test_measurements_without_bars_are_left_out_but_never_cut(width: int, measured: str) -> None:
    lines = screen(pool(15, MONEY), width)[2:]
    assert {line.partition("train ×6  ")[2].rstrip() for line in lines} == {measured}


def test_facts_about_a_machine_are_left_out_but_never_cut() -> None:
    row = Row(3, "ready", machine=("23.92 USD/h", "p5.48xlarge", "8 NVIDIA H100 80GB HBM3"))
    for width, shown in ((80, row.machine), (60, row.machine[:2]), (40, row.machine[:1]), (30, ())):
        [line] = screen(Picture("train", "ready", rows=(row,)), width)[1:]
        assert line.split("  ")[3:] == ["0 done", *shown] if shown else "USD" not in line


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("nodes", [0, 1, 10, 11, 21, 22, 300])
def test_a_pool_of_any_size_fits_the_terminal(width: int, nodes: int) -> None:
    lines = screen(pool(nodes, MONEY, replace(EIGHT, claimed=True)), width)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    assert nodes <= 21 or "more node" in lines[-1]


def test_figures_are_asked_for_once_a_second_at_most_and_only_for_a_view() -> None:
    asked: list[int] = []

    def figures() -> Figures:
        asked.append(1)
        return replace(MONEY, samples={0: EIGHT})

    console.attach(events.EventStream(), "off", figures)()
    console.attach(events.EventStream(), "plain", figures)()
    assert asked == []
    board = Board(figures)
    board.hear(events.NodePhase(pool="p", node=0, phase="ready", slots=8))
    assert asked == []
    shown = [board.picture() for _ in range(50)]
    assert len(asked) == 1
    assert (shown[0].rows[0].sample, shown[0].figures) == (EIGHT, figures())

"""Reading names: those that exist, those that do not, and those a user adds."""

from __future__ import annotations

import pickle
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skypool import accelerators
from skypool.accelerators import A100, H100, Accelerator, parse, parse_all, registry, tables
from skypool.devices import Device, Family, family
from skypool.errors import UnknownAccelerator, UsageError


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("H100:8", "H100-80GB:8"),
        ("8x H100", "H100-80GB:8"),
        ("8xH100", "H100-80GB:8"),
        ("8 × H100", "H100-80GB:8"),
        ("H100 x8", "H100-80GB:8"),
        ("h100 : 8", "H100-80GB:8"),
        ("A100-80GB", "A100-80GB"),
        ("a100_80gb", "A100-80GB"),
        ("A100 80 GB", "A100-80GB"),
        ("A100:4@40GB", "A100-40GB:4"),
        ("A100@40GB:4", "A100-40GB:4"),
        ("4x A100-40GB-SXM4", "A100-40GB-SXM:4"),
        ("nvidia-tesla-v100", "V100-16GB"),
        ("NVIDIA GeForce RTX 3060@8GB", "RTX_3060-8GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("Tesla V100-SXM2-32GB", "V100-32GB-SXM"),
        ("H100/1g.10gb:7", "H100-80GB/1g.10gb:7"),
        ("MI300X:8", "MI300X:8"),
        ("amd instinct mi300x", "MI300X"),
        ("v5litepod-16", "v5litepod-16"),
        ("TPUv5e_16", "v5litepod-16"),
        ("cloud tpu v5p-8", "v5p-8"),
        ("TPUv5p:4", "TPUv5p:4"),
        ("p4d.24xlarge", "A100-40GB-SXM:8"),
        ("trn1.32xlarge", "Trainium1:16"),
        ("g6f.large", "L4/1of8"),
        ("a2-megagpu-16g", "A100-40GB-SXM:16"),
        ("Standard_NC80adis_H100_v5", "H100-94GB-NVL:2"),
        ("NV28adms_V710_v5", "RadeonPro_V710"),
        ("8H100.80S.176V", "H100-80GB-SXM:8"),
        ("H100x8", "H100-80GB:8"),
        ("A100-80GBx4", "A100-80GB:4"),
        ("MI300Xx8", "MI300X:8"),
        ("4090", "RTX_4090-24GB"),
        ("2x 4090", "RTX_4090-24GB:2"),
        ("1080ti", "GTX_1080_Ti"),
        ("trn2", "Trainium2"),
        ("inf2", "Inferentia2"),
        ("ml.p5.48xlarge", "H100-80GB-SXM:8"),
        ("ml.g5.12xlarge", "A10G:4"),
        ("RTX 6000 Ada Generation", "RTX_6000_Ada"),
        ("NVIDIA RTX 5880 Ada Generation", "RTX_5880_Ada"),
        ("gpu:a100:4", "A100-80GB:4"),
        ("gres:gpu:h100:8", "H100-80GB:8"),
        ("Tesla-T4-SHARED", "T4"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "A100-80GB-SXM/1g.10gb"),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb-SHARED", "H100-80GB-SXM/1g.10gb"),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "RTX_PRO_6000-Server"),
        ("NVIDIA-GH200-480GB", "GH200-96GB"),
        ("RTX_PRO_A6000_SE", "RTX_PRO_6000-Server"),
        ("a10g-large", "A10G"),
        ("a10g-largex4", "A10G:4"),
        ("l4x4", "L4:4"),
        ("l40sx8", "L40S:8"),
        ("a100-large", "A100-80GB"),
        ("t4-medium", "T4"),
        ("cpu-basic", "CPU"),
        ("Standard_NC24ads_A100_v4", "A100-80GB-PCIe"),
        ("Standard_NC96ads_A100_v4", "A100-80GB-PCIe:4"),
        ("Standard_NC64as_T4_v3", "T4:4"),
        ("Standard_NC16as_T4_v3", "T4"),
        ("Standard_NV72ads_A10_v5", "A10:2"),
        ("Standard_NC24rs_v3", "V100-16GB:4"),
        ("Standard_ND96is_H100_v5", "H100-80GB-SXM:8"),
        ("Standard_ND96isr_H200_v5", "H200-SXM:8"),
        ("gpu_8x_a100_80gb_sxm4", "A100-80GB-SXM:8"),
        ("gpu_2x_h100_sxm5", "H100-80GB-SXM:2"),
        ("gpu_1x_rtx6000", "Quadro_RTX_6000"),
        ("n3-H100x8-NVLink", "H100-80GB-PCIe:8"),
        ("n3-L40x4", "L40:4"),
        ("n1-RTX-A6000x2", "RTX_A6000:2"),
        ("gpu-h100-sxm_8gpu-128vcpu-1600gb", "H100-80GB-SXM:8"),
        ("gpu-l40s-a", "L40S"),
        ("H100-NVLINK", "H100-80GB"),
        ("", ""),
    ],
)
def test_a_spelling_is_read_as(spelling: str, canonical: str) -> None:
    if not spelling:
        with pytest.raises(UnknownAccelerator):
            parse(spelling)
        return
    assert str(parse(spelling)) == canonical


def test_a_count_that_may_be_part_of_the_name_is_not_guessed() -> None:
    with pytest.raises(UnknownAccelerator):
        parse("MI250x4")


@pytest.mark.parametrize("row", tables.rows("families.csv"), ids=lambda row: row["pattern"])
def test_every_pattern_of_a_family_means_an_accelerator(row: dict[str, str]) -> None:
    assert parse(row["means"]).count == 1
    assert int(row["per"]) >= 0


def test_a_thousand_random_ways_to_write_each_card_lead_back_to_it() -> None:
    """Vendor, separators, case, memory, form and count are put together at random, and mean what they were made of."""
    rnd = random.Random(20261122)
    for each in accelerators.catalog():
        forms = [each.form_factor or ""] if each.form_factor and rnd.random() < 0.5 else [""]
        for _ in range(20):
            size = f"{each.memory_gb:g}GB"
            words = [each.name.replace("_", rnd.choice("_- ")), size, *filter(None, forms)]
            text = rnd.choice("-_ ").join(words)
            text = rnd.choice([text, text.upper(), text.lower()])
            if each.vendor == "nvidia":
                text = rnd.choice(["", "NVIDIA ", "nvidia-"]) + text
            count = rnd.choice([1, 2, 8])
            ways = [f"{text}:{count}", f"{count}x {text}", f"{text} x{count}", f"{count} × {text}", f"{text}x{count}"]
            found = parse(rnd.choice(ways) if count > 1 else text)
            assert (found.name, found.memory_gb, found.count) == (each.name, each.memory_gb, count), text
            if forms[0]:  # Google's `nvidia-h100-80gb` is the SXM card
                assert found.form_factor in (each.form_factor, None)
            assert parse(str(found)) == found


def test_constants_of_flyte_are_there_with_their_partitions() -> None:
    assert accelerators.A100_80GB() == A100(memory="80GB")
    assert accelerators.A100_80GB.partition_1g_10gb == parse("A100-80GB/1g.10gb")
    with pytest.raises(AttributeError, match="partition_2g_10gb"):
        _ = accelerators.A100_80GB.partition_2g_10gb
    made = [accelerators.L4_VWS(), accelerators.V5E(), accelerators.V5P(), accelerators.V6E()]
    assert [str(each) for each in made] == ["L4", "TPUv5e", "TPUv5p", "TPUv6"]
    assert A100.partitioned("2g.10gb") == A100.partition_2g_10gb
    assert H100.partitioned("1g.10gb", 7).cards == 1


def test_hardware_of_xilinx_is_not_what_is_meant_by_amd() -> None:
    assert {each.kind for each in accelerators.any(vendor="amd")} == {"gpu", "apu"}
    assert {each.name for each in accelerators.any(vendor="xilinx")} == {"FPGA_VU9P", "FPGA_VU47P", "U30"}


def test_a_value_is_itself_and_a_factory_its_plain_value() -> None:
    eight = H100(count=8)
    assert parse(eight) is eight
    assert parse(A100) == A100()
    assert parse(accelerators.TPUv5p_8) == parse("v5p-8")


def test_a_dialect_is_read_with_counts_and_a_strange_one_is_refused() -> None:
    assert parse("A100:8", dialect="skypilot") == A100(memory="40GB", count=8)
    assert parse("8x RTX4090", dialect="flyte") == parse("RTX_4090:8")
    with pytest.raises(UsageError, match="skypilot"):
        parse("A100", dialect="klingon")


def test_several_are_read_from_a_list_or_a_string_with_commas() -> None:
    assert parse_all("H100:8, A100-80GB:8") == parse_all(["H100:8", A100(count=8)])
    assert parse_all(H100()) == parse_all(H100) == (H100(),)
    assert parse_all(accelerators.any(memory=">=180GB")) == accelerators.any(memory=">=180GB")
    nothings: list[str | list[str]] = ["", [], ","]
    for nothing in nothings:
        with pytest.raises(UsageError, match="CPU"):
            parse_all(nothing)


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("H1000", "H100"),
        ("A100-41GB", "A100-40GB"),
        ("RTX 4099", "RTX_4090"),
        ("v5p-9", "v5p-8"),
        ("Trainum2", "Trainium2"),
        ("MI300Y", "MI300X"),
        ("H100:0", "H100"),
        ("A100:4@41GB", "A100-40GB"),
        ("H100/9g.90gb:2", "H100-80GB/7g.80gb"),
        ("A100-80GB/2g.10gb", "A100-80GB/2g.20gb"),
        ("v5p-8:2", "v5p-8"),
        ("gtx1070it", "GTX_1070_Ti"),
    ],
)
def test_an_unknown_name_carries_three_that_exist_the_nearest_first(spelling: str, meant: str) -> None:
    with pytest.raises(UnknownAccelerator) as caught:
        parse(spelling)
    assert caught.value.name == spelling
    assert len(caught.value.nearest) == 3
    assert meant in caught.value.nearest
    for name in caught.value.nearest:
        parse(name)


@pytest.mark.parametrize("spelling", ["H100/1g.10gb:0", "A100-80GB@40GB", "v5p-8@40GB", "T4@24GB", "0x H100"])
def test_a_spelling_that_contradicts_itself_is_unknown(spelling: str) -> None:
    with pytest.raises(UnknownAccelerator):
        parse(spelling)


def test_a_name_too_long_to_be_one_is_refused_unread() -> None:
    with pytest.raises(UnknownAccelerator) as caught:
        parse("h100" * 100_000)
    assert len(caught.value.name) < 200


@pytest.mark.parametrize("wrong", [None, 8, b"H100", ["H100"]])
def test_what_is_no_string_is_unknown_too(wrong: object) -> None:
    with pytest.raises(UnknownAccelerator):
        parse(wrong)  # type: ignore[arg-type] # the point


def reads(spelling: str) -> None:
    """A value that its own spelling gives back, or UnknownAccelerator; anything else fails the test."""
    found: Accelerator | UnknownAccelerator
    try:
        found = parse(spelling)
    except UnknownAccelerator as error:
        found = error
    if isinstance(found, UnknownAccelerator):
        assert all(parse(name) for name in found.nearest)
    else:
        assert parse(str(found)) == found


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(st.text(max_size=150))
def test_any_text_is_a_value_or_unknown(text: str) -> None:
    reads(text)


def mutated(word: str, rnd: random.Random) -> str:
    letters = list(word)
    for _ in range(rnd.randint(1, 4)):
        place = rnd.randrange(len(letters) + 1)
        match rnd.randrange(5):
            case 0:
                letters.insert(place, rnd.choice(string.printable + "×–é\0"))
            case 1 if letters:
                del letters[min(place, len(letters) - 1)]
            case 2:
                letters.insert(place, rnd.choice([":8", "@40GB", "8x", "/2g.10gb", ":", "@", "/", "GB"]))
            case 3 if letters:
                at = min(place, len(letters) - 1)
                letters[at] = letters[at].swapcase()
            case _:
                letters.reverse()
    return "".join(letters)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_mutated_names_are_a_value_or_unknown(count: int) -> None:
    rnd = random.Random(20261121)
    words = [row["alias"] for row in tables.rows("aliases.csv")] + list(tables.slices())
    words += [str(each) for each in accelerators.catalog()]
    for _ in range(count):
        reads(mutated(rnd.choice(words), rnd))


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_random_strings_are_a_value_or_unknown(count: int) -> None:
    rnd = random.Random(11)
    letters = string.printable + "×–éßİ\0\ud800" + "hHaAtTvVxX0123456789gGbB:@/-_. " * 4
    for _ in range(count):
        reads("".join(rnd.choices(letters, k=rnd.randrange(24))))


@pytest.fixture
def clean_names() -> Iterator[None]:
    before = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(before)


def test_a_registered_function_makes_a_name(clean_names: None) -> None:
    @accelerators.register("our-box")
    def _ours() -> Accelerator:
        return H100(count=4)

    assert parse("Our Box") == H100(count=4)
    assert str(parse("our_box:2")) == "our-box:2"
    assert parse("2x our-box") == parse(str(parse("our-box:2")))
    travelled = pickle.loads(pickle.dumps(parse("our-box:2")))
    assert (travelled, str(travelled)) == (H100(count=2), "our-box:2")
    with pytest.raises(UnknownAccelerator) as caught:
        parse("our-bix")
    assert caught.value.nearest[0] == "our-box"


def test_a_registered_class_makes_a_name_and_answers_for_its_devices(clean_names: None) -> None:
    @accelerators.register("xpu", memory="48GB")
    class _XPU(Family):
        kind = "xpu"

        def detect(self) -> tuple[Device, ...]:
            return (Device("xpu", 0, "XPU", 49_152, pin="0"), Device("xpu", 1, "XPU", 49_152, pin="1"))

        def visible_env(self, pins: object) -> dict[str, str]:
            return {"XPU_VISIBLE": ",".join(map(str, pins))}  # type: ignore[call-overload] # narrower here

    assert parse("xpu:2").total_memory_gb == 96
    assert family("xpu").auto_device_count() == 2
    assert [device.index for device in family("xpu").get_parallel_devices("1")] == [1]
    assert family("xpu").visible_env(["1"]) == {"XPU_VISIBLE": "1"}


@pytest.mark.parametrize("taken", ["H100", "h-100", "v5p-8", "a:b", "", "a/b"])
def test_a_name_that_is_taken_or_cannot_be_written_is_refused(taken: str, clean_names: None) -> None:
    with pytest.raises(UsageError):
        accelerators.register(taken)(H100)


def test_a_registration_can_be_taken_back(clean_names: None) -> None:
    accelerators.register("gone")(lambda: H100())
    accelerators.unregister("gone")
    with pytest.raises(UnknownAccelerator):
        parse("gone")


def test_a_registered_function_must_return_an_accelerator(clean_names: None) -> None:
    accelerators.register("odd")(lambda: "H100")
    with pytest.raises(UsageError, match="returned 'H100'"):
        parse("odd")


def test_a_package_brings_names_by_its_entry_points(tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(
        "from skypool.accelerators import Custom\ndef zeta(): return Custom('Zeta', memory='64GB')\n"
    )
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[skypool.accelerators]\nzeta = acme:zeta\nbroken = acme:missing\nH100 = acme:zeta\n"
    )
    asked = (
        "import sys, warnings; from skypool.accelerators import parse;"
        "parse('H100'); print('acme' in sys.modules);"
        "caught = warnings.catch_warnings(record=True); seen = caught.__enter__();"
        "warnings.simplefilter('always');"
        "print(parse('zeta:2').total_memory_gb); print(*sorted(str(w.message).split()[1] for w in seen))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["False", "128.0", "'H100' 'broken'"], done.stderr

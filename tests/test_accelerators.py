"""The value, the factories, and the traps in the names."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import zipfile
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import skypool
from skypool import accelerators
from skypool.accelerators import A100, CPU, H100, TPU, V100, Accelerator, Custom, parse, tables
from skypool.errors import UsageError


def test_a_bare_a100_is_80_gb() -> None:
    assert A100() == parse("A100") == A100(memory="80GB")
    assert A100().memory_gb == 80


def test_a_bare_v100_is_16_gb() -> None:
    assert V100() == parse("v100") == V100(memory="16GB")
    assert V100().memory_gb == 16


def test_nvidia_tesla_a100_is_the_40_gb_card() -> None:
    assert parse("nvidia-tesla-a100") == A100(memory="40GB")
    assert parse("nvidia-tesla-a100", dialect="gcp") == A100(memory="40GB", form_factor="SXM")
    assert parse("nvidia-a100-80gb") == A100(memory="80GB")


def test_a_bare_a100_is_40_gb_in_the_words_of_skypilot_and_flyte() -> None:
    assert parse("A100", dialect="skypilot").memory_gb == parse("A100", dialect="flyte").memory_gb == 40
    assert parse("A100", dialect="skyward").memory_gb == 80


def test_a_bare_v100_is_32_gb_in_the_words_of_skyward() -> None:
    assert parse("V100", dialect="skyward").memory_gb == 32


def test_a_bare_h100_of_skypilot_is_pcie_on_runpod_and_sxm_elsewhere() -> None:
    assert parse("H100", dialect="skypilot-runpod").form_factor == "PCIe"
    assert parse("H100", dialect="skypilot").form_factor == "SXM"
    assert parse("H100").form_factor is None


def test_four_cards_called_6000_are_four_cards() -> None:
    named = [parse(word) for word in ("RTX6000", "RTX6000-Ada", "RTX-PRO-6000", "A6000")]
    assert [each.name for each in named] == ["Quadro_RTX_6000", "RTX_6000_Ada", "RTX_PRO_6000", "RTX_A6000"]
    assert [each.memory_gb for each in named] == [24, 48, 96, 48]


def test_amazon_writes_its_chips_without_the_1_and_others_with_a_small_letter() -> None:
    assert parse("Trainium").name == "Trainium1"
    assert parse("Inferentia").name == "Inferentia1"
    assert parse("T4g").name == "T4G"
    assert parse("RTX PRO Server 6000").name == "RTX_PRO_6000"
    assert parse("Gaudi HL-205").name == "Gaudi"


def test_trainium_has_the_memory_that_amazon_documents() -> None:
    assert parse("Trainium2").memory_gb == 96
    assert parse("Trainium3").memory_gb == 144


def test_there_is_no_h100_of_40_gb() -> None:
    with pytest.raises(UsageError, match="80GB SXM, 80GB PCIe, 94GB NVL"):
        accelerators.H100(memory="40GB")  # type: ignore[arg-type] # the point


def test_a_b200_has_what_the_clouds_sell_not_what_is_soldered_on() -> None:
    assert parse("B200").memory_gb == 180
    assert parse("GB200").memory_gb == 186


def test_the_suffix_counts_cores_or_chips_by_generation() -> None:
    chips = {type: parse(type).count for type in ("v2-8", "v3-32", "v4-64", "v5p-8", "tpu7x-8")}
    assert chips == {"v2-8": 4, "v3-32": 16, "v4-64": 32, "v5p-8": 4, "tpu7x-8": 4}
    assert {type: parse(type).count for type in ("v5e-8", "v6e-8")} == {"v5e-8": 8, "v6e-8": 8}


def test_the_factories_of_slices_count_the_same_way() -> None:
    assert accelerators.TPUv5p_8().total_memory_gb == 4 * 95
    assert accelerators.TPUv4_64().count == 32
    assert accelerators.TPUv3_32().count == 16


def test_a_slice_of_v5e_has_half_as_many_hosts_as_machines() -> None:
    it = TPU("v5e", topology="4x4").slice
    assert it is not None
    assert (it.type, it.chips, it.hosts, it.vms, it.chips_per_vm) == ("v5litepod-16", 16, 2, 4, 4)
    assert it.runtime_version == "v2-alpha-tpuv5-lite"
    assert not it.single_host


def test_a_slice_is_found_by_its_chips_too() -> None:
    assert TPU("v5p", chips=4) == TPU("v5p-8") == TPU("TPUv5p_8") == parse("tpu-v5p-8")
    assert TPU("v6e") == parse("TPUv6")


def test_a_shape_that_is_not_sold_lists_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"2x2 \(4 chips\), 2x4 \(8 chips\)"):
        TPU("v6e", topology="3x3")
    with pytest.raises(UsageError, match="v5p-128"):
        TPU("v5p-12")
    with pytest.raises(UsageError, match="leave topology= and chips= out"):
        TPU("v5p-8", topology="4x4x4")


def test_a_slice_cannot_be_counted() -> None:
    with pytest.raises(UsageError, match="4 chips"):
        TPU("v5p-8").with_count(8)


def test_a_partition_only_the_smaller_card_has_makes_a_bare_a100_that_card() -> None:
    part = A100().partition("2g.10gb")
    assert part == A100.partition_2g_10gb == parse("A100/2g.10gb") == A100(memory="40GB").partition("2g.10gb")
    assert (part.memory_gb, part.card_memory_gb) == (10, 40)
    assert pickle.loads(pickle.dumps(A100())).partition("2g.10gb") == part


def test_a_card_of_known_memory_refuses_the_partitions_of_another_and_lists_its_own() -> None:
    with pytest.raises(UsageError, match=r"A100 80GB has no partition '2g\.10gb'; it has 1g\.10gb, .*7g\.80gb"):
        A100(memory="80GB").partition("2g.10gb")


def test_a_card_without_partitions_says_so() -> None:
    with pytest.raises(UsageError, match="T4 16GB has no partitions"):
        accelerators.T4().partition("1g.5gb")
    with pytest.raises(AttributeError, match="partition_2g_10gb"):
        _ = A100.partition_9g_90gb  # type: ignore[attr-defined] # the point


def test_seven_small_partitions_are_one_card_and_eight_are_refused() -> None:
    seven = H100().partition("1g.10gb", count=7)
    assert (seven.count, seven.cards, seven.total_memory_gb) == (7, 1, 70)
    with pytest.raises(UsageError, match="at most 7"):
        H100().partition("1g.10gb", count=8)
    assert H100(count=2).partition("1g.10gb", count=8).cards == 2
    assert parse("H100/1g.10gb:8").cards == 2


def test_the_same_profile_is_another_partition_on_another_card() -> None:
    on_h200, on_gb300 = parse("H200/1g.35gb"), parse("GB300/1g.35gb")
    assert on_h200.part is not None
    assert on_gb300.part is not None
    assert (on_h200.part.max_per_card, on_gb300.part.max_per_card) == (4, 7)
    assert parse("A100-40GB/1g.10gb") != parse("A100-80GB/1g.10gb")


@pytest.mark.parametrize(
    "profiles",
    [
        ["4g.20gb", "3g.20gb"],
        ["3g.20gb", "3g.20gb"],
        ["2g.10gb", "2g.10gb", "2g.10gb", "1g.5gb"],
        ["4g.20gb", "2g.10gb", "1g.5gb"],
        ["1g.10gb"] * 4,
        [],
    ],
)
def test_sets_that_the_mig_guide_draws_fit(profiles: list[str]) -> None:
    assert A100(memory="40GB").fits(profiles)


@pytest.mark.parametrize(
    "profiles",
    [
        ["7g.40gb", "1g.5gb"],
        ["4g.20gb", "4g.20gb"],
        ["3g.20gb", "3g.20gb", "1g.5gb"],
        ["1g.5gb+me", "1g.5gb+me"],
        ["1g.10gb"] * 5,
    ],
)
def test_sets_that_need_more_than_a_card_do_not_fit(profiles: list[str]) -> None:
    assert not A100(memory="40GB").fits(profiles)


def test_a_card_has_one_set_of_media_engines() -> None:
    a30 = accelerators.A30()
    assert a30.fits(["1g.6gb+me", "2g.12gb"])
    assert not a30.fits(["1g.6gb+me", "2g.12gb+me"])


def test_a_set_with_a_foreign_profile_is_an_error_not_a_no() -> None:
    with pytest.raises(UsageError, match=r"no partition '1g\.5gb'"):
        A100(memory="80GB").fits(["1g.5gb"])


def test_an_open_form_factor_accepts_every_form_and_a_named_one_only_its_own() -> None:
    sxm, pcie = H100(form_factor="SXM"), H100(form_factor="PCIe")
    assert H100().accepts(sxm)
    assert H100().accepts(pcie)
    assert not sxm.accepts(pcie)
    assert not sxm.accepts(H100())
    assert not H100().accepts(parse("H100-NVL"))
    assert not H100().accepts(H100(count=2))


def test_what_a_node_reports_may_be_less_exact_than_what_was_bought() -> None:
    assert H100(form_factor="SXM", count=8).could_be(H100())
    assert not H100(form_factor="SXM").could_be(H100(form_factor="PCIe"))
    assert not A100(memory="40GB").could_be(A100())


def test_the_only_form_of_a_card_need_not_be_named() -> None:
    assert accelerators.L4() == accelerators.L4(form_factor="PCIe")
    assert H100(form_factor="NVL").memory_gb == 94


def test_values_are_frozen_and_order_by_memory() -> None:
    with pytest.raises(FrozenInstanceError):
        H100().count = 2  # type: ignore[misc] # the point
    t4, a100, h100s = accelerators.T4(), A100(), H100(count=8)
    assert sorted([h100s, a100, t4]) == [t4, a100, h100s]
    assert t4 < a100 <= A100() < h100s
    assert max(A100(memory="40GB", count=4), A100(), H100()) == A100(memory="40GB", count=4)


def test_the_repr_is_the_call_that_makes_it() -> None:
    scope = {name: getattr(accelerators, name) for name in dir(accelerators)}
    plain = [H100(count=8), V100(memory="32GB", form_factor="SXM"), TPU("v5p-8"), CPU()]
    parts = [A100.partition_2g_10gb, H100().partition("1g.10gb", 7)]
    for made in [*plain, *parts, Custom("My-GPU", memory="48GB", count=2)]:
        assert eval(repr(made), scope) == made


def test_a_pickle_of_the_catalogue_is_its_name() -> None:
    assert len(pickle.dumps(H100(count=8))) < 120
    assert len(pickle.dumps(TPU("v5p-128"))) < 120


def test_json_has_the_facts_and_refuses_what_is_not_an_accelerator() -> None:
    told = json.loads(H100(form_factor="SXM", count=8).to_json())
    assert told["spelling"] == "H100-80GB-SXM:8"
    assert (told["runtime"], told["metadata"]["cuda_min"]) == ("cuda", "11.8")
    for bad in ("", "[]", "{}", '{"name": "x"}', '{"metadata": 3}', "nonsense"):
        with pytest.raises(UsageError):
            Accelerator.from_json(bad)


def test_the_runtime_follows_from_who_makes_it() -> None:
    names = ["H100", "MI300X", "MI300A", "Trainium2", "Inferentia1", "TPUv6", "Gaudi3", "CPU", "U30"]
    runtimes = [parse(name).runtime for name in names]
    assert runtimes == ["cuda", "rocm", "rocm", "neuron", "neuron", "tpu", "hpu", "none", "none"]


def test_neuron_chips_know_their_cores() -> None:
    cores = [parse(name).metadata.neuron_cores for name in ("Trainium1", "Trainium2", "Inferentia1")]
    assert cores == [2, 8, 4]


def test_custom_hardware_is_a_value_like_any_other() -> None:
    mine = Custom("My-GPU", memory="48GB", count=2, cuda_min="12.0")
    assert (mine.memory_gb, mine.total_memory_gb, mine.runtime, mine.kind) == (48, 96, "cuda", "gpu")
    assert mine.metadata.cuda_min == "12.0"
    assert str(mine) == "My-GPU:2"
    assert Accelerator.from_json(mine.to_json()) == mine == pickle.loads(pickle.dumps(mine))


@pytest.mark.parametrize("wrong", [{"memory": "lots"}, {"count": 0}, {"name": " "}])
def test_custom_hardware_that_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Custom(**{"name": "My-GPU", **wrong})  # type: ignore[arg-type] # the point


@pytest.mark.parametrize("wrong", ["41GB", "80", 80, "eighty"])
def test_a_memory_that_does_not_exist_is_refused_at_run_time(wrong: object) -> None:
    if wrong == "80":
        assert H100(memory=wrong).memory_gb == 80  # type: ignore[arg-type] # a number of GB can be meant
        return
    with pytest.raises(UsageError):
        H100(memory=wrong)  # type: ignore[arg-type] # the point


def test_a_form_factor_that_does_not_exist_is_refused_at_run_time() -> None:
    with pytest.raises(UsageError, match="there is no A100 with NVL; choose from 80GB SXM, 80GB PCIe"):
        A100(form_factor="NVL")  # type: ignore[arg-type] # the point


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_a_count_that_means_nothing_is_refused(count: object) -> None:
    with pytest.raises(UsageError, match="count"):
        H100(count=count)  # type: ignore[arg-type] # the point


def test_a_cpu_has_no_devices() -> None:
    assert (CPU().count, CPU().total_memory_gb, str(CPU())) == (0, 0, "CPU")
    assert parse("cpu") == CPU()
    with pytest.raises(UsageError, match="CPU:4"):
        parse("CPU:4")


def test_bounds_select_by_every_fact_and_sort_by_memory() -> None:
    found = accelerators.any(memory=">=40GB", vendor="nvidia", capability=">=8.0")
    assert list(found) == sorted(found)
    assert {"A100", "H100", "L40S", "B200"} <= {each.name for each in found}
    assert all(each.memory_gb >= 40 and each.vendor == "nvidia" for each in found)
    assert not {"V100", "Quadro_RTX_8000", "MI300X"} & {each.name for each in found}


def test_a_capability_of_10_is_above_one_of_9() -> None:
    names = {each.name for each in accelerators.any(capability=">9.0", kind="gpu")}
    assert "B200" in names
    assert "H100" not in names


def test_gpus_include_those_in_one_package_with_a_processor() -> None:
    assert "MI300A" in {each.name for each in accelerators.any(kind="gpu", vendor="AMD")}
    assert [each.name for each in accelerators.any(kind="apu")] == ["MI300A"]


def test_bounds_that_nothing_satisfies_or_nobody_can_read_are_refused() -> None:
    for wrong in ({"memory": ">=9TB"}, {"memory": "big"}, {"capability": "x"}, {"vendor": "nobody"}):
        with pytest.raises(UsageError):
            accelerators.any(**wrong)  # type: ignore[arg-type] # a mapping of strings
    assert all(each.count == 4 for each in accelerators.any(memory="80GB", count=4))


def test_every_name_the_package_promises_is_there() -> None:
    for name in accelerators._WHERE:
        assert getattr(accelerators, name) is not None
    with pytest.raises(AttributeError, match="H1000"):
        _ = accelerators.H1000  # type: ignore[attr-defined] # the point


def test_importing_the_package_loads_nothing_but_the_factories() -> None:
    asked = "import sys; sys.path.insert(0, '.'); import skypool.accelerators; print(*sys.modules)"
    argv, root = [sys.executable, "-S", "-c", asked], Path(__file__).parents[1]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=root).stdout.split()
    assert not {"typing", "dataclasses", "csv", "json", "re", "pathlib"} & set(loaded)


@pytest.mark.parametrize(
    "used", ["a.H100(count=8)", "a.parse('A100-40GB-SXM:8')", "pickle.loads(pickle.dumps(a.T4()))"]
)
def test_asking_for_a_card_loads_no_large_module_of_the_standard_library(used: str) -> None:
    asked = "import sys; sys.path.insert(0, '.'); import pickle; before = set(sys.modules)\n"
    asked += f"import skypool.accelerators as a; {used}; print(*set(sys.modules) - before)"
    argv, root = [sys.executable, "-S", "-c", asked], Path(__file__).parents[1]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=root).stdout.split()
    assert not {"typing", "dataclasses", "inspect", "csv", "json", "pathlib", "difflib"} & set(loaded)


def test_a_value_is_a_dataclass_to_who_asks() -> None:
    it = H100(form_factor="SXM", count=8)
    assert is_dataclass(it)
    assert [each.name for each in fields(it)][:3] == ["name", "memory_gb", "count"]
    assert asdict(it)["metadata"]["cuda_min"] == "11.8"
    assert replace(it, count=2) == H100(form_factor="SXM", count=2)
    assert copy.copy(it) == copy.deepcopy(it) == it
    with pytest.raises(TypeError, match="nothing"):
        Accelerator(name="x", memory_gb=1, nothing=2)  # type: ignore[call-arg] # the point


def test_a_star_imports_every_factory() -> None:
    names: dict[str, object] = {}
    exec("from skypool.accelerators import *", names)
    assert {"H100", "RTX_4090", "MI300X", "TPUv5p_8", "parse", "any"} <= set(names)
    assert {*tables.rows_by_name(), *tables.slice_types()} <= set(dir(accelerators))


@pytest.mark.parametrize("each", accelerators.catalog(), ids=str)
def test_a_label_of_the_catalogue_means_what_it_means_in_the_table_of_all_names(each: Accelerator) -> None:
    for spelling in (each.name, str(each), f"{each}:8"):
        found, in_the_table = parse(spelling), parse(spelling.swapcase())
        assert found == in_the_table
        assert (found.origin, found.label) == (in_the_table.origin, in_the_table.label)


def test_a_replaced_value_is_still_checked() -> None:
    with pytest.raises(UsageError):
        replace(H100(), count=-1)


def test_a_factory_travels_in_a_pickle() -> None:
    assert pickle.loads(pickle.dumps(A100))(memory="40GB") == A100(memory="40GB")
    assert pickle.loads(pickle.dumps(accelerators.TPUv5p_8))() == parse("v5p-8")


def test_an_architecture_includes_its_superchips() -> None:
    assert {"H100", "H200", "GH200"} <= {each.name for each in accelerators.any(architecture="hopper")}
    assert "B200" not in {each.name for each in accelerators.any(architecture="hopper")}


def test_the_catalogue_is_read_out_of_a_zip_archive_too(tmp_path: Path) -> None:
    root, archive = Path(__file__).parents[1], tmp_path / "shipped.zip"
    with zipfile.ZipFile(archive, "w") as into:
        for path in (root / "skypool").rglob("*"):
            if path.suffix in (".py", ".csv"):
                into.write(path, path.relative_to(root))
    asked = (
        f"import sys; sys.path[:0] = [{str(archive)!r}]; from skypool import accelerators, devices;"
        "print(accelerators.__file__);"
        "print(accelerators.parse('p4d.24xlarge'), accelerators.parse('v5p-8').count);"
        "print(accelerators.A100.partition_2g_10gb, devices.detect() is not None)"
    )
    argv = [sys.executable, "-S", "-c", asked]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()
    assert lines[0].startswith(str(archive))
    assert lines[1:] == ["A100-40GB-SXM:8 4", "A100-40GB/2g.10gb True"]


untyped: Any = accelerators


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: untyped.any(memory=40), 'memory must be spelled like ">=40GB" or "80GB", not 40'),
        (lambda: untyped.any(capability=8.0), 'capability must be spelled like ">=8.0"'),
        (lambda: untyped.any(vendor=["nvidia"]), "vendor must be a string such as vendor='nvidia'"),
        (lambda: untyped.any(architecture=9), "architecture must be a string such as 'Hopper', not 9"),
        (lambda: untyped.H100("80GB"), r"H100 takes its arguments by name, as in H100\(memory=\"80GB\".*, not '80GB'"),
        (lambda: untyped.H100(cnt=2), r"H100 takes no cnt=; did you mean count=: call it as"),
        (lambda: untyped.H100(form_factor="sxm"), "there is no H100 with sxm; did you mean 'SXM'[?] choose from 80GB"),
        (lambda: untyped.any(vendor="nvida"), "no accelerator has vendor 'nvida'; did you mean nvidia[?]"),
        (lambda: untyped.any(kind="gpus"), "no accelerator has kind 'gpus'; did you mean gpu[?]"),
        (lambda: untyped.TPU("v5e", topology="3x3"), r"choose from 1x1 \(1 chip\), 2x2 \(4 chips\)"),
        (lambda: untyped.TPU(5), "the type of a TPU must be a string such as 'v5p-8' or 'v5e', not 5"),
        (lambda: untyped.Custom(7, memory="48GB"), r"not name=7, memory='48GB' and count=1; write it like Custom"),
        (lambda: untyped.Custom("x", memory=48), "a memory such as '48GB' .* not name='x', memory=48 and count=1;"),
        (lambda: untyped.Custom("x", count="2"), "a count of at least 1, not name='x', memory=None and count='2';"),
        (lambda: untyped.register(7)(lambda: None), "7 is not a valid name of an accelerator"),
        (lambda: untyped.parse_all(7), "no accelerator is called '7'"),
    ],
)  # fmt: skip
def test_values_of_other_types_are_refused_with_what_is_meant(wrong: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wrong()


@pytest.mark.parametrize("module", [accelerators, skypool])
def test_a_name_with_a_slip_is_told_the_nearest_by_python_itself(module: ModuleType) -> None:
    with pytest.raises(AttributeError) as told:
        module.nothing
    assert (told.value.name, told.value.obj) == ("nothing", module)

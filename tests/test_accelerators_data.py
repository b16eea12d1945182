"""A walk over every row of every data file."""

from __future__ import annotations

import csv
import itertools
import math
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pytest

from docs.generate.accelerators import written as generated
from skypool import accelerators
from skypool.accelerators import Accelerator, partitions, tables
from skypool.accelerators.factories import attribute_of
from skypool.accelerators.facts import Partition, Variant

VARIANTS = [variant for name in tables.rows_by_name() for variant in tables.variants(name)]
ALIASES = tables.rows("aliases.csv")
CARDS = list(tables.partition_cards())
SLICES = list(tables.slices())
FACTORIES = {type: name for name, type in tables.slice_types().items()}
T = TypeVar("T")


def of_every(values: Iterable[T]) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """One test of all these rows, which names those that fail: to find 2500 tests takes longer than to run them."""

    def decorate(check: Callable[[T], None]) -> Callable[[], None]:
        def every() -> None:
            failures = []
            for value in values:
                try:
                    check(value)
                except Exception as e:  # noqa: BLE001 - raised below
                    e.add_note(f"of {value}")
                    failures.append(e)
            if failures:
                raise ExceptionGroup(f"{check.__name__}: {len(failures)} rows", failures)

        return every

    return decorate


@of_every(VARIANTS)
def test_every_variant_has_a_factory_that_makes_it(variant: Variant) -> None:
    factory = getattr(accelerators, variant.name)
    made = factory(memory=f"{variant.memory_gb:g}GB", form_factor=variant.form_factor or None, count=2)
    assert (made.name, made.memory_gb, made.count) == (variant.name, variant.memory_gb, 2)
    assert made.form_factor == (variant.form_factor or None)
    assert made.metadata == variant.metadata
    assert made.total_memory_gb == 2 * variant.memory_gb


@of_every(VARIANTS)
def test_every_variant_survives_its_spelling_json_and_pickle(variant: Variant) -> None:
    for count in (1, 8):
        made = accelerators.parse(f"{variant.name}@{variant.memory_gb:g}GB:{count}")
        assert accelerators.parse(str(made)) == made
        assert Accelerator.from_json(made.to_json()) == made
        assert pickle.loads(pickle.dumps(made)) == made
        assert hash(accelerators.parse(str(made))) == hash(made)


def test_no_two_variants_are_spelled_alike() -> None:
    spelled = [str(each) for each in accelerators.catalog()]
    assert len(set(spelled)) == len(spelled) == len(VARIANTS)


def test_every_row_says_where_it_was_read() -> None:
    silent = [row for file in ("accelerators.csv", "partition_cards.csv", "tpu_generations.csv")
              for row in tables.rows(file) if not row["sources"]]  # fmt: skip
    assert silent == []


@of_every(ALIASES)
def test_every_alias_means_what_its_row_says(row: dict[str, str]) -> None:
    meant = accelerators.parse(row["means"])
    assert accelerators.parse(row["alias"], dialect=row["source"]) == meant
    assert accelerators.parse(row["alias"].upper(), dialect=row["source"]) == meant
    assert accelerators.parse(row["alias"].replace(" ", "-"), dialect=row["source"]) == meant


@of_every(ALIASES)
def test_every_alias_is_the_same_model_without_saying_whose_it_is(row: dict[str, str]) -> None:
    meant, plain = accelerators.parse(row["means"]), accelerators.parse(row["alias"])
    assert (plain.name, plain.count, plain.slice) == (meant.name, meant.count, meant.slice)


def test_a_word_means_another_card_elsewhere_only_where_that_is_known() -> None:
    other = {
        (row["alias"], row["source"])
        for row in ALIASES
        if not accelerators.parse(row["alias"]).could_be(accelerators.parse(row["means"]))
    }
    assert other == {("V100", "skyward"), ("A100", "flyte"), ("A100", "skypilot")}


@pytest.mark.parametrize("file", sorted(Path(tables.__file__).parent.glob("*.csv")), ids=lambda path: path.name)
def test_the_files_are_read_as_the_csv_module_reads_them(file: Path) -> None:
    assert [dict(row) for row in csv.DictReader(file.read_text().splitlines())] == list(tables.rows(file.name))


@pytest.mark.parametrize("line", ['a,"b,c",d', '"a ""b"" c",d', '"",x', 'a,"",""', '"""a"""', '"a"",b",c', "a,,"])
def test_a_line_with_quotes_is_read_as_the_csv_module_reads_it(line: str) -> None:
    assert tables._cells(line) == next(csv.reader([line]))


@of_every(CARDS)
def test_no_partition_takes_more_than_its_card_has(card: tuple[str, float]) -> None:
    for part in tables.profiles(*card).values():
        assert part.memory_gb <= card[1]
        assert part.compute_slices <= part.compute_slices_of
        assert part.memory_slices <= part.memory_slices_of
        assert part.max_per_card * part.compute_slices <= part.compute_slices_of
        assert part.max_per_card * part.memory_slices <= part.memory_slices_of
        assert all(start + size <= part.memory_slices_of for start, size in part.placements)
        assert (part.memory_gib_reported or 0) <= part.memory_gb


@of_every(CARDS)
def test_every_partition_is_reached_by_method_attribute_and_spelling(card: tuple[str, float]) -> None:
    name, memory = card
    factory = getattr(accelerators, name)
    whole = factory(memory=f"{memory:g}GB")
    for profile in tables.profiles(*card):
        part = whole.partition(profile)
        assert part.profile == profile
        assert part.memory_gb == tables.profiles(*card)[profile].memory_gb
        assert accelerators.parse(str(part)) == part
        assert Accelerator.from_json(part.to_json()) == part
        assert pickle.loads(pickle.dumps(part)) == part
        if memory == next(m for m in partitions.memories(name) if profile in tables.profiles(name, m)):
            assert getattr(factory, attribute_of(profile)) == part


@of_every(CARDS)
def test_a_card_holds_as_many_of_a_profile_as_its_row_says_and_no_more(card: tuple[str, float]) -> None:
    for profile, part in tables.profiles(*card).items():
        assert partitions.fits(*card, [profile] * part.max_per_card)
        assert not partitions.fits(*card, [profile] * (part.max_per_card + 1))


def has_places(parts: tuple[Partition, ...], taken: frozenset[int] = frozenset()) -> bool:
    """Whether every part finds memory slices that none other has, tried in every way."""
    if not parts:
        return True
    return any(
        taken.isdisjoint(range(start, start + size)) and has_places(parts[1:], taken.union(range(start, start + size)))
        for start, size in parts[0].placements
    )


@of_every(CARDS)
def test_every_set_whose_sums_fit_has_a_place_for_each_member(card: tuple[str, float]) -> None:
    placed = [part for part in tables.profiles(*card).values() if part.placements]
    for size in range(1, 8):
        for parts in itertools.combinations_with_replacement(placed, size):
            if partitions.fits(*card, [part.profile for part in parts]):
                assert has_places(tuple(sorted(parts, key=lambda part: -part.memory_slices)))


@of_every(SLICES)
def test_the_arithmetic_of_every_slice_holds(type: str) -> None:
    made = accelerators.parse(type)
    assert made.slice is not None
    it, suffix = made.slice, int(type.partition("-")[2])
    assert it.cores == it.chips * it.cores_per_chip
    assert suffix == (it.chips if it.generation in ("v5e", "v6e") else it.cores)
    assert it.vms * it.chips_per_vm == it.chips
    assert 1 <= it.hosts <= it.vms
    assert made.count == it.chips
    assert made.total_memory_gb == it.chips * made.memory_gb
    if it.topology:
        assert math.prod(map(int, it.topology.split("x"))) == it.chips


@of_every(SLICES)
def test_every_slice_has_a_factory_and_survives_its_spelling_json_and_pickle(type: str) -> None:
    made = accelerators.parse(type)
    assert getattr(accelerators, FACTORIES[type])() == made == accelerators.TPU(type)
    assert str(made) == type
    assert Accelerator.from_json(made.to_json()) == made
    assert pickle.loads(pickle.dumps(made)) == made


def test_every_chip_of_a_slice_is_the_chip_of_the_catalogue() -> None:
    for type in SLICES:
        made = accelerators.parse(type)
        (chip,) = tables.variants(made.name)
        assert made.slice is not None
        assert (made.memory_gb, made.slice.cores_per_chip) == (chip.memory_gb, chip.metadata.tensor_cores)


@pytest.mark.parametrize(("path", "text"), list(generated()), ids=lambda value: getattr(value, "name", ""))
def test_generated_files_say_what_the_data_says(path, text) -> None:  # type: ignore[no-untyped-def] # from pytest
    assert path.read_text() == text, "run: python -m docs.generate.accelerators"

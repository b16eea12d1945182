"""Folders of nodes that are filled from a bucket: whole or not there, read-only, and before anything runs."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.buckets.store import client
from skypool.data import fetching, filled_folder
from skypool.data.checksums import Checksums, Damaged, sum_of, sum_of_file
from skypool.data.data_asked import check_offers, data_asked, examined, far_apart, on_node
from skypool.data.filled_folder import FETCHES, FilledFolder
from skypool.data.folder_saver import PART
from skypool.data.save_asked import save_asked
from skypool.errors import SkypoolError, UsageError
from skypool.model import Offer
from skypool.pool import saving
from skypool.testing import FakeCloud
from skypool.wire.save_orders import Order
from tests.conftest import eventually
from tests.lab import stores, sts
from tests.lab.stores import secret_of
from tests.lab.work import files_and_modes
from tests.test_folder_saver import FaultyStore, Mover, faulty, files_of, slowed
from tests.test_save import OfStrangers

__all__ = ["faulty"]
KEYS = ("SAVE_ID", "SAVE_SECRET")
GIB = 2**30


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of a bucket, with two files. Calls run in a folder beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "bucket" / "deep").mkdir(parents=True)
    (tmp_path / "bucket" / "a").write_bytes(b"1")
    (tmp_path / "bucket" / "deep" / "b").write_bytes(b"22")
    return tmp_path / "bucket"


def order(folder: Path, url: str, before: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    made = Order("data", str(folder), url, serial=more.pop("serial", "1"), is_data=True, **more).to_json()
    return {**made, "before": before or {}}


def filled(folder: Path, url: str, tmp_path: Path, **more: Any) -> FilledFolder:
    """A folder after its first attempt is over, or all attempts."""
    (tmp_path / "journals").mkdir(exist_ok=True)
    made = FilledFolder(order(folder, url, **more), tmp_path / "journals", threading.Semaphore(FETCHES))
    try:
        eventually(lambda: made.phase != "fetching" or made.trouble, 30, "the end of an attempt")
    finally:
        made.end(0.0)
        made.join()
    return made


# --- what is asked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "save", "why"),
    [
        ({"/data": "s3a://models/x"}, {}, "did you mean s3://"),
        ({"/": "file:///a"}, {}, "takes a folder such as '/data'"),
        ({".": "file:///a"}, {}, "takes a folder such as '/data'"),
        ({"../x": "file:///a"}, {}, "takes a folder such as '/data'"),
        ({"~other/x": "file:///a"}, {}, "takes a folder such as '/data'"),
        ({"~/../../etc": "file:///a"}, {}, "takes a folder such as '/data'"),
        ({"": "file:///a"}, {}, "takes the paths of folders"),
        ({"/data": "file:///a", "//data/b/": "file:///b"}, {}, "/data and /data/b are inside each other"),
        ({"out/x": "file:///a"}, {"out": "file:///b"}, "out/x and out, which is saved, are inside each other"),
        ({"out": "file:///a"}, {"out/x": "file:///b"}, "out and out/x, which is saved, are inside each other"),
        ({"data": "file:///a"}, {"out": "file:///a/b"}, "so that data would change"),
        ({"a/.skypool-x": "file:///a"}, {}, "are skypool's own"),
        (["data"], {}, "takes folders and their places"),
    ],
)
def test_what_cannot_be_data_is_refused_where_it_is_written(data: Any, save: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        sky.ComputePool("local", data=data, save=save)


def test_a_key_without_a_value_is_named_and_values_are_shown_nowhere() -> None:
    bucket = sky.Bucket("s3://models/x", "http://127.0.0.1:9", keys=KEYS)
    with pytest.raises(UsageError, match="SAVE_ID, which s3://models/x needs, has no value"):
        data_asked({"/data": bucket}, (), {})
    found = data_asked({"/data/": bucket}, (), {"SAVE_ID": "an id", "SAVE_SECRET": "a secret"})
    assert (found[0].path, found[0].values) == ("/data", ("an id", "a secret"))
    assert "a secret" not in repr(found)


@pytest.mark.parametrize(
    ("path", "there"), [("data", "/work/data"), ("/data", "/data"), ("~/data", "~/data"), ("a/../b", "/work/b")]
)
def test_a_relative_path_begins_where_calls_run(path: str, there: str) -> None:
    [found] = data_asked({path: "file:///a"}, save_asked({"out": "file:///b"}))
    assert on_node("/work", found.path) == there


def test_data_that_has_no_room_is_refused_with_the_option_to_set() -> None:
    [found] = data_asked({"/data": "s3://models/x"}, ())
    found = found._replace(files=2, bytes=120 * GIB)

    def check(disk: float, **more: Any) -> None:
        check_offers([found], [Offer("acme", "big", **more)], disk, lambda each: each.trust != "full")

    with pytest.raises(UsageError, match=r"120.0 GiB, and the disk of acme big has 100 GiB; .* disk='140GiB'"):
        check(0, disk_gib=100.0)
    with pytest.raises(UsageError, match="has 100 GiB"):
        check(100)
    with pytest.raises(UsageError, match="has the usual size of its provider"):
        check(0, usd_per_hour=1.0)
    check(0)  # a machine of the user's own
    check(140, usd_per_hour=1.0, trust="data")  # a public bucket may go to strangers
    found = found._replace(values=("id", "secret"))
    with pytest.raises(UsageError, match="who could read the keys of s3://models/x"):
        check(140, trust="data")


def test_traffic_between_regions_is_told_once_without_a_price() -> None:
    there = sky.Bucket("s3://models/x", region="eu-west-1")
    [found] = data_asked({"/data": there}, ())
    near, far = Offer("acme", "big", region="eu-west-1"), Offer("acme", "big", region="us-east-1")
    assert far_apart([found], [near]) == []
    assert far_apart([found], [Offer("local", "here")]) == []
    assert far_apart([found], [near, far, far]) == [
        "s3://models/x is in eu-west-1, and machines may be in us-east-1: the store may charge for the traffic"
    ]


# --- checksums -----------------------------------------------------------------------------------------------


def etag(data: bytes, parts: bool) -> str:
    if not parts:
        return f'"{hashlib.md5(data).hexdigest()}"'
    sums = [hashlib.md5(data[at : at + PART]).digest() for at in range(0, len(data), PART)]
    return f'"{hashlib.md5(b"".join(sums)).hexdigest()}-{len(sums)}"'


@pytest.mark.parametrize("parts", [False, True])
def test_what_comes_in_any_order_is_compared_with_the_checksum(tmp_path: Path, parts: bool) -> None:
    data = random.Random(1).randbytes(3 * PART + 7)
    (tmp_path / "file").write_bytes(data)
    places = [*range(0, len(data), PART)]
    for damaged in (False, True):
        checksums = Checksums()
        file = os.open(tmp_path / "file", os.O_RDWR)
        expected = checksums.expected(etag(data, parts), len(data))
        sum_ = sum_of_file(file, expected)
        random.Random(2).shuffle(places)
        for at in places:
            part = bytearray(data[at : at + PART])
            part[3] ^= damaged
            os.pwrite(file, part, at)
            sum_.add(at)
        if damaged:
            with pytest.raises(Damaged, match="file did not come as it is in the bucket"):
                checksums.compare("file", expected, sum_.found())
        else:
            checksums.compare("file", expected, sum_.found())
        os.close(file)
        assert checksums.checked == (not damaged)


def test_an_etag_that_is_no_md5_is_given_up_when_the_same_comes_twice() -> None:
    checksums = Checksums()

    def come(name: str, data: bytes) -> None:
        expected = checksums.expected('"0123456789abcdef0123456789abcdef"', len(data))
        checksums.compare(name, expected, sum_of(data, expected))

    for name in ("a", "b", "c"):
        with pytest.raises(Damaged):
            come(name, b"1")
        if name == "a":
            with pytest.raises(Damaged):
                come(name, b"2")  # it differs again
            with pytest.raises(Damaged):
                come(name, b"1")
        come(name, b"1")
    assert checksums.checked == 0
    assert checksums.expected('"0123456789abcdef0123456789abcdef"', 1) == ""


@pytest.mark.parametrize("version", [None, "", '"5-63c1-1"', '"0123456789abcdef0123456789abcdef-7"'])
def test_what_has_no_checksum_is_not_compared(version: str | None) -> None:
    assert Checksums().expected(version, PART) == ""


@pytest.mark.parametrize("parts", [False, True])
def test_small_objects_have_checksums_too(parts: bool) -> None:
    version = etag(b"data", parts)
    expected = Checksums().expected(version, 4)
    assert f'"{sum_of(b"data", expected)}"' == version


# --- one folder ----------------------------------------------------------------------------------------------


def test_a_folder_is_filled_read_only_and_only_once(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    made = filled(folder, f"file://{place}", tmp_path)
    assert (made.phase, made.trouble, made.done.files, made.done.bytes) == ("there", "", 2, 3)
    assert files_of(folder) == {"a": b"1", "deep/b": b"22"}
    assert [stat.S_IMODE(os.lstat(folder / each).st_mode) for each in ("a", "deep", ".")] == [0o444, 0o555, 0o555]
    before = (folder / "a").stat().st_ino
    again = filled(folder, f"file://{place}", tmp_path, serial="2")
    assert (again.phase, again.done.wanted, (folder / "a").stat().st_ino) == ("there", 0, before)


def test_what_a_former_mover_has_fetched_counts_without_the_parts_that_come_again(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    former = filled(folder, f"file://{place}", tmp_path).told()
    (place / "late").write_bytes(bytes(1000))
    before = {**former, "back": {**former["back"], "bytes": 3 + 400}}  # it had 400 bytes of the late one
    made = filled(folder, f"file://{place}", tmp_path, before=before)
    assert (made.done.files, made.done.bytes) == (made.done.wanted, made.done.wanted_bytes) == (3, 1003)


def test_what_has_changed_on_either_side_is_made_as_the_bucket_has_it(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (place / "gone").write_bytes(b"1")
    (place / "old" / "er").mkdir(parents=True)
    (place / "old" / "er" / "c").write_bytes(b"1")
    filled(folder, f"file://{place}", tmp_path)
    (place / "gone").unlink()
    shutil.rmtree(place / "old")
    (place / "a").write_bytes(b"new")
    os.chmod(folder / "deep", 0o755)
    os.chmod(folder / "deep" / "b", 0o644)
    (folder / "deep" / "b").write_bytes(b"damaged")
    (folder / "deep" / "mine").write_bytes(b"of a program")
    made = filled(folder, f"file://{place}", tmp_path)
    assert (made.phase, made.trouble, made.done.wanted) == ("there", "", 2)
    assert files_of(folder) == {"a": b"new", "deep/b": b"22"}
    assert sorted(each.name for each in folder.iterdir()) == ["a", "deep"]
    assert files_of(Path(made.done.aside)) == {"deep/mine": b"of a program"}


def test_another_place_replaces_all_that_was_fetched(place: Path, tmp_path: Path) -> None:
    folder, other = tmp_path / "data", tmp_path / "other"
    other.mkdir()
    (other / "c").write_bytes(b"3")
    shutil.copy2(place / "a", other / "a")
    filled(folder, f"file://{place}", tmp_path)
    made = filled(folder, f"file://{other}", tmp_path)
    assert (made.phase, made.done.wanted, made.done.aside) == ("there", 2, "")
    assert files_of(folder) == {"a": b"1", "c": b"3"}


def test_a_folder_with_files_of_others_is_left_alone(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine").write_bytes(b"1")
    made = filled(folder, f"file://{place}", tmp_path)
    assert made.phase == "ended"
    assert "has files that skypool has not fetched, such as mine" in made.trouble
    assert files_of(folder) == {"mine": b"1"}


@pytest.mark.parametrize(
    ("folder", "url", "why"),
    [
        ("file/data", "bucket", "cannot be made by the user .* there: Not a directory; use a path"),
        ("data", "nowhere", "nowhere is no folder here"),
        ("data", "empty", "it has no objects"),
        ("bucket/inside", "bucket", "are inside each other"),
    ],
)
def test_what_a_node_cannot_have_is_given_up_at_once(
    place: Path, tmp_path: Path, folder: str, url: str, why: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    made = filled(tmp_path / folder, f"file://{tmp_path / url}", tmp_path)
    assert made.phase == "ended"
    assert re.search(why, made.trouble), made.trouble


def test_a_disk_without_room_is_told_with_both_numbers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_SPARE", 1 << 60)
    made = filled(tmp_path / "data", f"file://{place}", tmp_path)
    assert made.phase == "ended"
    assert "has no room: 0.00 GB are to be fetched, and" in made.trouble
    assert files_of(tmp_path / "data") == {}


def test_two_movers_that_fill_one_folder_wait_for_each_other(place: Path, tmp_path: Path) -> None:
    for number in range(200):
        (place / str(number)).write_bytes(str(number).encode())
    (tmp_path / "journals").mkdir()
    said, turns = order(tmp_path / "data", f"file://{place}"), threading.Semaphore(FETCHES)
    made = [FilledFolder(said, tmp_path / "journals", turns) for _ in range(3)]
    try:
        eventually(lambda: all(each.phase == "there" for each in made), 60, "both")
    finally:
        for each in made:
            each.end(0.0)
            each.join()
    assert sorted(each.done.wanted for each in made) == [0, 0, 202]
    assert files_of(tmp_path / "data") == files_of(place)


# --- stores that fail, movers that are killed ----------------------------------------------------------------


def test_a_disk_that_has_no_room_for_a_large_file_is_told_and_nothing_is_fetched_again(
    tmp_path: Path, faulty: FaultyStore
) -> None:
    faulty.objects |= {"large": bytes(3 * PART)}
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PART // 2, former[1]))
    try:
        made = filled(tmp_path / "data", "s3://models", tmp_path, endpoint=faulty.endpoint, values=("a", "b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert made.phase == "ended"
    assert "has no room for all of the data: File too large; ask for a larger disk with disk=" in made.trouble
    assert (made.done.bytes, files_of(tmp_path / "data")) == (0, {})
    assert faulty.asked.count(("GET", "large")) <= 4, "once for its size, and once for each part"


@pytest.mark.parametrize("status", [403, 404])
def test_new_credentials_end_the_pause_after_a_failure(
    tmp_path: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(filled_folder, "_PAUSES", (300.0, 300.0))
    faulty.objects |= {"a": b"1"}
    faulty.answer = lambda method, name: status if name == "a" else 0
    (tmp_path / "journals").mkdir()
    made = FilledFolder(of_faulty(faulty, tmp_path / "data"), tmp_path / "journals", threading.Semaphore(FETCHES))
    try:
        eventually(lambda: made.trouble, 60, "the trouble")
        faulty.answer = lambda method, name: 0
        made.renew(1, ("c", "d"))
        eventually(lambda: made.phase == "there", 60, "the data")
    finally:
        made.end(0.0)
        made.join()
    assert files_of(tmp_path / "data") == {"a": b"1"}


def of_faulty(faulty: FaultyStore, folder: Path, **more: Any) -> dict[str, Any]:
    return order(folder, "s3://models", endpoint=faulty.endpoint, region="us-east-1", values=("a", "b"), **more)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_mover_outlives_a_store_that_fails_and_fetches_when_it_is_well(
    tmp_path: Path, faulty: FaultyStore, status: int
) -> None:
    faulty.objects |= {"a": b"1", "b": b"2"}
    faulty.answer = lambda method, name: status if name == "b" else 0
    mover = Mover(tmp_path / "node")
    try:
        mover.order(of_faulty(faulty, tmp_path / "data"))
        eventually(lambda: mover.last.get("trouble"), 100, "the trouble")
        assert mover.last["phase"] == "fetching"
        faulty.answer = lambda method, name: 0
        eventually(lambda: mover.last["phase"] == "there", 60, "the data")
        assert (mover.last["trouble"], files_of(tmp_path / "data")) == ("", {"a": b"1", "b": b"2"})
        assert [name for method, name in faulty.asked if method == "GET"].count("a") == 1
        assert all(method in ("GET", "HEAD") for method, _ in faulty.asked)
    finally:
        mover.kill()


def test_a_mover_that_is_killed_goes_on_from_what_is_there(tmp_path: Path, faulty: FaultyStore) -> None:
    faulty.objects |= {"a": b"1", "deep/b": b"2"}
    faulty.answer = lambda method, name: -1 if name == "deep/b" else 0
    first = Mover(tmp_path / "node")
    try:
        first.order(of_faulty(faulty, tmp_path / "data"))
        eventually(lambda: first.last.get("back", {}).get("files") == 1, 60, "the first file")
    finally:
        first.kill()
    (tmp_path / "data" / ".skypool-0123456789ab").write_bytes(b"half")  # as a mover leaves it that is killed later
    faulty.answer = lambda method, name: 0
    faulty.asked.clear()
    second = Mover(tmp_path / "node")
    try:
        second.order(of_faulty(faulty, tmp_path / "data"))
        eventually(lambda: second.last.get("phase") == "there", 60, "the data")
        assert files_of(tmp_path / "data") == {"a": b"1", "deep/b": b"2"}
        assert ("GET", "a") not in faulty.asked
    finally:
        second.kill()


def test_an_object_that_changes_while_it_is_fetched_comes_whole(tmp_path: Path, faulty: FaultyStore) -> None:
    faulty.objects |= {"a": b"1", "b": b"old", "gone": b"1"}

    def answer(method: str, name: str) -> int:
        if name == "a":
            faulty.objects |= {"b": b"longer than before"}
            faulty.objects.pop("gone", None)
        return 404 if name == "gone" else 0

    faulty.answer = answer
    mover = Mover(tmp_path / "node")
    try:
        mover.order(of_faulty(faulty, tmp_path / "data"))
        eventually(lambda: mover.last.get("phase") == "there", 60, "the data")
        assert files_of(tmp_path / "data") == {"a": b"1", "b": b"longer than before"}
    finally:
        mover.kill()


def test_a_start_fails_when_nothing_but_failures_come(
    place: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVE_ID", "a")
    monkeypatch.setenv("SAVE_SECRET", "b")
    monkeypatch.setattr(saving, "_TO_RESTORE", 2.0)
    faulty.objects["a"] = b"1"
    lists: list[str] = []

    def answer(method: str, name: str) -> int:
        lists.extend([name] * (not name))
        return 403 if len(lists) > 1 else 0  # from here it can be read, and from the node it cannot

    faulty.answer = answer
    bucket = sky.Bucket("s3://models", faulty.endpoint, keys=KEYS)
    cloud = FakeCloud()
    with cloud, pytest.raises(SkypoolError, match="data could not be filled from s3://models on node"):
        sky.ComputePool(cloud, console="off", data={"data": bucket}).start()
    assert not cloud.instances()


# --- pools ---------------------------------------------------------------------------------------------------


def pool(**options: Any) -> sky.ComputePool:
    asked: dict[str, Any] = {"provider": "local", "slots": 1, "console": "off"}
    return sky.ComputePool(**{**asked, **options})


def heard(pool: sky.ComputePool) -> list[events.DataFetched]:
    found: list[events.DataFetched] = []
    pool.events.listen(lambda event: found.append(event) if isinstance(event, events.DataFetched) else None)
    return found


def test_each_node_has_data_before_its_first_call(place: Path) -> None:
    with FakeCloud() as cloud, pool(provider=cloud, nodes=2, data={"data": f"file://{place}"}) as made:
        told = heard(made)
        everywhere: Any = files_and_modes.with_options(node="all")
        assert [*(everywhere("data") @ made)] == [{"a": (1, 0o444), "deep/b": (2, 0o444)}] * 2
        made.resize(3)
        eventually(lambda: len(made.nodes) == 3, 60, "the third node")
        assert [*(everywhere("data") @ made)] == [{"a": (1, 0o444), "deep/b": (2, 0o444)}] * 3
        assert [(each.node, each.phase, each.wanted) for each in told if each.phase == "there"] == [(2, "there", 2)]


def test_a_node_that_replaces_another_has_data_before_its_first_call(place: Path) -> None:
    with FakeCloud() as cloud, pool(provider=cloud, liveness=5, data={"data": f"file://{place}"}) as made:
        assert len(files_and_modes("data") >> made) == 2
        cloud.terminate(cloud.instances())
        with suppress(sky.ConnectionLost):
            files_and_modes("data") >> made
        assert len(files_and_modes("data") >> made) == 2


def test_machines_of_strangers_get_public_data_and_no_keys(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool(provider=OfStrangers(), data={"data": f"file://{place}"}) as made:
        assert len(files_and_modes("data") >> made) == 2


def test_what_a_node_cannot_have_ends_the_start_at_once(place: Path) -> None:
    Path("data").mkdir()
    Path("data/mine").write_bytes(b"1")
    with pytest.raises(UsageError, match=r"data cannot be filled from .* on node 0: .* has files that skypool has not"):
        pool(data={"data": f"file://{place}"}).start()


# --- programs ------------------------------------------------------------------------------------------------

PROGRAM = """
from pathlib import Path
print(*sorted(f"{each}={each.read_text()}" for each in Path("data").rglob("*") if each.is_file()))
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skypool", "run", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)


def test_a_program_finds_data_and_the_next_run_fetches_nothing(place: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    for number in range(2):
        done = run("--local", "--data", f"data=file://{place}", "train.py")
        assert (done.returncode, done.stdout) == (0, "data/a=1 data/deep/b=22\n"), done.stderr
        assert f"data     from file://{place} to data\n" in done.stderr
        assert ("it was there before" in done.stderr) == bool(number)
        assert "not saved" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_next_run_on_the_same_machine_fetches_nothing_and_tells_it_once(place: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    words = ["--provider", "fake", "--budget", "5", "--linger", "2m", "--data", f"data=file://{place}", "train.py"]
    first, second = run(*words), run(*words)
    [pool] = re.findall(r"uses     pool (\S+) of", second.stderr)
    ended = [sys.executable, "-m", "skypool", "down", "--yes", pool]
    subprocess.run(ended, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    for done, told in ((first, "2 files, 3 bytes"), (second, "it was there before")):
        assert (done.returncode, done.stdout) == (0, "data/a=1 data/deep/b=22\n"), done.stderr
        assert [line.partition(": ")[2] for line in done.stderr.splitlines() if "is filled from" in line] == [told]


def test_wrong_data_of_a_run_is_refused(place: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    Path("sent").mkdir()
    Path("sent/file").write_text("1")
    for words, why in (
        (["--data", "data"], "--data takes a folder and its place"),
        (["--data", f"data=file://{place}", "--data", "data=file:///b"], "--data names data twice"),
        (
            ["--data", f"out/x=file://{place}", "--save", "out"],
            "out/x and out, which is fetched, are inside each other",
        ),
        (["--data", f"sent=file://{place}"], "sent/file of the project is in sent, which --data fills"),
        (["--data", "data=s3a://models/x"], "did you mean s3://"),
    ):
        done = run("--local", *words, "train.py")
        assert done.returncode == 125
        assert why in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_a_role_and_an_identity_are_for_saving_and_data_is_read_without_them(place: Path) -> None:
    Path("train.py").touch()
    with sts.short_lived(3600) as public:
        bucket = sky.Bucket("s3://models/shards", public.endpoint, keys=KEYS)
        made = client(bucket, dict.fromkeys(KEYS, "owner"))
        words = ["--data", "data=s3://models/shards", "--bucket-endpoint", public.endpoint, "--dry-run", "--local"]
        made.put_object(Bucket="models", Key="shards/a", Body=b"1")
        private = run(*words, "--bucket-identity", "train.py")
        assert "it is not public, and no keys are named" in private.stderr
        made.put_object(Bucket="models", Key="shards/a", Body=b"1", ACL="public-read")
        for login in (["--bucket-role", sts.ROLE], ["--bucket-identity"]):
            done = run(*words, *login, "train.py")
            assert done.returncode == 0, done.stderr
            assert "data     1 byte in 1 file from s3://models/shards to data" in done.stderr


# --- a real store --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Store]:
    """A store with data: "runs/data" for those with keys, and "public/data" for all."""
    if why := stores.missing_s3():
        pytest.skip(why)
    with stores.seaweedfs(tmp_path_factory.mktemp("store"), 10) as made:
        owner = stores.client(made.endpoint)
        for prefix in ("runs", "public"):
            for name, size in SIZES.items():
                owner.put_object(Bucket="models", Key=f"{prefix}/data/{name}", Body=content(name, size))
        owner.put_object(Bucket="models", Key="public/data/", Body=b"")  # as consoles mark folders
        owner.upload_fileobj(io.BytesIO(content("parts", 3 * PART + 5)), "models", "runs/data/parts")
        yield made


SIZES = {"small": 10, "empty": 0, "deep/er/ä b": PART, "large": 2 * PART + 7}


def content(name: str, size: int) -> bytes:
    return random.Random(name).randbytes(size)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_keys_that_only_read_are_enough_and_content_is_compared(
    place: Path, store: stores.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVE_ID", "reader")
    monkeypatch.setenv("SAVE_SECRET", secret_of("reader"))
    owner = stores.client(store.endpoint)
    before = owner.list_objects_v2(Bucket="models")["KeyCount"]
    bucket = sky.Bucket("s3://models/runs/data", store.endpoint, keys=KEYS)
    made = pool(data={"data": bucket})
    told = heard(made)
    with made:
        there = files_and_modes("data") >> made
    assert there == {name: (size, 0o444) for name, size in {**SIZES, "parts": 3 * PART + 5}.items()}
    for name, size in {**SIZES, "parts": 3 * PART + 5}.items():
        assert Path("data", name).read_bytes() == content(name, size)
    assert (told[-1].phase, told[-1].wanted, told[-1].files, told[-1].checked) == ("there", 5, 5, 5)
    assert owner.list_objects_v2(Bucket="models")["KeyCount"] == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_public_bucket_needs_no_keys_also_on_machines_of_strangers(place: Path, store: stores.Store) -> None:
    bucket = sky.Bucket("s3://models/public/data", store.endpoint)
    with pool(provider=OfStrangers(), data={"data": bucket}) as made:
        assert (files_and_modes("data") >> made).keys() == SIZES.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_read_is_told_in_one_line_before_anything_is_rented(
    store: stores.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(url: str, who: str = "", secret: str = "") -> list[Any]:
        bucket = sky.Bucket(url, store.endpoint, keys=KEYS if who else ())
        variables = {"SAVE_ID": who, "SAVE_SECRET": secret or secret_of(who)}
        return examined(data_asked({"/data": bucket}, (), variables))

    [found] = look("s3://models/runs/data", "reader")
    assert (found.files, found.bytes) == (5, sum(SIZES.values()) + 3 * PART + 5)
    [found] = look("s3://models/public/data")
    assert (found.files, found.values) == (4, ())
    for asked, why in (
        (("s3://models/runs/data",), "it is not public, and no keys are named; this computer's login is never sent"),
        (("s3://nowhere/x", "owner"), "there is no such bucket"),
        (("s3://models/runs/nothing", "reader"), "it has no objects; correct the prefix"),
        (("s3://models/other", "reader"), "the credentials do not allow it"),
        (("s3://models/runs/data", "writer"), "the credentials do not allow it"),
        (("s3://models/runs/data", "stranger"), "the store does not know the access key"),
        (("s3://models/runs/data", "reader", "wrong"), "the secret does not belong to the access key"),
    ):
        with pytest.raises(UsageError, match=why) as refused:
            look(*asked)
        assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_size_of_data_is_told_before_machines_are_rented(place: Path, store: stores.Store) -> None:
    Path("train.py").write_text("print('runs')")
    words = ["--bucket-endpoint", store.endpoint, "--bucket-keys", ",".join(KEYS), "--dry-run", "train.py"]
    keys = {"SAVE_ID": "reader", "SAVE_SECRET": secret_of("reader")}
    done = run("--provider", "fake", "--budget", "5", "--data", "/data=s3://models/runs/data", *words, **keys)
    assert done.returncode == 0, done.stderr
    assert "data     50.3 MB in 5 files from s3://models/runs/data to /data\n" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mover_that_is_killed_again_and_again_makes_the_folder_whole(tmp_path: Path, store: stores.Store) -> None:
    moments = random.Random(5)
    folder, seen = tmp_path / "data", set[str]()
    wanted = {name: content(name, size) for name, size in {**SIZES, "parts": 3 * PART + 5}.items()}
    with slowed(store.endpoint) as slow:
        said = order(
            folder, "s3://models/runs/data", endpoint=slow, region="us-east-1", values=("reader", secret_of("reader"))
        )
        for _ in range(12):
            mover = Mover(tmp_path / "node")
            try:
                mover.order(said)
                time.sleep(moments.uniform(0.3, 1.5))
            finally:
                mover.kill()
            there = {path: data for path, data in files_of(folder).items() if ".skypool-" not in path}
            assert there.items() <= wanted.items()  # each file is whole, or not there
            seen |= there.keys()
        mover = Mover(tmp_path / "node")
        try:
            mover.order(said)
            eventually(lambda: mover.last.get("phase") == "there", 100, "the data")
        finally:
            mover.kill()
    assert files_of(folder) == wanted
    assert seen


def test_a_store_that_does_not_answer_is_told_and_what_comes_later_is_whole(
    tmp_path: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filled_folder, "_PATIENCE", 0.5)
    faulty.objects |= {"a": b"1", "b": b"2"}
    faulty.answer = lambda method, name: -1 if name == "b" else 0
    (tmp_path / "journals").mkdir()
    made = FilledFolder(of_faulty(faulty, tmp_path / "data"), tmp_path / "journals", threading.Semaphore(FETCHES))
    try:
        eventually(lambda: made.trouble, 60, "the trouble")
        assert (made.phase, made.done.files) == ("fetching", 1)
        faulty.answer = lambda method, name: 0
        eventually(lambda: made.phase == "there", 60, "the data")
        assert files_of(tmp_path / "data") == {"a": b"1", "b": b"2"}
    finally:
        made.end(0.0)
        made.join()


def test_an_empty_mark_for_a_folder_becomes_no_file(tmp_path: Path, faulty: FaultyStore) -> None:
    faulty.objects |= {"a": b"1", "deep/b": b"2", "deep/": b"", "alone/": b"", "nothing": b""}
    made = filled(tmp_path / "data", "s3://models", tmp_path, endpoint=faulty.endpoint, values=("a", "b"))
    assert (made.phase, made.trouble) == ("there", "")
    assert files_of(tmp_path / "data") == {"a": b"1", "deep/b": b"2", "nothing": b""}


def test_an_object_that_cannot_be_a_file_is_refused(tmp_path: Path, faulty: FaultyStore) -> None:
    for name, why in (("a\\b", "cannot be a file"), ("x", "is an object, and the beginning of others")):
        faulty.objects = {"x/y": b"1", name: b"1"}
        made = filled(tmp_path / "data", "s3://models", tmp_path, endpoint=faulty.endpoint, values=("a", "b"))
        assert made.phase == "ended"
        assert why in made.trouble


def test_what_comes_damaged_is_fetched_again(
    tmp_path: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.etag = lambda data: hashlib.md5(data).hexdigest()
    faulty.objects |= {str(number): str(number).encode() for number in range(20)}
    damaged: list[str] = []

    def respond(method: str, name: str, data: bytes) -> tuple[int, bytes]:
        status, body = FaultyStore.respond(faulty, method, name, data)
        if name and name not in damaged:
            damaged.append(name)
            body = b"x" * len(body)
        return status, body

    monkeypatch.setattr(faulty, "respond", respond)
    made = filled(tmp_path / "data", "s3://models", tmp_path, endpoint=faulty.endpoint, values=("a", "b"))
    assert (made.phase, made.trouble, len(damaged)) == ("there", "", 20)
    assert files_of(tmp_path / "data") == faulty.objects
    assert (made.done.checked, made.done.files, made.done.bytes) == (20, 20, made.done.wanted_bytes)


def test_a_store_whose_etags_are_no_md5_is_believed_after_a_few_files(tmp_path: Path, faulty: FaultyStore) -> None:
    faulty.etag = lambda data: hashlib.sha256(data).hexdigest()[:32]
    faulty.objects |= {str(number): str(number).encode() for number in range(100)}
    made = filled(tmp_path / "data", "s3://models", tmp_path, endpoint=faulty.endpoint, values=("a", "b"))
    assert (made.phase, made.trouble, made.done.checked) == ("there", "", 0)
    assert files_of(tmp_path / "data") == faulty.objects
    assert len(faulty.asked) < 150


def test_a_folder_that_others_have_made_anew_is_left_alone(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    filled(folder, f"file://{place}", tmp_path)
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o755)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "a").write_bytes(b"mine")
    made = filled(folder, f"file://{place}", tmp_path)
    assert made.phase == "ended"
    assert files_of(folder) == {"a": b"mine"}


def test_a_folder_that_another_pool_uses_is_not_changed(place: Path, tmp_path: Path) -> None:
    folder, turns = tmp_path / "data", threading.Semaphore(FETCHES)
    (tmp_path / "journals").mkdir()
    user = FilledFolder(order(folder, f"file://{place}"), tmp_path / "journals", turns)
    eventually(lambda: user.phase == "there", 30, "the data")
    before = files_of(folder)
    assert filled(folder, f"file://{place}", tmp_path).phase == "there"  # which needs no change
    (tmp_path / "other").mkdir()
    (tmp_path / "other/new").write_text("1")
    refused = filled(folder, f"file://{tmp_path}/other", tmp_path)
    assert (refused.phase, files_of(folder)) == ("ended", before)
    assert "other data, which another pool of this machine uses; use another folder" in refused.trouble
    user.end(0.0)
    user.join()
    assert filled(folder, f"file://{tmp_path}/other", tmp_path).phase == "there"
    assert files_of(folder) == {"new": b"1"}


def test_threads_of_a_folder_end_when_it_is_not_wanted_any_more(tmp_path: Path, faulty: FaultyStore) -> None:
    faulty.objects["a"] = b"1"
    faulty.answer = lambda method, name: 503
    (tmp_path / "journals").mkdir()
    made = FilledFolder(of_faulty(faulty, tmp_path / "data"), tmp_path / "journals", threading.Semaphore(FETCHES))
    eventually(lambda: made.trouble, 60, "the trouble")
    made.end(0.0)
    made.join()
    assert made.phase == "ended"
    assert not [each for each in threading.enumerate() if each.name.startswith("data ")]

"""What pools print is kept in files: what, how much, and how it is read after the end of the pool or its client."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

import skypool as sky
from skypool import cli, events
from skypool.logs import files, reader
from skypool.logs.files import Limits, limits
from skypool.logs.masking import Masker
from skypool.logs.reader import Assembler
from skypool.logs.writer import LogWriter
from skypool.observers import client
from skypool.observers import pool_sockets as sockets
from skypool.pool.watch import Watches
from skypool.proof.report_redaction import Redaction
from tests.conftest import eventually
from tests.facts import Given, watching
from tests.log_work import fail, gang, greet, hush, serve

DEFAULT = Limits()
SECRET = "hf_Zx81-never-shown"


def run(*args: str) -> tuple[list[str], str]:
    """Run `skypool logs`, and return the lines of its stdout, and its stderr."""
    done = CliRunner().invoke(cli.build(), ["logs", *args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines(), done.stderr


def fails(*args: str) -> str:
    done = CliRunner().invoke(cli.build(), ["logs", *args])
    assert isinstance(done.exception, sky.UsageError)
    return str(done.exception)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skypool" / "logs"


def printed(text: str, *, call: int = 1, node: int = 0, stream: int = 1, slot: int = 0) -> events.Output:
    return events.Output(pool="mine", node=node, slot=slot, call=call, stream=stream, text=text)


def written(*heard: events.Event, kept: Limits = DEFAULT) -> Path:
    """Keep events as a run of the pool "mine", and return the run's folder."""
    given = Given()
    watches = Watches([LogWriter(kept)], given.quota, given.notice)
    for each in heard:
        watches.hear(each)
    watches.begin(given)
    watches.close(30)
    assert not given.told
    return files.runs("mine")[-1]


def texts(run: Path, **only: Any) -> list[str]:
    return [each.text for each in reader.lines(reader.records(run), Assembler(**only)) if each is not None]


# --- a pool --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended() -> str:
    """The name of a pool that has printed and has ended."""
    image = sky.Image(secrets={"TOKEN": SECRET})
    with sky.ComputePool(name="kept", nodes=2, slots=1, console="off", image=image) as pool:
        greet("a") @ pool[0]
        greet("b") @ pool[1]
        hush() @ pool[0]
        gang() >> pool
        pool.service(serve(), name="web").wait()
        with pytest.raises(ValueError, match="the token"):
            fail() @ pool[0]
    return "kept"


def test_what_the_setup_of_a_node_printed_is_kept() -> None:
    said = events.BootstrapOutput(pool="mine", node=0, step="run 1", text="said by the setup")
    assert [each.rstrip() for each in texts(written(said))] == ["said by the setup"]


@pytest.mark.slow
def test_what_a_pool_printed_is_read_after_its_end(ended: str) -> None:
    out, err = run(ended)
    assert "[0] hello a [secret TOKEN]" in out
    assert "[1] hello b [secret TOKEN]" in out
    assert out.count("[0] no newline") == 1
    assert "[0] to stderr" in err.splitlines()
    assert "fail() failed on node 0: ValueError: the token is [secret TOKEN]" in err
    assert "kept  ready after" in err
    assert "kept  ended after" in err


def test_gangs_are_kept_by_rank_and_services_by_name_and_silent_calls_not(ended: str) -> None:
    out, _ = run(ended)
    ranks = [line for line in out if "in the gang" in line]
    assert sorted(line.partition("]")[0].partition(" ")[2] for line in ranks) == ["rank 0", "rank 1"]
    assert any(line.endswith(" web] serving") for line in out)
    assert not any("silent" in line for line in out)


def test_secrets_are_not_in_the_files_and_only_the_user_can_read_them(ended: str) -> None:
    where = files.runs(ended)[-1]
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    for path in files.segments(where).values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert SECRET.encode() not in path.read_bytes()


def test_lines_are_chosen_by_node_call_time_and_pattern(ended: str) -> None:
    assert run(ended, "--node", "1", "--grep", "hello|silent")[0] == ["[1] hello b [secret TOKEN]"]
    assert run(ended, "--call", "serve")[0] == run(ended, "--call", "web")[0] != []
    found = [json.loads(line) for line in run(ended, "--json", "--call", "greet", "--node", "0")[0]]
    assert [each["text"] for each in found] == ["hello a [secret TOKEN]", "to stderr", "no newline"]
    assert {each["function"] for each in found} == {"greet"}
    assert {each["stream"] for each in found} == {1, 2}
    id_ = str(found[0]["call"])
    assert [json.loads(line)["text"] for line in run(ended, "--json", "--call", id_)[0]] == [
        each["text"] for each in found
    ]
    assert len(run(ended, "--tail", "2", "--grep", "hello")[0]) == 2
    assert run(ended, "--since", "1h", "--grep", "hello")[0] != []
    later = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 60))
    assert run(ended, "--since", later) == ([], "")
    assert run(ended, "--follow", "--tail", "1", "--grep", "hello b")[0] == ["[1] hello b [secret TOKEN]"]


def test_what_cannot_be_chosen_is_said(ended: str) -> None:
    assert "a regular expression" in fails(ended, "--grep", "(")
    assert "such as 14:30" in fails(ended, "--since", "tomorrow")


def test_output_is_read_after_the_client_was_killed(tmp_path: Path) -> None:
    program = """
        import sys, time
        import skypool as sky

        @sky.compute
        def work() -> None:
            for n in range(3):
                print("line", n, flush=True)
            time.sleep(600)

        with sky.ComputePool(name="killed", slots=1, console="off", lease="60s") as pool:
            future = pool.submit(work)
            future.result()
    """
    (tmp_path / "client.py").write_text(textwrap.dedent(program))
    with subprocess.Popen([sys.executable, str(tmp_path / "client.py")]) as process:
        try:
            eventually(lambda: "[0] line 2" in (run("killed")[0] if files.runs("killed") else []), 60, "the output")
        finally:
            process.send_signal(signal.SIGKILL)
    out, _ = run("killed", "--follow")
    assert CliRunner().invoke(cli.build(), ["down", "killed", "--yes"]).exit_code == 0
    with pytest.raises(client.NoOwner):  # which removes the socket that the client left
        client.info("killed")
    assert out == run("killed")[0] == ["[0] line 0", "[0] line 1", "[0] line 2"]


def test_what_a_pool_prints_last_is_followed_though_its_end_is_in_the_ledger(tmp_path: Path) -> None:
    program = """
        import time
        import skypool as sky
        from skypool.compute_pool import watch_list
        from skypool.logs.writer import LogWriter

        class Slow(LogWriter):
            def tick(self):
                if not is_over:
                    super().tick()

            def close(self):
                time.sleep(3)
                super().close()

        is_over = False
        watch_list.LogWriter = Slow
        with sky.ComputePool(name="slow", slots=1, console="off"):
            input()
            is_over = True
    """
    (tmp_path / "client.py").write_text(textwrap.dedent(program))
    follow = [sys.executable, "-m", "skypool", "logs", "slow", "--follow"]
    with subprocess.Popen([sys.executable, str(tmp_path / "client.py")], stdin=subprocess.PIPE) as process:
        try:
            eventually(lambda: files.runs("slow"), 60, "the pool")
            with subprocess.Popen(follow, stderr=subprocess.PIPE, text=True) as follower:
                assert follower.stderr is not None
                assert "launching" in follower.stderr.readline()
                process.communicate(b"\n")
                assert "slow  ended after" in follower.stderr.read()
        finally:
            process.kill()


@pytest.mark.slow
def test_100_mb_of_output_cost_little_memory_and_the_last_of_it_is_read(tmp_path: Path) -> None:
    program = """
        import re, sys
        import skypool as sky
        from tests.log_work import flood

        with sky.ComputePool(name="flooded", slots=1, console="off") as pool:
            pool.service(flood(100), name="flood").wait()
        # ru_maxrss would have what the process that started this one had in memory.
        print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10, file=sys.stderr)
    """
    (tmp_path / "client.py").write_text(textwrap.dedent(program))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    client = [sys.executable, str(tmp_path / "client.py")]
    done = subprocess.run(client, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 300, "MiB of memory of the client"
    assert files.size(files.runs("flooded")[-1]) <= DEFAULT.pool
    measured = "import resource as r, subprocess as s, sys; s.run(sys.argv[1:], check=True); "
    measured += "print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss >> 10)"
    command = [sys.executable, "-m", "skypool", "logs", "flooded", "--call", "flood", "--tail", "2"]
    argv = [sys.executable, "-c", measured, *command]
    # If the node had to drop output, a line on stderr says so where it is missing.
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    *lines, memory = done.stdout.splitlines()
    line = [each for each in lines if each.startswith("[0 flood]")][-1]
    assert line == f"[0 flood] {(100 << 13) - 1:07} {'x' * 119}"
    assert int(memory) < 200, "MiB of memory of the command"


def test_a_pool_that_keeps_nothing_is_followed_through_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.SWITCH, "off")
    with sky.ComputePool(name="unkept", slots=1, console="off") as pool:
        eventually(lambda: "unkept" in sockets.pools(), 30, "the socket")
        assert "--follow prints what comes from now on" in fails("unkept")
        program = [sys.executable, "-m", "skypool", "logs", "unkept", "--follow"]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as follower:
            try:
                said: list[str] = []
                thread = threading.Thread(target=lambda: said.extend(follower.stdout or ()))
                thread.start()
                eventually(lambda: pool.submit(print, "now").result() is None and bool(said), 60, "a line")
            finally:
                follower.kill()
                thread.join()
    assert said[0] == "[0] now\n"
    assert files.runs("unkept") == []


def test_wrong_limits_are_refused_before_anything_is_rented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.SWITCH, "pool=much")
    with pytest.raises(sky.UsageError, match="SKYPOOL_LOGS must be at least 1MB"):
        sky.ComputePool(name="wrong", console="off").start()


# --- size and age --------------------------------------------------------------------------------------------


def test_limits_are_read_from_the_environment() -> None:
    assert limits({}) == Limits(64 * 10**6, 10**9, 30 * 86400.0)
    assert limits({files.SWITCH: "pool=2GiB all=8GB age=7d"}) == Limits(2 << 30, 8 * 10**9, 7 * 86400.0)
    assert limits({files.SWITCH: "OFF"}).pool == 0
    for wrong in ("pool=3", "pool=1KB", "age=old", "everything"):
        with pytest.raises(sky.UsageError, match=files.SWITCH):
            limits({files.SWITCH: wrong})


def test_without_a_name_the_pools_whose_output_is_kept_are_listed_the_newest_first(place: Path) -> None:
    assert run() == (["nothing is kept of any pool"], "")
    for pool, began in (
        ("older", "20260102T030405-a1"),
        ("newer", "20260304T050607-b2"),
        ("older", "20260405T060708-c3"),
    ):
        (place / pool / began).mkdir(parents=True)
        (place / pool / began / "000001.jsonl").touch()
    lines, _ = run()
    assert lines[0].split() == ["pool", "began", "last", "output"]
    assert [each.split()[0] for each in lines[1:]] == ["older", "newer", "older"]
    told = json.loads("\n".join(run("--json")[0]))
    assert [each["began"] for each in told] == ["2026-04-05T06:07:08Z", "2026-03-04T05:06:07Z", "2026-01-02T03:04:05Z"]


def test_files_stay_below_the_limit_and_what_is_missing_is_said(place: Path) -> None:
    watches = watching(LogWriter(Limits(pool=800_000)), given := Given())
    for n in range(300):
        watches.hear(printed(f"{n:05} {'x' * 10_000}\n"))
        if n % 50 == 0:
            time.sleep(0.06)
    watches.close(30)
    assert not given.told
    kept = files.runs("mine")[-1]
    assert files.size(kept) <= 800_000
    assert len(files.segments(kept)) <= files.SEGMENTS
    found = texts(kept)
    assert found[0] == "earlier output was removed to save space"
    assert [int(each[:5]) for each in found[-30:]] == list(range(270, 300))


def test_what_comes_faster_than_it_is_written_is_counted_and_takes_no_memory(place: Path) -> None:
    kept = written(*(printed("x" * (1 << 20) + "\n") for _ in range(40)))
    lines = [each for each in reader.lines(reader.records(kept), Assembler()) if each is not None]
    whole = sum(each.text.startswith("x") for each in lines)
    missing = [each.record["count"] for each in lines if each.record["event"] == "Missed"]
    assert whole + sum(missing) == 40
    assert 10 < whole < 20


def test_old_runs_and_the_ones_beyond_the_limit_of_all_are_removed(place: Path) -> None:
    def old(name: str, age: float, size: int = 10) -> Path:
        made = place / name / "20260101T000000-abc"
        made.mkdir(parents=True)
        (made / "000001.jsonl").write_bytes(b"x" * size)
        for each in (made / "000001.jsonl", made):
            os.utime(each, (time.time() - age, time.time() - age))
        return made

    aged, large, recent = old("aged", 40 * 86400), old("large", 86400, 2000), old("recent", 60, 2000)
    kept = written(printed("a line\n"), kept=Limits(total=1000))
    assert [each.exists() for each in (aged, large, recent, kept)] == [False, False, True, True]
    assert not aged.parent.exists()


def test_a_folder_that_cannot_be_made_is_said_once_and_nothing_is_raised(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("a file in its place")
    watches = watching(LogWriter(Limits()), given := Given())
    watches.hear(printed("a line\n"))
    watches.close(30)
    [said] = given.notices
    assert "cannot be kept" in said
    assert "SKYPOOL_LOGS=off" in said


def test_a_disk_that_is_full_for_a_while_costs_only_what_came_meanwhile(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = watching(LogWriter(Limits()), given := Given())
    eventually(lambda: files.runs("mine"), 30, "the folder")
    real = files.segment
    monkeypatch.setattr(files, "segment", lambda run, number: Path("/dev/full") / "none")
    watches.hear(printed("lost\n"))
    eventually(lambda: given.notices, 30, "the notice")
    monkeypatch.setattr(files, "segment", real)
    watches.hear(printed("kept\n"))
    watches.close(30)
    found = texts(files.runs("mine")[-1])
    assert "kept" in found
    assert "lost" not in found
    assert any("1 events are missing here" in each for each in found)


def test_a_folder_that_cannot_be_made_at_first_is_made_for_what_comes_later(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("a file in its place")
    watches = watching(LogWriter(Limits()), given := Given())
    watches.hear(printed("lost\n"))
    eventually(lambda: given.notices, 30, "the notice")
    watches.settle(within=30)
    place.unlink()
    watches.hear(printed("kept\n"))
    eventually(lambda: files.runs("mine"), 30, "the folder")
    watches.close(30)
    found = texts(files.runs("mine")[-1])
    assert "kept" in found
    assert "lost" not in found
    assert any("1 events are missing here" in each for each in found)


# --- records and lines ---------------------------------------------------------------------------------------


def test_the_time_since_the_start_is_left_out_if_the_start_was_removed() -> None:
    begun = {"event": "PoolPhase", "pool": "mine", "time": 9.0, "phase": "launching"}
    removed = {"event": reader.REMOVED, "time": 50.0}
    ended = {"event": "PoolPhase", "pool": "mine", "time": 40.0, "phase": "ended"}
    for found, text in (([begun, removed, ended], "ended after 31 s"), ([removed, ended], "ended")):
        *_, last = reader.lines(found, Assembler())
        assert last is not None
        assert last.text.endswith(f"mine  {text}")


def test_a_cut_record_is_left_out_and_the_next_process_goes_on(place: Path) -> None:
    kept = written(printed("one\n"))
    with (kept / "000001.jsonl").open("ab") as file:
        file.write(b'{"event": "Output", "te')
    assert written(printed("two\n")) == kept
    assert texts(kept) == ["one", "two"]


def test_lines_are_whole_although_they_come_in_pieces_of_several_calls(place: Path) -> None:
    kept = written(
        printed("a be", call=1),
        printed("other\n", call=2, slot=1),
        printed("ginning\nun", call=1),
        printed("next call\n", call=3),
        printed("10%\r20%\r30%\n", call=3),
    )
    assert texts(kept) == ["other", "a beginning", "un", "next call", "30%"]
    assert texts(kept, call="1") == ["a beginning", "un"]


@pytest.mark.parametrize("cut", range(1, len(SECRET)))
def test_a_secret_in_two_pieces_is_masked(cut: int) -> None:
    masker = Masker({"TOKEN": SECRET})
    said = masker.feed("s", f"is {SECRET[:cut]}") + masker.feed("s", f"{SECRET[cut:]} here\n")
    assert said + masker.finish("s") == "is [secret TOKEN] here\n"


def test_secrets_are_found_as_they_are_written_elsewhere() -> None:
    key = 'p/q+r "s"\nsecond line'
    masker = Masker({"KEY": key, "SHORT": "a"})
    for said in (key, json.dumps(key)[1:-1], "p%2Fq%2Br%20%22s%22%0Asecond%20line", "cC9xK3IgInMiCnNlY29uZCBsaW5l"):
        assert masker.mask(f"<{said}>") == "<[secret KEY]>"
    assert masker.mask("a banana") == "a banana"


WRITTEN: dict[str, Callable[[str], str]] = {
    "Python's quote": quote,
    "quote with small letters": lambda secret: re.sub("%..", lambda each: each[0].lower(), quote(secret, safe="")),
    "a URL in a URL": lambda secret: quote(quote(secret, safe=""), safe=""),
    "JavaScript's encodeURIComponent": lambda secret: quote(secret, safe="!*'()"),
    "JSON with Unicode": lambda secret: json.dumps(secret, ensure_ascii=False)[1:-1],
    "JSON in JSON": lambda secret: json.dumps(json.dumps({"key": secret})),
    "JSON of Go": lambda secret: re.sub(
        "[<>&]", lambda each: f"\\u{ord(each[0]):04x}", json.dumps(secret, ensure_ascii=False)
    ),
    "JSON of PHP": lambda secret: json.dumps(secret).replace("/", "\\/"),
    "repr": repr,
    "ascii": ascii,
    "repr of bytes": lambda secret: repr(secret.encode()),
    "a word of a shell": shlex.quote,
    "HTML": html.escape,
    "a text in HTML": lambda secret: html.escape(secret, quote=False),
    "hexadecimal": lambda secret: secret.encode().hex(),
    "hexadecimal with capitals": lambda secret: secret.encode().hex().upper(),
}
"""How libraries and programs write a secret."""


@pytest.mark.parametrize("way", WRITTEN)
@pytest.mark.parametrize(
    "secret", ["hf_Ab1-Zz9qAb1", "p/q+r \"s\" 't' <u>&\xe9=!(*)\\"], ids=["a token", "odd characters"]
)
def test_a_secret_is_masked_however_it_is_written(way: str, secret: str) -> None:
    masker = Masker({"KEY": secret})
    said = f"before {WRITTEN[way](secret)} after\n"
    masked = masker.mask(said)
    assert "[secret KEY]" in masked
    assert len(masked) < len("before {''key'': } after\n") + len("[secret KEY]") + 20, "nothing of it is left"
    assert "".join(masker.feed(1, each) for each in said) + masker.finish(1) == masked
    assert WRITTEN[way](secret) not in Redaction([secret])(said)


def test_a_secret_that_is_no_unicode_text_is_masked() -> None:
    secret = os.fsdecode(b"hf_caf\xe9-0123456789")
    said = f"{quote(os.fsencode(secret))} {os.fsencode(secret).hex()} {json.dumps(secret)}"
    assert Masker({"KEY": secret}).mask(said) == '[secret KEY] [secret KEY] "[secret KEY]"'
    assert "0123456789" not in Redaction([secret])(said)
    assert Masker({"KEY": "hf_\ud800-0123"}).mask("hf_\\ud800-0123") == "[secret KEY]"


@pytest.mark.parametrize("user", ["", "u", "us", "usr", "user"])
@pytest.mark.parametrize("more", ["", "@", "@h", "@ho"])
def test_a_secret_in_the_header_of_http_basic_is_masked(user: str, more: str) -> None:
    """base64 encodes three bytes at a time, so the characters depend on what is before and after the secret."""
    for secret in ("hf_Ab1+/Zz9q", "hf_Ab1+/Zz9", "hf_Ab1+/Zz", "hf_\xe9?~\xff\xfe~?>"):
        masker = Masker({"KEY": secret})
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            said = encode(f"{user}:{secret}{more}".encode()).decode()
            masked = masker.mask(f"Authorization: Basic {said}\n")
            head, mark, tail = masked.removeprefix("Authorization: Basic ").partition("[secret KEY]")
            assert mark, masked
            known = base64.urlsafe_b64encode(f"{user}:".encode()).decode()
            assert len(head) <= len(known), "no more than the user's own characters, and one that has bits of both"
            assert len(tail.strip("=\n")) <= (len(more) * 8 + 5) // 6 + 1
            streamed = "".join(masker.feed(1, each) for each in said) + masker.finish(1)
            assert "[secret KEY]" in streamed


def test_a_beginning_of_a_secret_that_does_not_go_on_is_printed() -> None:
    masker = Masker({"TOKEN": SECRET})
    assert masker.feed("s", "the letter h") == "the letter "
    assert masker.feed("s", "\n") == "h\n"
    assert masker.feed("s", SECRET[:-1]) == ""
    assert masker.finish("s") == "[secret TOKEN]"


def test_a_run_is_followed_over_its_segments_to_its_end(place: Path) -> None:
    watches = watching(LogWriter(Limits(pool=8000)), Given())
    eventually(lambda: files.runs("mine"), 30, "the folder")
    found: list[str] = []

    def follow() -> None:
        kept = files.runs("mine")[-1]
        found.extend(each.text for each in reader.lines(reader.records(kept, follow=True), Assembler()) if each)

    def told(n: int) -> bool:
        return len(found) > n

    thread = threading.Thread(target=follow)
    thread.start()
    for n in range(4):
        watches.hear(printed(f"{n} {'y' * 1500}\n"))
        eventually(partial(told, n), 30, "the line")
    watches.close(30)
    thread.join(30)
    assert not thread.is_alive()
    assert [each[0] for each in found] == list("0123")

"""Run directories: complete, resumable after any crash, repeatable; and what is wrong is named."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from itertools import count

import numpy as np
import pytest

from aqg.errors import ConfigError, RunError
from aqg.runs import files, loop
from aqg.runs.config import resolve
from aqg.runs.cost import Cost
from aqg.runs.directory import (
    CHECKPOINT,
    CONFIG,
    ROUNDS,
    SUMMARY,
    read_lines,
    read_summary,
    read_toml,
)
from aqg.runs.executor import Contact, Interrupted
from aqg.runs.files import Records, locked, read_arrays, write_arrays
from aqg.runs.setup import build_problem, find_minimum
from aqg.runs.stopping import Target, Trace
from aqg.weights import BEST, FINAL

from tests.commands import contents, stop_after
from tests.problems import crossed

SETTINGS = {"recipe": "lean", "rounds": 30, "dropout": 0.2, "target": 0.5}


@pytest.fixture(scope="module")
def config():
    return resolve(SETTINGS)[0]


@pytest.fixture(scope="module")
def problem(config):
    return build_problem(config)


class StopAfter(Exception):  # noqa: N818
    """Stands for a crash."""


def crash_after(number):
    rounds = count(1)

    def count_rounds():
        if next(rounds) == number:
            raise StopAfter

    return Contact(is_stop_asked=count_rounds)


def run_whole(config, problem, directory):
    loop.create_run(directory, config)
    return loop.run(config, problem, find_minimum(config, problem), directory)


def test_a_run_directory_is_complete(config, problem, tmp_path):
    result = run_whole(config, problem, tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == sorted([CONFIG, ROUNDS, CHECKPOINT, SUMMARY, BEST, FINAL])
    lines = [json.loads(line) for line in (tmp_path / "run" / ROUNDS).read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 31))
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    for name in ("upload_bytes", "download_bytes", "total_bytes"):
        assert summary[name] == sum(line[name] for line in lines)
    assert summary["total_bytes"] == summary["upload_bytes"] + summary["download_bytes"]
    assert sum(summary["client_upload_bytes"]) == summary["upload_bytes"]
    assert sum(summary["client_download_bytes"]) == summary["download_bytes"]
    assert not any(name.startswith("client_") for name in lines[0])
    assert summary["uploads"] == sum(w > 0 for line in lines for w in line["widths"])
    minimum = find_minimum(config, problem)
    assert summary["residual"] == pytest.approx(result["final_loss"] - minimum)
    assert resolve(read_toml(tmp_path / "run" / CONFIG)) == (config,)


@pytest.mark.parametrize(("crash", "engine"), crossed([1, 13, 30], ["fast", "reference"]))
def test_goes_on_after_a_crash_and_ends_the_same(problem, tmp_path, crash, engine, monkeypatch):
    config = resolve({**SETTINGS, "engine": engine})[0]
    whole = run_whole(config, problem, tmp_path / "whole")
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    monkeypatch.setattr(loop, "_LARGEST_SHARE_OF_CHECKPOINTS", 1e9)
    directory = tmp_path / "broken"
    loop.create_run(directory, config)
    with pytest.raises(StopAfter):
        loop.run(config, problem, None, directory, crash_after(crash))
    # The crash came after the line was written and before the checkpoint: cut it mid-line too.
    text = (directory / ROUNDS).read_text()
    (directory / ROUNDS).write_text(text[:-7])
    (directory / f".{CHECKPOINT}.part").write_bytes(b"half")
    minimum = find_minimum(config, problem)
    resumed = loop.run(config, problem, minimum, directory)
    assert resumed == whole
    assert (directory / SUMMARY).read_text() == (tmp_path / "whole" / SUMMARY).read_text()
    for name in (BEST, FINAL):
        assert (directory / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (directory / ROUNDS).read_text() == (tmp_path / "whole" / ROUNDS).read_text()
    with np.load(directory / CHECKPOINT) as left, np.load(tmp_path / "whole" / CHECKPOINT) as right:
        assert all(np.array_equal(left[key], right[key]) for key in right)


def test_resume_refuses_another_config(config, problem, tmp_path):
    run_whole(config, problem, tmp_path / "run")
    assert loop.read_configs(tmp_path / "run", {}) == (config,)
    assert loop.read_configs(tmp_path / "run", {"rounds": 30}) == (config,)
    with pytest.raises(ConfigError, match=r"with rounds 31: the run has rounds 30"):
        loop.read_configs(tmp_path / "run", {"rounds": 31})
    with pytest.raises(ConfigError, match=r"with recipe gd: the run has recipe lean"):
        loop.read_configs(tmp_path / "run", {"recipe": "gd"})
    with pytest.raises(RunError, match="is not a run directory"):
        loop.read_configs(tmp_path, {})


def test_a_diverging_run_ends_early_and_says_so(tmp_path):
    config = resolve({"recipe": "gd", "rounds": 400, "alpha": 1e6, "l2": 1.0})[0]
    result = run_whole(config, build_problem(config), tmp_path / "run")
    assert result["diverged"]
    assert result["rounds"] < 400
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert summary["diverged"] is True
    assert summary["test_accuracy"] is not None
    again = loop.run(config, build_problem(config), None, tmp_path / "run")
    assert again["rounds"] == result["rounds"]


def test_a_target_counts_only_when_the_loss_stays():
    costs = tuple(Cost(k, 10 * k, 20 * k, 30 * k) for k in range(6))
    trace = Trace(costs, (5.0, 0.9, 2.0, 0.8, 1.0, 0.7), (None,) * 6)
    assert trace.cost_to(Target("loss", 1.0)) == costs[3]
    assert trace.cost_to(Target("loss", 0.75)) == costs[5]
    assert trace.cost_to(Target("loss", 0.5)) is None
    assert trace.cost_to(Target("loss", 9.0)) == costs[0]
    lost = Trace(costs[:2], (0.5, float("nan")), ({},) * 2)
    assert lost.cost_to(Target("loss", 1.0)) is None


def test_checkpoints_take_a_tenth_of_the_time_at_most():
    now = [0.0]
    checkpoints = loop.Checkpoints(lambda: now[0])

    def after(seconds):
        now[0] += seconds
        return checkpoints.is_due()

    assert [after(5), after(0.1)] == [False, True]
    checkpoints.time(lambda: after(0.2))
    assert [after(4.9), after(0.2)] == [False, True]
    checkpoints.time(lambda: after(3))
    assert [after(29), after(2)] == [False, True]


PLAIN = {"recipe": "lean", "rounds": 12, "dropout": 0.2}
SHORT = resolve(PLAIN)[0]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, problem):
    """Return the directory of a run that was stopped after 7 of 12 rounds."""
    directory = tmp_path_factory.mktemp("run") / "half"
    loop.create_run(directory, SHORT)
    with pytest.raises(Interrupted):
        loop.run(SHORT, problem, None, directory, stop_after(7))
    return directory


@pytest.fixture
def run(halfway, tmp_path):
    shutil.copytree(halfway, tmp_path / "run")
    return tmp_path / "run"


def refused(run, problem, message):
    """Check that the run does not go on, says why in one line, and leaves everything as it is."""
    before = contents(run)
    with pytest.raises(RunError, match=message) as caught:
        loop.run(SHORT, problem, None, run)
    assert "\n" not in str(caught.value)
    assert contents(run) == before


def change_line(run, number, change):
    lines = (run / ROUNDS).read_bytes().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    (run / ROUNDS).write_bytes(b"".join(lines))


def replace_the_third(**changes):
    """Put a line there whose checksum is right, with other values; None: without a field."""

    def damage(run):
        row = json.loads((run / ROUNDS).read_text().splitlines()[2]) | changes
        kept = {key: row[key] for key in row if key != "crc32" and row[key] is not None}
        change_line(run, 3, lambda _: (files.seal(json.dumps(kept)) + "\n").encode())

    return damage


def cut(run):
    content = (run / ROUNDS).read_bytes()
    (run / ROUNDS).write_bytes(content[: len(content) // 2])


def flip_a_bit_of_the_model(run):
    content = bytearray((run / BEST).read_bytes())
    content[-3] ^= 16
    (run / BEST).write_bytes(content)


def write(content):
    return lambda run: (run / CHECKPOINT).write_bytes(content)


def third(change):
    return lambda run: change_line(run, 3, change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / ROUNDS).unlink(), "rounds.jsonl' is missing, but the checkpoint is at"),
        (cut, r"rounds.jsonl' holds 3 rounds, but the checkpoint is at round 7; delete"),
        (write(b""), r"checkpoint.npz' is damaged \(EOFError: No data left"),
        (write(b"PK\x05\x06" + bytes(18)), r"npz' is damaged \(KeyError: 'about'"),
        (write(b"\x00" * 5000), r"checkpoint.npz' is damaged \(\w+: "),
        (replace_the_third(loss=9.0), "does not hold the rounds that checkpoint.npz counts on"),
        (replace_the_third(widths=3), "line 3: it has no usable 'int' object is not iterable"),
        (replace_the_third(upload_bytes=None), "line 3: it has no usable 'upload_bytes'"),
        (third(lambda line: line + line), r"is damaged: line 4 is of round 3"),
        (third(lambda line: line.replace(b'"up', b'"up\xff')), "line 3: it does not fit its check"),
        (third(lambda line: b"\xff\xfe\xfd\n"), "line 3: it has no checksum"),
        (third(lambda line: line.replace(b"crc32", b"crc33")), "line 3: it has no checksum"),
        (third(lambda line: line[:30] + b"\n"), "line 3: it has no checksum"),
        (third(lambda line: b"\n"), "line 3: it has no checksum"),
        (
            flip_a_bit_of_the_model,
            "best.safetensors' is damaged: it does not fit its checksum; del",
        ),
    ],
)
def test_damage_is_named_and_nothing_changed(run, problem, damage, message):
    damage(run)
    refused(run, problem, message)


def read_flipped(path, places, read):
    """Yield what is read with a bit flipped at each place, but for where that is refused."""
    whole = path.read_bytes()
    for position in places:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with suppress(RunError):
            yield read()


def test_any_flipped_bit_of_a_checkpoint_is_seen(tmp_path):
    path = tmp_path / CHECKPOINT
    write_arrays(path, {"round": np.array(3), "parameters": np.arange(40.0)}, {"run": "r"})
    whole = path.read_bytes()
    arrays, about = read_arrays(path, "")
    assert about == {"run": "r"}
    unseen = list(read_flipped(path, range(len(whole)), lambda: read_arrays(path, "")))
    for found, said in unseen:
        assert said == about  # times and attributes of the archive have no checksum
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    assert len(unseen) < 0.2 * len(whole)
    path.write_bytes(whole[:-1])
    with pytest.raises(RunError, match=r"is damaged"):
        read_arrays(path, "")


def test_any_flipped_bit_of_a_line_is_seen(run):
    whole, rows = (run / ROUNDS).read_bytes(), read_lines(run)
    start, end = (whole.index(f'{{"round": {k},'.encode()) for k in (3, 4))
    for found in read_flipped(run / ROUNDS, range(start, end - 1), lambda: read_lines(run)):
        assert found == rows  # the checksum's own field, or white space


def test_another_runs_checkpoint(run, problem, tmp_path):
    other = resolve({**PLAIN, "seed": 1})[0]
    loop.create_run(tmp_path / "other", other)
    loop.run(other, build_problem(other), None, tmp_path / "other")
    shutil.copy(tmp_path / "other" / CHECKPOINT, run / CHECKPOINT)
    refused(run, problem, r"checkpoint.npz' belongs to another run \(settings [0-9a-f]{12}, and")


def test_a_damaged_summary_is_no_result(run, problem):
    loop.run(SHORT, problem, None, run)
    text = (run / SUMMARY).read_text()
    assert read_summary(run)["rounds"] == 12
    (run / SUMMARY).write_text(text.replace('"rounds": 12', '"rounds": 13'))
    with pytest.raises(RunError, match=r"summary.json' is damaged \(it does not fit its checksum"):
        read_summary(run)
    (run / SUMMARY).write_text("")
    with pytest.raises(RunError, match="is damaged"):
        read_summary(run)


def test_rounds_are_on_disk_before_the_checkpoint_that_counts_on_them(
    tmp_path, problem, monkeypatch
):
    """A power cut keeps what was synced: no checkpoint may be there without its rounds."""
    synced = []
    real_sync = os.fsync

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", sync)
    directory = tmp_path / "run"
    loop.create_run(directory, SHORT)
    synced.clear()
    with pytest.raises(Interrupted):
        loop.run(SHORT, problem, None, directory, stop_after(5))
    names = [os.path.basename(name) for name in synced]
    assert names.index(ROUNDS) < names.index(f".{CHECKPOINT}.part")
    assert str(directory) in synced[names.index(f".{CHECKPOINT}.part") :]  # the name, too


def test_one_process_at_a_time(run, problem):
    code = f"""
    import sys, time
    from pathlib import Path
    from aqg.runs.files import locked
    with locked(Path({str(run)!r})):
        print("locked", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="is in use by another process"), locked(run):
            pytest.fail("two at a time")
        before = time.monotonic()
        process.kill()  # it leaves nothing behind
        with locked(run, wait_seconds=30):
            assert time.monotonic() - before < 30


def full(descriptor):
    raise OSError(28, "No space left on device")


def test_records_survive_a_write_that_was_cut(tmp_path, monkeypatch):
    records = Records(tmp_path / "trials.jsonl")
    records.add({"number": 1})
    with records.path.open("ab") as file:
        file.write(b'{"number": 2, "cr')  # a kill
    assert records.read() == [{"number": 1}]
    records.add({"number": 3})
    assert records.read() == [{"number": 1}, {"number": 3}]

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(RunError, match="No space left on device"):
            records.add({"number": 4})
    assert records.read() == [{"number": 1}, {"number": 3}]
    content = records.path.read_bytes()
    records.path.write_bytes(content.replace(b'"number": 1', b'"number": 7'))
    with pytest.raises(RunError, match="line 1: it does not fit its checksum"):
        records.read()


def test_a_disk_that_is_full_is_named(tmp_path, problem, monkeypatch):
    loop.create_run(tmp_path / "run", SHORT)
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        loop.run(SHORT, problem, None, tmp_path / "run")
    assert not (tmp_path / "run" / CHECKPOINT).exists()

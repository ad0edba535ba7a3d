"""The executor with real processes: what comes next, stops, deaths and retries."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from aqg.errors import ConfigError, RunError
from aqg.runs.executor import (
    Done,
    Failed,
    Interrupted,
    Processes,
    Reported,
    Started,
    Stopped,
    Stopping,
    carry_out,
    run_tasks,
)


class Chain:
    """A plan whose next job is known only when the one before has ended."""

    def __init__(self, tasks):
        self.tasks = tasks
        self.results = []
        self.position = 0

    def next(self):
        if self.position == len(self.tasks) or len(self.results) < self.position:
            return None
        self.position += 1
        return self.position - 1

    def take(self, job, result):
        self.results.append(result)


def follow(plan, place, handle=lambda job, event: None, events=None):
    events = [] if events is None else events

    def take(job, event):
        events.append(event)
        handle(job, event)

    carry_out(plan.next, plan.tasks.__getitem__, place, plan.take, take)
    return events


def exit_at_once(contact):
    sys.exit(3)


def fail(contact):
    raise ZeroDivisionError("no\nway")


def refuse(contact):
    raise ConfigError("rounds is 0; it must be at least 1")


def give_seven(contact):
    return 7


def test_a_plan_is_asked_again_when_a_task_has_ended():
    plan = Chain([give_seven, fail, refuse, exit_at_once, give_seven])
    with Processes(2) as place:
        events = follow(plan, place)
    pairs = [Started, Done, *[Started, Failed] * 3, Started, Done]
    assert [type(event) for event in events] == pairs
    assert [event.index for event in events] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    first, second, third, fourth, last = plan.results
    assert first == last == 7
    assert (type(second), str(second)) == (RunError, "ZeroDivisionError: no way")
    assert (type(third), str(third)) == (ConfigError, "rounds is 0; it must be at least 1")
    assert "exit code 3" in str(fourth)
    assert events[7].died


@dataclass(frozen=True)
class DieFirst:
    """Kills its process as often as told, and counts in a file."""

    file: Path
    times: int

    def __call__(self, contact):
        count = len(self.file.read_text()) if self.file.exists() else 0
        self.file.write_text("x" * (count + 1))
        if count < self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        return count


def test_a_place_may_ask_for_retries(tmp_path):
    with Processes(1) as place:
        place.retries = 1
        assert run_tasks([DieFirst(tmp_path / "a", 1)], place) == [1]
        with pytest.raises(RunError, match="its process was killed"):
            run_tasks([DieFirst(tmp_path / "b", 2)], place)
    assert (tmp_path / "b").read_text() == "xx"


@dataclass(frozen=True)
class Saver:
    """Works until it is told to stop."""

    file: Path
    saves: ClassVar[bool] = True

    def __call__(self, contact):
        contact.tell("here")
        while not contact.is_stop_asked():
            time.sleep(0.01)
        self.file.write_text("saved")
        raise Interrupted


def interrupt(event_type):
    """Press Ctrl-C when such an event comes."""

    def handle(job, event):
        if isinstance(event, event_type):
            signal.raise_signal(signal.SIGINT)

    return handle


def test_the_first_interrupt_lets_tasks_save(tmp_path):
    plan = Chain([Saver(tmp_path / "saved"), give_seven])
    before, events = signal.getsignal(signal.SIGINT), []
    with Processes(1) as place, pytest.raises(Interrupted):
        follow(plan, place, interrupt(Reported), events)
    assert (tmp_path / "saved").read_text() == "saved"
    assert {type(event) for event in events} >= {Started, Stopped}
    assert plan.results == []
    assert signal.getsignal(signal.SIGINT) is before


def sleep(contact):
    time.sleep(60)


@dataclass(frozen=True)
class SleepAndSave:
    saves: ClassVar[bool] = True

    def __call__(self, contact):
        time.sleep(60)


@pytest.mark.parametrize(
    ("task", "event_type", "error"),
    [(sleep, Started, Interrupted), (SleepAndSave(), Started | Stopping, KeyboardInterrupt)],
)
def test_tasks_that_do_not_save_and_second_interrupts_end_at_once(task, event_type, error):
    started = time.monotonic()
    with Processes(1) as place, pytest.raises(error):
        follow(Chain([task]), place, interrupt(event_type))
    assert time.monotonic() - started < 30
    assert place._workers == []


def test_workers_end_when_their_parent_is_gone(tmp_path):
    code = f"""
from pathlib import Path
from tests.runs.test_executor import Saver
from aqg.runs.executor import Processes
from aqg.runs.executor import run_tasks, Reported
place = Processes(1)
def show(event):
    if isinstance(event, Reported):
        print(place._workers[0].process.pid, flush=True)
if __name__ == "__main__":
    run_tasks([Saver(Path({str(tmp_path / "saved")!r}))], place, show)
"""
    import subprocess

    (tmp_path / "parent.py").write_text(code)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}"}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], stdout=-1, text=True, env=environment
    ) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while (
        Path(f"/proc/{worker}").exists()
        and "zombie" not in Path(f"/proc/{worker}/status").read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "saved").exists()


def test_outside_the_main_thread_there_is_no_ctrl_c():
    results = []
    with Processes(1) as place:
        thread = threading.Thread(target=lambda: results.extend(run_tasks([give_seven], place)))
        thread.start()
        thread.join()
    assert results == [7]


def test_processes_see_one_gpu_each():
    with Processes(2, gpus=("0", "2")) as place:
        seen = run_tasks([_visible] * 2, place)
    assert sorted(set(seen)) == ["0", "2"]


def _visible(contact):
    time.sleep(1)
    return os.environ["CUDA_VISIBLE_DEVICES"]

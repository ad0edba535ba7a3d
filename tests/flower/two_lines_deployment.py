"""An app with the two lines on real processes, whatever Flower's version; prints JSON.

python tests/flower/two_lines_deployment.py DIRECTORY

A SuperLink and two SuperNodes run the app `dropin_app`. Bytes are what Flower itself counts of a
run, as ``flwr list --run-id`` shows them.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import flwr

APP = Path(__file__).parent / "dropin_app"
BIN = Path(sys.executable).parent
HOST, NUM_NODES, ROUNDS, SIZE, SECONDS = "127.0.0.1", 2, 3, 100_000, 900
_ADOPT = 36
"""PR_SET_CHILD_SUBREAPER: processes whose parents have ended become children of this one."""


def main():
    """Run the app."""
    with federation(Path(sys.argv[1]).resolve()):
        print(json.dumps({"version": flwr.__version__, "small": run()}))


def run():
    """Run the app; return what its server said, and what Flower counted."""
    config = f"num-clients={NUM_NODES} rounds={ROUNDS} size={SIZE} timeout={SECONDS}"
    number = flower("run", str(APP), "here", "--run-config", config)["run-id"]
    end = time.monotonic() + SECONDS
    while True:
        [row] = flower("list", "here", "--run-id", str(number))["runs"]
        if str(row["status"]).startswith("finished"):
            break
        if time.monotonic() > end:
            raise SystemExit(f"run {number} is {row['status']} after {SECONDS} s")
        time.sleep(3)  # every look is a Python of its own
    log = command("log", str(number), "here", "--show")
    said = re.search(r"distance ([\d.]+), refused (\d+), up (\d+)", log)
    if said is None:
        raise SystemExit(f"run {number} is {row['status']}:\n{log[-4000:]}")
    distance, refused, up = (float(text) for text in said.groups())
    return {"distance": distance, "refused": refused, "up": up, "row": row}


def command(*arguments):
    """Run ``flwr ...``."""
    words = [BIN / "flwr", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"flwr {arguments[0]}:\n{done.stdout}{done.stderr}")
    return done.stdout


def flower(*arguments):
    """Run ``flwr ... --format json``."""
    text = command(*arguments, "--format", "json")
    return json.loads(text[text.index("{") :])


@contextmanager
def federation(directory):
    """Run a SuperLink and its nodes."""
    home = directory / "flower"
    home.mkdir(parents=True)
    os.environ |= {
        "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),  # they start each other by name
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "NO_PROXY": HOST,
    }
    words = [BIN / "flower-superlink", "--help"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    has_one_port = "--port PORT" in said
    ctypes.CDLL(None).prctl(_ADOPT, 1)

    def start(name, *arguments):
        with (directory / f"{name}.log").open("w") as log:
            program = BIN / name.partition(".")[0]
            subprocess.Popen([program, "--insecure", *arguments], stdout=log, stderr=log)

    def at(port, *names):
        if has_one_port:
            return ["--host", HOST, "--port", str(port)]
        return [part for name in names for part in (name, f"{HOST}:{free_port()}")]

    port = fleet = free_port()
    if has_one_port:
        start("flower-superlink", *at(port))
    else:
        fleet = free_port()
        more = ("--fleet-api-address", f"{HOST}:{fleet}", "--control-api-address", f"{HOST}:{port}")
        start("flower-superlink", *at(port, "--serverappio-api-address"), *more)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{HOST}:{port}"\n'
        "insecure = true\n"
    )
    try:
        wait_for(port)
        for node in range(NUM_NODES):
            config = f"partition-id={node} num-partitions={NUM_NODES}"
            own = at(free_port(), "--clientappio-api-address")
            more = ("--superlink", f"{HOST}:{fleet}", "--node-config", config)
            os.environ["AQG_STATE_DIR"] = str(directory / f"state{node}")
            start(f"flower-supernode.{node}", *more, *own)
        yield
    finally:
        end_children()


def end_children():
    """End all processes that were started here, apps' among them."""
    file = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while children := file.read_text().split():  # their children become children of this process
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def wait_for(port):
    """Wait until somebody listens."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"nobody listens on port {port}")


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()

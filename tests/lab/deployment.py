"""A SuperLink and its SuperNodes as real processes on this machine, for tests and benchmarks.

Every process is what a deployment over several machines runs too; ports are free ones, and all
files are below one directory.
"""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization as ssh
from cryptography.hazmat.primitives.asymmetric import ec

from aqg.errors import RunError

from tests.lab.meter import Meter, Traffic
from tests.lab.processes import LEASE, SWITCH, ProcessGroup

HOST = "127.0.0.1"
_CONNECTION = "here"
_LINK, _LINK_WORKER = "superlink", "superlink-worker"
_FINISHED = "finished"
_COMMAND_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 3.0  # every look is a command of Flower, half a second of CPU

ConfigValue = bool | int | float | str


def make_certificates(directory):
    """Return files: of an authority, of a server on this machine that it signed, and its key."""
    command = [sys.executable, "-m", "trustme", "--quiet", "--identities", HOST]
    subprocess.run([*command, "--dir", str(directory)], check=True)
    return [str(directory / name) for name in ("client.pem", "server.pem", "server.key")]


def make_node_key(path):
    """Write a node's private key to ``path`` and its public key to ``path.pub``; return the latter.

    The same files as ``ssh-keygen -t ecdsa -b 384 -N "" -f path``.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    form = ssh.Encoding.PEM, ssh.PrivateFormat.OpenSSH, ssh.NoEncryption()
    path.write_bytes(key.private_bytes(*form))
    path.chmod(0o600)
    public = path.with_name(f"{path.name}.pub")
    form = ssh.Encoding.OpenSSH, ssh.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(*form))
    return public


@dataclass
class _Node:
    """What stays of a node when its processes die."""

    port: int
    link_port: int
    config: dict[str, ConfigValue]
    key: Path | None = None


class Deployment(contextlib.AbstractContextManager):
    """Starts, watches, breaks and stops the processes; a context manager.

    Args:
        directory: where logs, keys, the nodes' state and Flower's own files go.
        num_nodes: how many SuperNodes.
        tls: encrypt, and let only nodes with a registered key in.
        worker: fork the processes of apps from a persistent worker (``--isolation process``).
        quick: shorten Flower's own waits, see `tests.lab.repairs`.
        lease_seconds: how long a silent node counts as online; None leaves Flower's 60 s.
        restart: start nodes again that end.
        preload: modules that apps import, imported once for all.

    """

    def __init__(
        self,
        directory,
        *,
        num_nodes=3,
        tls=False,
        worker=True,
        quick=True,
        lease_seconds=None,
        restart=False,
        preload=(),
    ):
        self.directory = directory.resolve()
        self._worker, self._restart = worker, restart
        self.logs = self.directory / "logs"
        self.home = self.directory / "flower"
        self.home.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._certificates = make_certificates(self.directory) if tls else []
        self._roots = ["--root-certificates", self._certificates[0]] if tls else []
        self._write_connection()
        self._numbers = itertools.count()
        self.meter = Meter(HOST, self.port)
        self._num_nodes = num_nodes
        self.nodes = [self._plan(node, node_name(node)) for node in range(num_nodes)]
        environment = {"FLWR_HOME": str(self.home), "NO_PROXY": HOST, SWITCH: str(int(quick))}
        if lease_seconds is not None:
            environment[LEASE] = str(lease_seconds)
        self.processes = ProcessGroup(self.logs, environment, preload)

    def __exit__(self, *_):
        self.processes.close()
        self.meter.close()

    def start(self):
        """Start the SuperLink, register keys, start all nodes, and wait until they are online."""
        self.start_link()
        for node in range(len(self.nodes)):
            if self._certificates:
                self.nodes[node].key = key = self.directory / f"node{node}.key"
                self.flower("supernode", "register", str(make_node_key(key)), _CONNECTION)
            self.launch_node(node)
        for node in range(len(self.nodes)):
            self.wait_for_node(node)

    # The SuperLink

    def start_link(self):
        """Start the SuperLink and wait until it answers."""
        arguments = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        arguments += ["--disable-runtime-dependency-installation"]
        for name, file in zip(("ca-cert", "cert", "key"), self._certificates, strict=False):
            arguments += [f"--ssl-{name}file", file]
        arguments += ["--enable-supernode-auth" if self._certificates else "--insecure"]
        self.processes.start(_LINK, self._isolated(arguments))
        self._wait_for(_LINK, self._is_listening)
        if self._worker:
            self._start_link_worker()

    def kill_link(self):
        """Kill the SuperLink, and the ServerApp with it."""
        if self._worker:
            self.processes.kill(_LINK_WORKER)
        self.processes.kill(_LINK)

    def kill_server(self):
        """Kill the ServerApp alone; the next run finds a new worker."""
        self.processes.kill(_LINK_WORKER)
        self._start_link_worker()

    # SuperNodes

    def state_directory(self, node):
        """Return where a node may keep what has to survive it."""
        return self.directory / "state" / str(node)

    def launch_node(self, node):
        """Start a node's processes; they may not be online yet on return."""
        plan, name = self.nodes[node], node_name(node)
        self.processes.log_of(name).unlink(missing_ok=True)
        arguments = self._node_arguments(plan, name)
        self.processes.start(name, arguments, restart=self._restart)
        if self._worker and not self.processes.is_running(f"{name}-worker"):
            self._start_worker(f"{name}-worker", plan.port, [], restart=self._restart)

    def try_key(self, key):
        """Start one more node with a key that nobody registered; return what it says as it ends."""
        plan = self._plan(len(self.nodes), "stranger")
        plan.key = key
        self.processes.start("stranger", self._node_arguments(plan, "stranger"))
        self.processes.wait("stranger", _COMMAND_SECONDS)
        return self.processes.read_log("stranger")

    def _node_arguments(self, plan, name):
        config = self.directory / f"{name}.toml"
        config.write_text(to_toml(plan.config))
        arguments = ["flower-supernode", "--superlink", f"{HOST}:{plan.link_port}"]
        arguments += ["--host", HOST, "--port", str(plan.port), "--node-config", str(config)]
        arguments += self._roots or ["--insecure"]
        if plan.key is not None:
            arguments += ["--auth-supernode-private-key", str(plan.key)]
        return self._isolated(arguments)

    def wait_for_node(self, node):
        """Wait until the SuperLink has let a node in."""
        name, read = node_name(node), self.processes.read_log
        self._wait_for(name, lambda: "SuperNode ID:" in read(name), may_end=self._restart)

    def kill_node(self, node):
        """Kill all processes of a node, as a power failure would."""
        for name in (f"{node_name(node)}-worker", node_name(node)):
            if self.processes.is_running(name):
                self.processes.kill(name)

    def traffic(self, node):
        """Return the bytes on the connections between a node and the SuperLink."""
        return self.meter.traffic(node_name(node))

    # Runs

    def run(self, app, run_config):
        """Submit an app and return the number of its run."""
        config = self.directory / "run-config.toml"
        config.write_text(to_toml(run_config))
        answer = self.flower("run", str(app), _CONNECTION, "--run-config", str(config))
        return int(answer["run-id"])

    def status(self, run):
        """Return a run's status as Flower names it: ``running``, ``finished:completed``, ..."""
        return str(self._describe(run)["status"])

    def counted(self, run):
        """Return the bytes of a run's messages as Flower itself counts them, of all nodes."""
        found = self._describe(run)["network-traffic"]
        return Traffic(found["inbound-bytes"], found["outbound-bytes"])

    def stop_run(self, run):
        """Stop a run, also one whose ServerApp has died: until then nodes may wait for its data."""
        self.flower("stop", str(run), _CONNECTION)

    def wait_for_run(self, run, seconds):
        end = time.monotonic() + seconds
        while not (status := self.status(run)).startswith(_FINISHED):
            if time.monotonic() > end:
                raise RunError(f"run {run} is {status!r} after {seconds:g} s; see {self.logs}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return status

    def flower(self, *arguments):
        """Run ``flwr ...`` and return the JSON that it prints."""
        name = f"flwr-{next(self._numbers)}"
        self.processes.start(name, ["flwr", *arguments, "--format", "json"])
        code = self.processes.wait(name, _COMMAND_SECONDS)
        text = self.processes.read_log(name)
        with contextlib.suppress(ValueError):
            answer = json.loads(text[text.index("{") :])
            if answer.get("success"):
                self.processes.log_of(name).unlink()
                return answer
        log = self.processes.log_of(name)
        raise RunError(f"`flwr {' '.join(arguments[:2])}` failed with code {code}; see {log}")

    # Parts

    def _describe(self, run):
        return self.flower("list", _CONNECTION, "--run-id", str(run))["runs"][0]

    def _plan(self, node, name):
        config = {"partition-id": node, "num-partitions": self._num_nodes}
        config["aqg-state-dir"] = str(self.state_directory(node))
        return _Node(free_port(), self.meter.listen(name), config)

    def _isolated(self, arguments):
        return [*arguments, "--isolation", "process" if self._worker else "subprocess"]

    def _start_link_worker(self):
        self._start_worker(_LINK_WORKER, self.port, self._roots)

    def _start_worker(self, name, port, roots, restart=False):
        arguments = ["lab-worker", "--runtime-api-address", f"{HOST}:{port}", *roots]
        self.processes.start(name, arguments, restart=restart)

    def _is_listening(self):
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
            return True
        return False

    def _wait_for(self, name, is_ready, may_end=False):
        """Wait until a process is ready; raise where it has ended and is not started again."""

        def has_failed():
            return not may_end and not self.processes.is_running(name)

        self.processes.wait_for(lambda: is_ready() or has_failed(), _COMMAND_SECONDS, name)
        if has_failed():
            raise RunError(f"{name} has ended; see {self.processes.log_of(name)}")

    def _write_connection(self):
        security = "insecure = true"
        if self._certificates:
            security = to_toml({"root-certificates": self._certificates[0]})
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n'
            f'[superlink.{_CONNECTION}]\naddress = "{HOST}:{self.port}"\n{security}\n'
        )


def node_name(node):
    return f"node{node}"


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def to_toml(settings):
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())

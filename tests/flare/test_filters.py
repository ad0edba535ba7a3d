"""FLARE's filters with FLARE's own contexts and messages; its simulator is in `test_packaging`."""

import copy
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed: pip install 'aqg[flare]'")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable, make_copy, make_reply
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from aqg.errors import AqgError, ConfigError, MessageError
from aqg.flare import ClientFilter, ServerFilter, compress

common_decomposers.register()
RNG = np.random.default_rng(0)
TARGETS = RNG.standard_normal((3, 40, 50)).astype(np.float32)
FIRST = {
    "w": np.zeros((40, 50), np.float32),
    "frozen": np.arange(3000, dtype=np.float32),
    "bn.running_mean": np.zeros(3, np.float32),
    "bn.num_batches_tracked": np.zeros((), np.int64),
}


class Site:
    """A site of a job, with both halves of its filter as FLARE makes them: apart."""

    def __init__(self, name, make, folder=None):
        self.name, self.make, self.folder = name, make, folder
        self.start()

    def start(self):
        workspace = SimpleNamespace(get_run_dir=lambda job_id: str(self.folder))
        engine = SimpleNamespace(
            get_workspace=lambda: workspace, fire_event=lambda kind, context: None
        )
        self.manager = FLContextManager(engine, self.name, "job", {}, {})
        self.data, self.result = self.make(), self.make()
        self.data.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
        self.result.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_RESULT_CHAIN)
        for half in (self.data, self.result):
            half.handle_event(EventType.START_RUN, self.manager.new_context())

    def context(self, peer):
        context, other = (
            self.manager.new_context(),
            FLContextManager(None, peer.name, "job", {}, {}),
        )
        other = other.new_context()
        other.set_public_props(peer.manager.new_context().get_all_public_props())
        context.set_peer_context(other)
        return context


class Job:
    """A server and clients, and what passes between them, serialized as FLARE does."""

    def __init__(self, folder, num_clients=3, **settings):
        self.server = Site("server", lambda: ServerFilter(**settings))
        self.clients = [
            Site(f"site-{number + 1}", ClientFilter, folder / str(number))
            for number in range(num_clients)
        ]
        self.up, self.down = [], []

    def deliver(self, shared, client):
        sent = self.server.data.process(make_copy(shared), self.server.context(client))
        self.down.append(num_bytes(sent))
        return client.data.process(copy.deepcopy(sent), client.context(self.server))

    def answer(self, reply, client):
        sent = client.result.process(reply, client.context(self.server))
        self.up.append(num_bytes(sent))
        return self.server.result.process(copy.deepcopy(sent), self.server.context(client))

    def play(self, rounds, model=FIRST, kind=DataKind.WEIGHTS):
        """Train on all clients and take the mean, as FLARE's FedAvg does."""
        for number in range(rounds):
            shared = DXO(DataKind.WEIGHTS, model, {"current_round": number}).to_shareable()
            before = copy.deepcopy(from_shareable(shared).data)
            results = []
            for place, client in enumerate(self.clients):
                held = from_shareable(self.deliver(shared, client))
                assert held.data_kind == DataKind.WEIGHTS
                assert held.meta["current_round"] == number
                reply = trained(held.data, TARGETS[place], kind)
                results.append(from_shareable(self.answer(reply, client)))
                assert results[-1].data_kind == kind
                assert results[-1].meta["steps"] == 7
            assert_same(from_shareable(shared).data, before)
            change = {n: np.mean([r.data[n] for r in results], axis=0) for n in model}
            model = change if kind == DataKind.WEIGHTS else {n: model[n] + change[n] for n in model}
        return model


def trained(values, target, kind=DataKind.WEIGHTS):
    """Go half of the way to a client's target; write to what was received, as trainers may."""
    before = {name: np.array(value) for name, value in values.items()}
    values["w"] += 0.5 * (target - values["w"])
    values["bn.running_mean"] += 0.5
    values["bn.num_batches_tracked"] += 1
    if kind == DataKind.WEIGHT_DIFF:
        values = {name: value - before[name] for name, value in values.items()}
    return DXO(kind, values, {"steps": 7}).to_shareable()


def num_bytes(shareable):
    return len(fobs.dumps(shareable))


def assert_same(one, other):
    assert list(one) == list(other)
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize(("recipe", "bound"), [("auto", 0.4), ("lean", 1e-3)])
def test_federated_averaging_arrives_with_few_bytes(tmp_path, recipe, bound, kind):
    job = Job(tmp_path, recipe=recipe)
    model = job.play(40, kind=kind)
    mean = TARGETS.mean(axis=0)
    assert np.linalg.norm(model["w"] - mean) < bound * np.linalg.norm(mean)
    assert_same({"frozen": model["frozen"]}, {"frozen": FIRST["frozen"]})
    whole = sum(tensor.nbytes for tensor in FIRST.values())
    assert min(job.down[:3]) > whole  # each client receives it once
    assert max(job.down[3:]) < whole / 3
    assert max(job.up) < whole / 3
    assert np.mean(job.up) < whole / 8


def test_a_new_process_of_a_client_goes_on(tmp_path):
    job = Job(tmp_path)
    model = job.play(3)
    size = max(job.down[-3:])
    for client in job.clients:
        client.start()
    model = job.play(1, model)
    assert max(job.down[-3:]) < 2 * size
    for found in tmp_path.rglob("held"):
        found.unlink()
    job.clients[0].start()
    job.play(1, model)
    assert job.down[-3] > 3000 * 4 > job.down[-2]


def test_a_client_that_lost_its_copy_is_sent_the_whole_model(tmp_path):
    job = Job(tmp_path, num_clients=1)
    model = job.play(2)
    for index in tmp_path.rglob("state.json"):
        index.unlink()
    why = "terms of the run are not known here; the next task brings"
    with pytest.raises(MessageError, match=why):
        job.play(1, model)
    job.play(1, model)
    assert job.down[-1] > 3000 * 4


def test_a_new_run_of_the_server_begins_anew(tmp_path):
    job = Job(tmp_path, num_clients=1)
    model = job.play(3)
    job.server.start()
    job.play(2, model)
    assert job.down[-2] > 3000 * 4 > job.down[-1]
    [folder] = {found.name[:17] for found in (tmp_path / "0" / "aqg").iterdir() if found.is_dir()}
    assert (tmp_path / "0" / "aqg" / "held").read_text() == f"{folder} 2"


def test_a_reply_that_is_refused_changes_nothing(tmp_path):
    job = Job(tmp_path, num_clients=1)
    model = job.play(2)
    [client] = job.clients
    shared = DXO(DataKind.WEIGHTS, model).to_shareable()
    held = from_shareable(job.deliver(shared, client)).data
    held["w"] = np.full_like(held["w"], np.nan)
    reply = DXO(DataKind.WEIGHTS, held).to_shareable()
    with pytest.raises(MessageError, match=r"site-1: .* tensor 'w' holds NaN"):
        job.answer(reply, client)
    sent = job.server.data.process(make_copy(shared), job.server.context(client))
    client.data.process(sent, client.context(job.server))
    for part in (b"", b"\0" * 40, None):
        forged = DXO(DataKind.APP_DEFINED, {"aqg": part, "kind": "WEIGHTS"}).to_shareable()
        with pytest.raises(AqgError, match="site-1"):
            job.server.result.process(forged, job.server.context(client))
        job.deliver(shared, client)
    job.play(1, model)


def test_what_is_no_model_passes_through(tmp_path):
    job = Job(tmp_path, num_clients=1)
    [client] = job.clients
    metrics = DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable()
    trees = DXO(DataKind.WEIGHTS, {"trees": b"json"}).to_shareable()
    counts = DXO(DataKind.WEIGHTS, {"n": np.arange(3)}).to_shareable()
    for data in (Shareable({"own": 1}), metrics, trees, counts):
        whole = fobs.dumps(data)
        assert fobs.dumps(job.deliver(data, client)) == whole
        assert fobs.dumps(job.answer(copy.deepcopy(data), client)) == whole
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert job.answer(failed, client).get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_results_of_other_tensors_are_sent_as_they_are(tmp_path):
    job = Job(tmp_path, num_clients=1)
    [client] = job.clients
    shared = DXO(DataKind.WEIGHTS, FIRST).to_shareable()
    job.deliver(shared, client)
    part = {"w": TARGETS[0]}
    result = from_shareable(job.answer(DXO(DataKind.WEIGHTS, part).to_shareable(), client))
    assert_same(result.data, part)
    model = {**FIRST, "more": np.ones(5, np.float32)}  # another model is sent as a whole, once
    job.down.clear()
    job.play(3, model)
    assert job.down[0] > 3000 * 4 > max(job.down[1:])


def test_arrays_that_a_controller_writes_to_are_noticed(tmp_path):
    job = Job(tmp_path, num_clients=1)
    [client] = job.clients
    model = {name: np.array(value) for name, value in FIRST.items()}
    shared = DXO(DataKind.WEIGHTS, model).to_shareable()
    for _ in range(12):
        held = from_shareable(job.deliver(shared, client)).data
        shown = from_shareable(job.answer(trained(held, TARGETS[0]), client)).data
        model["w"][:] = shown["w"]
    assert np.linalg.norm(model["w"] - TARGETS[0]) < 0.2 * np.linalg.norm(TARGETS[0])


def test_tensors_of_torch_stay_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    job = Job(tmp_path, num_clients=1)
    [client] = job.clients
    model = {
        "w": torch.zeros(40, 50),
        "half": torch.zeros(500, dtype=torch.bfloat16),
        "n": torch.tensor(0),
    }
    for _ in range(12):
        shared = DXO(DataKind.WEIGHTS, model).to_shareable()
        held = from_shareable(job.deliver(shared, client)).data
        assert {n: (t.dtype, t.shape) for n, t in held.items()} == {
            n: (t.dtype, t.shape) for n, t in model.items()
        }
        held["w"] += 0.5 * (torch.from_numpy(TARGETS[0]) - held["w"])
        held["half"] += 0.5 * (1 - held["half"])
        reply = DXO(DataKind.WEIGHTS, held).to_shareable()
        model = from_shareable(job.answer(reply, client)).data
    assert model["half"].dtype == torch.bfloat16
    assert (model["half"].float() - 1).abs().mean() < 0.1
    assert np.linalg.norm(model["w"].numpy() - TARGETS[0]) < 0.2 * np.linalg.norm(TARGETS[0])


def test_the_line_adds_filters_to_a_job_and_to_a_recipe(tmp_path):
    from nvflare.job_config.api import FedJob
    from nvflare.recipe.spec import Recipe

    for number, make in enumerate((lambda job: job, Recipe)):
        job = FedJob("digits")
        compress(make(job), tasks=["train", "finetune"], recipe="lean", exclude="head.*")
        job.export_job(str(tmp_path / str(number)))
        folder = tmp_path / str(number) / "digits"
        for role, name in (("server", "ServerFilter"), ("client", "ClientFilter")):
            [config] = folder.rglob(f"config_fed_{role}.json")
            rows = json.loads(config.read_text())
            for chain in ("task_data_filters", "task_result_filters"):
                [row] = rows[chain]
                assert sorted(row["tasks"]) == ["finetune", "train"]
                assert [made["path"] for made in row["filters"]] == [f"aqg.flare.{name}"]
            if role == "server":
                assert rows["task_data_filters"][0]["filters"][0]["args"]["exclude"] == ["head.*"]
        assert not list(folder.rglob("aqg"))  # sites have it installed


def test_the_log_says_once_what_models_took_and_would_have_taken(tmp_path, caplog):
    job = Job(tmp_path)
    job.play(3)
    with caplog.at_level("INFO"):
        for half in (job.server.data, job.server.result):
            half.handle_event(EventType.END_RUN, job.server.manager.new_context())
    number = r"([\d,]+)"
    said = rf"aqg: models took {number} bytes up \(of {number}\), {number} down \(of {number}\)"
    [found] = re.findall(said, caplog.text)
    up, plain_up, down, plain_down = (int(text.replace(",", "")) for text in found)
    whole = sum(tensor.nbytes for tensor in FIRST.values())
    assert plain_up == plain_down == 9 * whole
    assert 0 < up < plain_up / 5
    assert 3 * whole < down < plain_down / 2  # each client receives the whole model once


def test_bad_settings_are_named_where_the_job_is_written():
    with pytest.raises(ConfigError, match="unknown recipe 'fast'"):
        ServerFilter(recipe="fast")
    with pytest.raises(ConfigError, match="job is a dict; it must be a Recipe or a FedJob"):
        compress({})

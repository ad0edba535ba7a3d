"""What the server does: average the clients' models, and test the result."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from aqg.flower import Compressed
from digits.task import Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run federated averaging."""
    num_clients = int(context.run_config["num-clients"])
    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=num_clients, min_available_nodes=num_clients
    )
    strategy = Compressed(strategy)
    torch.manual_seed(0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the model of a round."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    accuracy = test(net, load_test_data())
    print(f"round {server_round}: accuracy {accuracy:.4f}", flush=True)
    return MetricRecord({"accuracy": accuracy})

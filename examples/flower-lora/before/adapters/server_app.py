"""What the server does: average the clients' adapters, and test the result."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from adapters.task import adapters_of, load_test_data, make_model, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run federated averaging."""
    num_clients = int(context.run_config["num-clients"])
    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=num_clients, min_available_nodes=num_clients
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(adapters_of(make_model())),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the adapters of a round."""
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
    accuracy = test(model, load_test_data())
    print(f"round {server_round}: accuracy {accuracy:.4f}", flush=True)
    return MetricRecord({"accuracy": accuracy})

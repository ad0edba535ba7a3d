"""A site's training script, with FLARE's Client API; it knows nothing of compression."""

import argparse

import nvflare.client as flare
import torch
from net import Net, load_data, test, train


def main() -> None:
    """Train every model that comes, and return it with the accuracy that it came with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=3)
    num_sites = parser.parse_args().sites
    torch.set_num_threads(1)
    flare.init()
    site = int(flare.get_site_name().rpartition("-")[2]) - 1
    train_loader, test_loader = load_data(site, num_sites)
    net = Net()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        net.load_state_dict({name: torch.as_tensor(t) for name, t in received.params.items()})
        accuracy = test(net, test_loader)
        print(f"round {received.current_round}: accuracy {accuracy:.4f}")
        train(net, train_loader)
        flare.send(
            flare.FLModel(
                params=net.state_dict(),
                metrics={"accuracy": accuracy},
                meta={"NUM_STEPS_CURRENT_ROUND": len(train_loader)},
            )
        )


if __name__ == "__main__":
    main()

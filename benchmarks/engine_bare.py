"""All losses and gradients of a workload by hand, and nothing else: the practical limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from engine_workloads import L2

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_workloads import Data, Workload

    from aqg.sim.problem import Problem


def bare_gradient(workload: Workload, problem: Problem, data: Data, device: str) -> Callable:
    """Return a function that computes all losses and gradients, by hand, in torch."""
    features = torch.as_tensor(data.features, device=device)
    labels = torch.as_tensor(data.labels, device=device)
    params = torch.as_tensor(problem.initial_params, device=device)
    num_clients, num_samples, num_features = features.shape
    gradients = torch.empty((num_clients, len(params)), dtype=params.dtype, device=device)
    flat = features.view(-1, num_features)  # the forward pass is one product for all clients
    rows = torch.arange(num_samples, device=device)
    inner = torch.arange(num_clients, device=device)[:, None]

    def logistic() -> None:
        signs = labels * 2 - 1
        margins = (flat @ params).view_as(labels) * signs
        torch.nn.functional.softplus(-margins).mean(dim=1)
        slopes = -signs * torch.sigmoid(-margins) / num_samples
        torch.bmm(features.transpose(1, 2), slopes[..., None], out=gradients[..., None])
        gradients.add_(params, alpha=L2)

    def layer_gradients(inputs: torch.Tensor, slopes: torch.Tensor, start: int) -> int:
        stop = start + inputs.shape[-1] * slopes.shape[-1]
        weights = gradients[:, start:stop].view(num_clients, inputs.shape[-1], -1)
        if slopes.shape[-1] <= 32:  # few outputs: faster as the rows of the product
            weights.copy_(_products(slopes.transpose(1, 2), inputs).transpose(1, 2))
        else:
            weights.copy_(_products(inputs.transpose(1, 2), slopes))
        gradients[:, stop : stop + slopes.shape[-1]] = slopes.sum(dim=1)
        return stop + slopes.shape[-1]

    def class_slopes(logits: torch.Tensor) -> torch.Tensor:
        log_probability = torch.log_softmax(logits.view(num_clients, num_samples, -1), dim=-1)
        -log_probability[inner, rows, labels].mean(dim=1)
        slopes = log_probability.exp_()
        slopes[inner, rows, labels] -= 1
        return slopes.div_(num_samples)

    def softmax() -> None:
        slopes = class_slopes(torch.addmm(params[-10:], flat, params[:-10].view(-1, 10)))
        layer_gradients(features, slopes, 0)
        gradients.add_(params, alpha=L2)

    def network() -> None:
        num_hidden = int(workload.model.partition(":")[2])
        split = num_features * num_hidden
        weight1, bias1 = params[:split].view(num_features, -1), params[split : split + num_hidden]
        weight2, bias2 = params[split + num_hidden : -10].view(num_hidden, 10), params[-10:]
        hidden = torch.addmm(bias1, flat, weight1).relu_()
        slopes = class_slopes(torch.addmm(bias2, hidden, weight2))
        hidden_slopes = (slopes.view(-1, 10) @ weight2.T).mul_(hidden > 0)
        start = layer_gradients(features, hidden_slopes.view(num_clients, num_samples, -1), 0)
        layer_gradients(hidden.view(num_clients, num_samples, -1), slopes, start)
        gradients.add_(params, alpha=L2)

    chosen = {"logistic": logistic, "softmax": softmax}.get(workload.model, network)

    def compute() -> torch.Tensor:
        chosen()
        return gradients

    _check_gradient(problem, data, compute())
    return compute


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right`` for each client, the way that is faster for its size and device."""
    if left.device.type == "cpu" and left.shape[-1] >= 1000:
        return torch.stack([torch.mm(a, b) for a, b in zip(left, right, strict=True)])
    return torch.bmm(left, right)


def _check_gradient(problem: Problem, data: Data, gradients: torch.Tensor) -> None:
    """Make sure that bare and engine compute the same."""
    _, expected = problem.objective.losses_and_gradients(
        problem.initial_params, data.features[0], data.labels[0]
    )
    difference = np.abs(gradients[0].cpu().numpy() - expected).max()
    if difference > 1e-4 * np.abs(expected).max():
        raise SystemExit(f"the bare gradient is off by {difference}")


def numpy_gradient(problem: Problem, data: Data) -> Callable:
    """Return stacked logistic gradients in NumPy, by hand: the bare loop of W3."""
    features, params = data.features, problem.initial_params
    signs = np.where(data.labels > 0, 1.0, -1.0).astype(features.dtype)
    num_samples = features.shape[1]
    transposed = features.swapaxes(1, 2)

    def compute() -> np.ndarray:
        margins = (features @ params) * signs
        decay = np.exp(-np.abs(margins))
        (np.log1p(decay) + np.maximum(-margins, 0)).mean(axis=1)
        slopes = -signs * np.where(margins < 0, 1.0, decay) / (1 + decay) / num_samples
        return (transposed @ slopes[..., None])[..., 0] + L2 * params

    return compute

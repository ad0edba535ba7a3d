"""A network with one hidden layer of rectified linear units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.objectives.closed_form import ClosedForm, namespace, transpose
from aqg.objectives.softmax import class_logits, cross_entropy, write_layer_gradients

if TYPE_CHECKING:
    from aqg.objectives.base import Array, Scaling


class Perceptron(ClosedForm):
    """The cross-entropy of the logits ``max(x W₁ + b₁, 0) W₂ + b₂``.

    >>> Perceptron(num_features=784, num_hidden=200, num_classes=10, l2=0.01, scaling="mean")
    <Perceptron 'mlp:200', 159010 parameters, l2=0.01>
    """

    def __init__(
        self, num_features: int, num_hidden: int, num_classes: int, l2: float, scaling: Scaling
    ) -> None:
        layout = (
            ("weight1", (num_features, num_hidden)),
            ("bias1", (num_hidden,)),
            ("weight2", (num_hidden, num_classes)),
            ("bias2", (num_classes,)),
        )
        super().__init__(f"mlp:{num_hidden}", layout, num_features, l2, scaling, convex=False)

    def _sample_losses(self, tensors: list[Array], features: Array, labels: Array) -> Array:
        weight1, bias1, weight2, bias2 = tensors
        hidden = _hidden_layer(features, weight1, bias1)
        losses, _ = cross_entropy(class_logits(hidden, weight2, bias2), labels)
        return losses

    def _backpropagate(
        self,
        tensors: list[Array],
        features: Array,
        labels: Array,
        *,
        weight: Array,
        gradients: list[Array],
    ) -> Array:
        weight1, bias1, weight2, bias2 = tensors
        hidden = _hidden_layer(features, weight1, bias1)
        losses, class_slopes = cross_entropy(class_logits(hidden, weight2, bias2), labels)
        class_slopes *= weight
        slopes = transpose(class_slopes)
        write_layer_gradients(hidden, slopes, *gradients[2:])
        hidden_slopes = slopes @ transpose(weight2)
        hidden_slopes *= hidden > 0
        write_layer_gradients(features, hidden_slopes, *gradients[:2])
        return losses

    def _predict(self, tensors: list[Array], features: Array) -> Array:
        weight1, bias1, weight2, bias2 = tensors
        hidden = _hidden_layer(features, weight1, bias1)
        return class_logits(hidden, weight2, bias2).argmax(axis=-2)


def _hidden_layer(features: Array, weight: Array, bias: Array) -> Array:
    hidden = features @ weight
    hidden += bias[..., None, :]
    return namespace(hidden).clip(hidden, 0, None, out=hidden)

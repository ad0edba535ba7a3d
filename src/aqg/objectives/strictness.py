"""Which layers are at odds with exact gradients, with starting anew, and with frozen statistics."""

from __future__ import annotations

from torch import nn

from aqg.errors import ConfigError

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def require_repeatable(module: nn.Module) -> None:
    """Refuse layers whose gradients are random or depend on what was computed before.

    Where clients send exact gradients, on all their samples, such a layer would fill their memory
    with noise. Where they train on minibatches, noise is the normal case.
    """
    for path, layer in module.named_modules():
        if not layer.training:
            continue
        what = type(layer).__name__ if "\n" in repr(layer) else repr(layer)
        where = f"layer {path!r}, {what}," if path else what
        rate = layer.p if isinstance(layer, _DROPOUTS) else getattr(layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ConfigError(
                f"{where} drops out at random; gradients on all samples must be repeatable: train "
                "on minibatches (batch_size), call eval() on it, or set its rate to 0"
            )
        if getattr(layer, "track_running_stats", False):
            raise ConfigError(
                f"{where} updates running statistics, which no gradient on all samples carries: "
                "train on minibatches (batch_size), use GroupNorm, set track_running_stats=False, "
                "or call eval() on it to keep them fixed"
            )


def freeze_statistics(module: nn.Module) -> None:
    """Let normalization layers use the statistics they have, and leave them alone."""
    for layer in module.modules():
        if getattr(layer, "track_running_stats", False):
            layer.eval()


def check_reset(module: nn.Module) -> None:
    """Refuse layers that cannot draw their parameters again."""
    for path, layer in module.named_modules():
        owns = any(value.requires_grad for value in layer.parameters(recurse=False))
        if owns and not callable(getattr(layer, "reset_parameters", None)):
            raise ConfigError(
                f"reset needs reset_parameters() on every layer with parameters; "
                f"{path or 'the module itself'} ({type(layer).__name__}) has none"
            )

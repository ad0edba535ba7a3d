"""The exception tree.

AqgError
├── ConfigError      a setting is unknown, malformed or out of its bounds
├── DataError        a dataset is missing, damaged or cannot be split as asked
├── GradientError    a gradient holds NaN, infinity, or values too large to quantize
├── MessageError     an upload's parts contradict each other or the receiver
├── WireError        bytes that are no valid frame
└── RunError         a run directory cannot be written, read or resumed

Every message names the value received and the bound or the choices that hold.
"""


class AqgError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(AqgError):
    """A setting is unknown, malformed or out of its bounds."""


class DataError(AqgError):
    """A dataset is missing, damaged or cannot be split as asked."""


class GradientError(AqgError):
    """A gradient holds NaN, infinity, or values too large to quantize."""


class MessageError(AqgError):
    """An upload's parts contradict each other or the receiver."""


class WireError(AqgError):
    """Bytes that are no valid frame."""


class RunError(AqgError):
    """A run directory cannot be written, read or resumed."""


def require(is_fine: bool, name: str, value: object, bound: str) -> None:
    """Raise `ConfigError` unless a setting is within its bound."""
    if not is_fine:
        raise ConfigError(f"{name} is {value}; it must be {bound}")

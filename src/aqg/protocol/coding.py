"""What moved to `aqg.protocol.messages`, for those who import it from here."""

from aqg.protocol.messages import *  # noqa: F403

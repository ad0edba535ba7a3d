"""What moved to `aqg.protocol.log`, for those who import it from here."""

from aqg.protocol.log import *  # noqa: F403

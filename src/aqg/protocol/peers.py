"""What moved to `aqg.protocol.mirrors`, for those who import it from here."""

from aqg.protocol.mirrors import *  # noqa: F403

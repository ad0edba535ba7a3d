"""What moved to `aqg.protocol.store`, for those who import it from here."""

from aqg.protocol.store import *  # noqa: F403

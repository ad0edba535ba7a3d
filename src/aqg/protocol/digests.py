"""What moved to `aqg.protocol.follower`, for those who import it from here."""

from aqg.protocol.follower import *  # noqa: F403

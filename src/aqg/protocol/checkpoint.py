"""What moved to `aqg.protocol.book`, for those who import it from here."""

from aqg.protocol.book import *  # noqa: F403

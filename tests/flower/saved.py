"""What a run of our own server has on disk, at the server and at its clients."""

import numpy as np

from aqg.channel.client import CopyStore
from aqg.core.downlink import resolve_downlink
from aqg.core.server import Step
from aqg.protocol.server import MirrorBook
from aqg.protocol.store import ClientStore, DirectoryVault, read_arrays


class Saved:
    def __init__(self, directory, recipe, downlink="auto"):
        arrays = read_arrays(directory / "checkpoint.npz")
        how = Step(0.0, downlink=resolve_downlink(downlink, recipe))
        self.book = MirrorBook.from_arrays(arrays, recipe, how, None)
        self.digest = arrays["copy_digest"].tobytes()
        self._run = f"{arrays['run']}0"

    def mirrors(self, place):
        """Return the mirrors that a client has in a directory."""
        (path,) = place.glob(f"{self._run}-*")
        return ClientStore(DirectoryVault(path), path.name).load()

    def model(self, place):
        """Return the model that a client has in a directory."""
        held = CopyStore(DirectoryVault(place / self._run), self._run).load()
        return None if held is None else held[0]

    def has_mirror(self, client, snapshot):
        """Whether a mirror is the server's of a client, bit for bit."""
        if snapshot is None or snapshot.stamp != self.book.entries[client].stamp:
            return False
        position = snapshot.state.track.position[0]
        return np.array_equal(position, self.book.state.mirror(client))

    def agrees(self, client, place):
        """Whether a client's mirror and model are the server's."""
        mirrors, model = self.mirrors(place), self.model(place)
        assert mirrors is not None
        assert model is not None
        is_model = np.array_equal(model.vector, self.book.parameters)
        return is_model and model.digest == self.digest and self.has_mirror(client, mirrors.current)

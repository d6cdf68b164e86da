"""What methods share whose clients train once and send their result once."""

from typing import Annotated, Literal, NamedTuple

from torch import Tensor

from ekiden.authoring import Method, OwnSamples, Weights

Init = Literal["same", "different"]


class Trained(NamedTuple):
    """What a client sends."""

    model: Weights  # its trained model
    # int64, what the server needs to know: nothing (0,), n_i (1,), or n_ic of each class (K,)
    counts: Annotated[Tensor, OwnSamples]


class OneShot(Method):
    """A method of one step: train at all clients, then one computation at the server."""

    def steps(self, clients: int) -> int:
        """Return 1."""
        return 1

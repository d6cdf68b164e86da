"""A method that does not train, as a stranger might write it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.core.base.checks import Positive
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import INITIAL, Method, Size, State, Traits, on_client
from ekiden.core.training.weights import Weights


class Products(NamedTuple):
    """Sums over a client's samples: of z zᵀ (A + 1, A + 1) and of z yᵀ (A + 1, K)."""

    squares: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Ridge(Method):
    """A linear classifier on the features of the initial model, in closed form and without a
    gradient.

    Arthur E. Hoerl, Robert W. Kennard: Ridge Regression. Technometrics 1970.
    https://www.tandfonline.com/toc/utch20/12/1

    Departures from the paper: labels are one-hot vectors; the products are summed over the clients.
    """

    traits = Traits(weighs=False)

    ridge: Positive = 1.0
    """k, added to the diagonal"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield one state: collect the sums, solve."""
        if s.step == 0:
            sums = fed.get([fed.call(self.products, k, INITIAL) for k in fed.clients])
            squares = torch.stack([p.squares for p in sums]).sum(0)
            labels = torch.stack([p.labels for p in sums]).sum(0)
            head = torch.linalg.solve(squares + self.ridge * torch.eye(len(squares)), labels)
            model: Weights = fed.get(INITIAL)
            params = model.params.clone()
            fed.layout.head.put(params, head.T)
            s = s.next(model=model.with_params(params))
            yield s

    @on_client
    def products(self, client: Client, model: Weights) -> Products:
        """Pass all samples through the extractor, by hand."""
        network = client.network(model)
        squares, labels = torch.tensor(0.0), torch.tensor(0.0)
        with torch.no_grad():
            for x, y in client.batches(passes=0):
                z = F.pad(network.features(x), (0, 1), value=1.0)  # type: ignore[operator]
                squares = squares + z.T @ z
                labels = labels + z.T @ F.one_hot(y, client.classes).float()
                client.work.forward += len(x)
        return Products(squares, labels)

    def steps(self, clients: int) -> int:
        """Return 1."""
        return 1

    def cost(self, clients: int, model: Size) -> int:
        """N·4·(A + 1)(A + 1 + K)."""
        rows, classes = model.layout.head.inputs, model.layout.classes
        return clients * 4 * rows * (rows + classes)

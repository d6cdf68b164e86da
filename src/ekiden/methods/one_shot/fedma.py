"""FedMA: federated matched averaging."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    Client,
    Count,
    CountOrZero,
    Fed,
    OwnSamples,
    Positive,
    Size,
    State,
    Traits,
    Weights,
    on_client,
    require,
)
from ekiden.core.training.network import Elastic, Form, Network, adapted, assemble, matrices
from ekiden.methods.blocks.combining import Init
from ekiden.methods.one_shot.blocks.matching import Matching, MatchingMethod, class_shares, match


class FirstLayer(NamedTuple):
    """What a client sends at the beginning of a round."""

    layer: Tensor  # (units, inputs) its first layer, biases last
    counts: Annotated[Tensor, OwnSamples]  # (K,) int32, its class counts


class KeptLayers(NamedTuple):
    """What a client keeps."""

    layers: list[Tensor]  # the layers of its model; matched layers are the global ones
    units: list[Tensor]  # for each of these layers, the global unit of each of its own units


@dataclass(frozen=True)
class Matched(State):
    """The state of the server."""

    widths: tuple[tuple[int, ...], ...] = ()  # widths of the global hidden layers, in every round


@dataclass(frozen=True)
class FedMA(MatchingMethod):
    """Hidden units are matched and averaged layer by layer, and clients retrain the layers after
    them.

    Hongyi Wang, Mikhail Yurochkin, Yuekai Sun, Dimitris Papailiopoulos, Yasaman Khazaeni: Federated
    Learning with Matched Averaging. ICLR 2020. https://arxiv.org/abs/2002.06440 (Algorithm 1).

    A unit consists of its incoming weights and its bias. Units are matched as in PFNM, and the
    inputs of the next layer are reordered accordingly. Matched layers are frozen. The classifier is
    averaged: each class by the clients' numbers of samples of it. One round is a step with as many
    communications as there are layers. The next round starts from those units of the global model
    that were the client's own.

    Departures from the paper: written after the released code. `retrain_epochs = 0` is its one-shot
    matching: one communication, no retraining. γ = 7 is the code's value for it; with several
    rounds the code has 5. BatchNorm is folded into the layer before it after the first training,
    and the result has none. Recurrent layers are not supported. A class that no client has is
    averaged uniformly. Local training ends with the epoch that --select names, by default the best
    on validation data.
    """

    rounds: Count = 1
    """rounds of training, matching and retraining"""
    epochs: Count = 20
    """E, epochs at each client before the matching"""
    retrain_epochs: CountOrZero = 20
    """epochs at each client after the matching of a layer; 0: one-shot, without retraining"""
    gamma: Positive = 7.0
    """γ, mass of the process: with a larger value more units remain separate"""
    sigma: Positive = 1.0
    """σ², variance of a client's units around the global ones"""
    sigma0: Positive = 1.0
    """σ0², variance of the global units"""
    sweeps: CountOrZero = 5
    """it, how often every client's units are matched again"""
    bias: float = 0.1
    """prior mean of biases; the prior mean of weights is 0"""
    init: Init = "different"
    """initial models: the same for all clients, or a different one for each"""

    traits = Traits(private=KeptLayers, needs=CLASSES)

    def __post_init__(self) -> None:
        require(
            self.rounds == 1 or self.retrain_epochs > 0,
            "rounds",
            self.rounds,
            "1 without --retrain-epochs",
        )

    def run(self, fed: Fed, s: Matched) -> Iterator[State]:
        initial = fed.network(fed.get(INITIAL))
        while s.step < self.rounds:
            elastic = Elastic(initial).cpu()
            layers = self.matched(fed, elastic, s)
            widths = tuple(len(layer) for layer in layers[:-1])
            s = s.next(model=assemble(elastic, layers).weights(), widths=(*s.widths, widths))
            yield s

    def layer_wise(self, fed: Fed, elastic: Elastic, s: Matched) -> list[Tensor]:
        """The layers of the global model, each matched before the clients retrain the next ones."""
        forms = elastic.forms
        draw = fed.generator("order")
        layers = list[Tensor]()
        head = None
        # from the second round on, clients start from the classifier of the round before
        if isinstance(s.model, Weights):
            before = Network(adapted(elastic, s.model))
            before.load(s.model)
            head = matrices(before)[-1]
        sent = fed.get(fed.call_all(self.first_layer, INITIAL, head))
        rows = [t.layer for t in sent]
        for form in forms[:-1]:
            units, layer = self.match(rows, form, draw)
            layers.append(layer.float())
            places = zip(fed.clients, units, strict=True)
            rows = fed.get(
                [fed.call(self.next_layer, k, INITIAL, layers[-1], u.int()) for k, u in places]
            )
        return [*layers, class_mean(rows, torch.stack([t.counts for t in sent]))]

    def matched(self, fed: Fed, elastic: Elastic, s: Matched) -> list[Tensor]:
        """Match the layers of complete models; if clients retrain, each with them in between."""
        if self.retrain_epochs:
            return self.layer_wise(fed, elastic, s)
        sent = fed.get(fed.call_all(self.train, INITIAL))
        models = [matrices(Network(Elastic(fed.network(t.model)).cpu())) for t in sent]
        return self.merge(
            models, elastic.forms, torch.stack([t.counts for t in sent]), fed.generator("order")
        )

    def merge(
        self,
        models: Sequence[Sequence[Tensor]],
        forms: Sequence[Form],
        counts: Tensor,
        generator: Generator,
    ) -> list[Tensor]:
        """The layers of the global model, from those of each client (all as matrices) and class
        counts (N, K).
        """
        layers = list[Tensor]()
        rows = [m[0] for m in models]
        for i, form in enumerate(forms[1:]):
            units, layer = self.match(rows, forms[i], generator)
            layers.append(layer)
            rows = []
            for model, places in zip(models, units, strict=True):
                rows.append(form.spread(model[i + 1], places, len(layer)))
        return [*layers, class_mean(rows, counts)]

    def match(self, rows: Sequence[Tensor], form: Form, generator: Generator) -> Matching:
        """Match the units of one layer of all clients."""
        columns = rows[0].shape[1]
        prior = self.prior(columns - form.bias, int(form.bias))
        known = torch.full((columns,), 1 / self.sigma, dtype=torch.float64)
        return match(rows, [known] * len(rows), prior, self, generator)

    @on_client(gives="model")
    def first_layer(self, client: Client, initial: Weights, head: Tensor | None) -> FirstLayer:
        """Train all layers; from the second round on from the client's own units in the global
        model.
        """
        if head is None:
            trained = self.train(client, initial)
            layers = matrices(
                Network(Elastic(client.network(trained.model)), initial.params.device)
            )
        else:
            elastic = Elastic(client.network(initial))
            own = own_units(client.state, elastic.forms, head)
            layers = tune(client, elastic, own, 0, self.epochs)
        client.state = KeptLayers(layers, [])
        return FirstLayer(layers[0], client.class_counts().int())

    @on_client(gives="model")
    def next_layer(self, client: Client, initial: Weights, layer: Tensor, units: Tensor) -> Tensor:
        """Take the global layer instead of its own and retrain the later layers; the next one goes
        to the server.

        Args:
            client: whose state is `KeptLayers`.
            initial: says what the network is like.
            layer: (units, inputs) the first layer that is not yet global.
            units: for each of its own units there the global one.
        """
        kept: KeptLayers = client.state
        elastic = Elastic(client.network(initial))
        layers = list(kept.layers)
        now = len(kept.units)
        layers[now] = layer
        layers[now + 1] = elastic.forms[now + 1].spread(layers[now + 1], units, len(layer))
        layers = tune(client, elastic, layers, now + 1, self.retrain_epochs)
        client.state = KeptLayers(layers, [*kept.units, units])
        return layers[now + 1]

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return the network with the widths from the matching, without BatchNorm."""
        return Elastic(network)

    def steps(self, clients: int) -> int:
        return self.rounds

    def cost(self, clients: int, model: Size) -> int:
        """At most what moves if nothing is matched: hidden layers N times as wide."""
        widths = tuple(clients * n for n in Elastic(model.network.module).widths.tolist())
        return self._moved([widths] * self.rounds, clients, model)

    def moved(self, end: Matched, clients: int, model: Size) -> int:
        """N·(M + 4·K) in the one-shot form; else per round N times the layers, units and classes
        named in `_moved`.
        """
        return self._moved(end.widths, clients, model)

    def _moved(self, rounds: Sequence[Sequence[int]], clients: int, model: Size) -> int:
        """What moves in these rounds, given the global widths G of each.

        A client sends its layers, own units by global inputs, and class counts; it gets the global
        hidden layers, the global unit of each of its own, and from the second round on the
        classifier of the round before.
        """
        counts = 4 * model.layout.classes
        if not self.retrain_epochs:
            return clients * (model + counts)
        elastic = Elastic(model.network.module)
        own = [*elastic.widths.tolist(), model.layout.classes]
        total = 0
        head = 0
        for widths in rounds:
            wide = [4 * n for n in elastic.sizes(widths)]
            sent = sum(
                size // g * n for size, g, n in zip(wide, [*widths, own[-1]], own, strict=True)
            )
            total += head + sent + counts + sum(wide[:-1]) + 4 * sum(own[:-1])
            head = wide[-1]
        return clients * total


def class_mean(heads: Sequence[Tensor], counts: Tensor) -> Tensor:
    """(K, d) the average of classifiers, row k weighted by the clients' samples of class k (N, K);
    evenly without.
    """
    shares = class_shares(counts)
    shares[:, counts.sum(0) == 0] = 1 / len(heads)
    each = torch.stack([h.double() for h in heads])
    return (shares[:, :, None] * each).sum(0).float()


def own_units(kept: KeptLayers, forms: Sequence[Form], head: Tensor) -> list[Tensor]:
    """The layers of a client's own units, out of those of the global model with this classifier."""
    layers = [layer[units.long()] for layer, units in zip(kept.layers, kept.units, strict=False)]
    inputs = zip(forms[1:], [*layers[1:], head], kept.units, strict=True)
    return [layers[0], *(form.pick(layer, units) for form, layer, units in inputs)]


def tune(
    client: Client, elastic: Elastic, layers: Sequence[Tensor], frozen: int, epochs: int
) -> list[Tensor]:
    """`layers` after training `elastic` with them; the first `frozen` ones stay as they are."""
    assemble(elastic, layers)
    for part in elastic.layers[:frozen]:
        part.requires_grad_(False)
    network = Network(elastic, layers[0].device)
    network.load(client.fit(network.weights(), epochs=epochs, network=network))
    return [*layers[:frozen], *matrices(network)]

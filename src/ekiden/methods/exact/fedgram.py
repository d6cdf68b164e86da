"""FedGram: the exact classifier of fixed features, from sums that clients hand on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from ekiden.authoring import (
    INITIAL,
    BelowOne,
    Client,
    Fed,
    NonNegative,
    Range,
    Ref,
    Size,
    State,
    Task,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.training.gram import FULL, LEAST, AnySums, NoisySums, Rounding
from ekiden.core.training.private.promise import DP
from ekiden.core.training.private.sums import width_for
from ekiden.methods.blocks.sums import WithoutModel, forms
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.fixed_features import (
    OWN,
    FixedFeatures,
    Settled,
    features_of,
    size_of_sums,
    sums_of,
    with_rows,
)
from ekiden.methods.exact.blocks.whole_features import WholeFeatures


class Handoff(NamedTuple):
    """What a client hands to the next one."""

    settled: Settled  # what the first client decided about the features
    sums: AnySums  # over the samples of all clients so far


class Common(NamedTuple):
    """What a client needs for a personal head: the head of all, for standardised features;
    float32.
    """

    settled: Settled  # what the first client decided about the features
    mean: Tensor  # (D,) μ of the features of all clients
    scale: Tensor  # (D,) 1/σ, or 0
    weight: Tensor  # (K, D)
    bias: Tensor  # (K,)


@dataclass(frozen=True)
class Summing(WithoutModel):
    """The state with what has been added up."""

    totals: Ref[Handoff] | Handoff | None = None
    settled: Ref[Settled] | None = None


@dataclass(frozen=True)
class FedGram(FixedFeatures):
    """Clients sum second moments of fixed features; the last one solves a ridge regression for the
    classifier.

    Eros Fanì, Raffaello Camoriano, Barbara Caputo, Marco Ciccone: Accelerating Heterogeneous
    Federated Learning with Closed-form Classifiers. ICML 2024. https://arxiv.org/abs/2406.01116
    (Fed3R: A = Σ φφᵀ, B = Σ φyᵀ, W = (A + λI)⁻¹B). The same classifier by merging clients'
    solutions: Huiping Zhuang et al.: Analytic Federated Learning. CVPR 2025.
    https://arxiv.org/abs/2405.16240. Heads: cgs is that of FedCGS (Zhao Guan et al., AAAI 2025,
    https://arxiv.org/abs/2503.06962), lda that of GH-OFL (ICLR 2026,
    https://arxiv.org/abs/2602.01186), ncm that of FedNCM (Gwen Legate et al., 2023,
    https://arxiv.org/abs/2306.03937). Generalised cross-validation: Gene Golub, Michael Heath,
    Grace Wahba, Technometrics 1979. https://doi.org/10.1080/00401706.1979.10489751.

    Nothing is trained and nothing is forgotten: for any skew and any order of the clients the
    result is that of pooled data. Features are whole numbers from -127 to 127, so the sums have the
    same bits in any order.

    Departures from the paper: if the shape is a chain, the sums are handed from client to client
    instead of to a server. Features need no pretrained network. Random features are rectified
    linear units, where Fed3R-RF has Fourier features. Features are rounded to seven bits and a
    sign, and standardised by the sums. λ is chosen by generalised cross-validation on the totals,
    and a temperature turns the scores into probabilities. bayes has one variance for each feature,
    where GH-OFL has one for each class and feature; cgs is shrunk as lda. With `--dp`, the first
    client tells a mean of features with noise, which all subtract; features are clipped, sums have
    noise, and λ follows from the noise; see `ekiden.core.training.private.sums`. Personal heads, which
    the papers do not have, are ridge regression towards the head of all.
    """

    head: heads.Kind = "ridge"
    """the classifier: ridge regression, discriminant analysis with the covariance within classes or
    of all samples, naive Bayes with the variances within classes, or nearest class means"""
    bits: Annotated[int, Range(least=LEAST, most=FULL)] = FULL
    """b, bits of a sum of products of two features. With 32 sums are exact; with fewer each client
    rounds its own, and more features fit into `bytes`. If `samples` are given: 11 for components,
    18 for other features"""
    samples: Annotated[int, Range(least=0, most=10**9)] = 0
    """n, expected number of training samples of all clients, rather too many than too few, by which
    sums are rounded; with `--dp` they are not, and features of no network have a `width` that
    follows from n and ε"""
    ridge: NonNegative = 0.0
    """λ/n of ridge regression; 0: by generalised cross-validation"""
    shrink: BelowOne = 0.05
    """α, how far lda, cgs and bayes shrink the covariance to a multiple of the identity"""
    topology: Literal["chain", "star"] = "chain"
    """who adds the sums up: each client adds its own to what it received, or the server adds all"""
    personal: bool = False
    """each client also gets a personal head: ridge regression on its own samples towards the head
    of all, with λ by its own generalised cross-validation"""

    traits = Traits(skips=True, weighs=False, releases=True)  # a hop is left out

    @property
    def only_classes(self) -> bool:
        """Return whether the head needs classes."""
        return self.head != "ridge"

    def __post_init__(self) -> None:
        """The head must go with the other hyperparameters."""
        super().__post_init__()
        if self.personal and self.head != "ridge":
            raise UserError(
                "--personal is ridge regression towards the common head: leave out --head "
                f"{self.head}"
            )
        if self.bits < FULL and not self.samples:
            raise UserError(
                f"--bits {self.bits} needs --samples, the expected number of training samples of "
                "all clients"
            )
        if self.bits < FULL and self.head != "ridge":
            raise UserError(
                f"rounded sums are for ridge regression: leave out --head {self.head}, or --bits and "
                "--samples"
            )

    def with_noise(self, dp: DP | None) -> Self:
        """Return the method with its width, which --dp must know; refuse what shows more than one
        noisy sum.
        """
        if dp is None:
            if self.samples and self.bits == FULL:
                return replace(self, bits=self._usual_bits)
            return self
        for option, shown, instead in (
            (f"--dictionary {self.dictionary}", not self.seeded, "give --dictionary seed"),
            (f"--head {self.head}", self.head != "ridge", "give --head ridge"),
            (f"--bits {self.bits}", self.bits < FULL, "leave it out"),
            ("--personal", self.personal, "leave it out"),
        ):
            if shown:
                raise UserError(
                    f"--dp adds noise to one sum of fedgram, and {option} would show more: "
                    f"{instead}"
                )
        if self.width:
            return self
        if self.of_network and self.bytes == "M":
            return replace(self, bytes=OWN)
        if self.of_network:
            return self
        if not self.samples:
            raise UserError(
                "--dp needs --samples, the training samples of all clients, for the number of "
                "features; or --width"
            )
        return replace(self, width=width_for(dp, self.samples))

    @property
    def _usual_bits(self) -> int:
        """Return b, which with the features that then fit is best in given bytes."""
        # Chosen on validation data. Components are nearly white, so errors of rounding hurt less.
        if self.features == "components":
            return 11
        return 18

    def told(self, width: int, classes: int, task: Task) -> int:
        """Return the bytes of the sums."""
        return size_of_sums(task, classes, width, bits=self.bits)

    def run(self, fed: Fed, s: Summing) -> Iterator[State]:
        """Yield the state after each hop and the solution; in a star, after the features are set
        and all have added.
        """
        if self.topology == "star":
            yield from self._star(fed, s)
            return
        order = fed.order(self.order)
        while s.step < len(order):
            before = cast("Ref[Handoff] | None", s.totals)
            s = s.next(totals=fed.sum(self.add, [order[s.step]], INITIAL, plus=before))
            yield s
        yield from self._finish(fed, s)

    def _star(self, fed: Fed, s: Summing) -> Iterator[State]:
        order = fed.order(self.order)
        if s.step == 0:
            s = s.next(settled=fed.call(self.settle, order[0], INITIAL))
            yield s
        if s.model is None:
            # If the first client was away, the second sets the features.
            settled = s.settled or fed.call(self.settle, order[:2][-1], INITIAL)
            sums = fed.sum(self.measure, order, INITIAL, settled, at="server")
            s = replace(s, totals=Handoff(fed.get(settled), sums), settled=None)
        yield from self._finish(fed, s)

    def _finish(self, fed: Fed, s: Summing) -> Iterator[State]:
        """Yield the solution and, if they are wanted, the personal heads. The last state has models
        only, no sums.
        """
        if s.model is None:
            s = self._with_model(fed, s)
            yield s
        if self.personal and not s.personal:
            t = s.totals
            assert t is not None, "they are kept for the personal heads"
            if isinstance(t, Handoff):
                common = self.common(t, fed.task)
                personal = fed.call_all(self.personalise, INITIAL, common)
            else:
                shared = fed.call(self.share, t.owner, t)
                personal = fed.call_all(self.personalise, INITIAL, shared)
            yield s.next(personal=personal, totals=None)

    def _with_model(self, fed: Fed, s: Summing) -> Summing:
        """Return the next state, with the model that follows from the totals."""
        if s.totals is None:
            raise UserError("no client answered: start the clients, then start the run again")
        model: Ref[Weights] | Weights
        if isinstance(s.totals, Handoff):
            model = self.solved(fed.network(fed.get(INITIAL)), s.totals, fed.task)
        else:
            model = fed.call(self.solve, s.totals.owner, INITIAL, s.totals)
        return s.next(model=model, totals=s.totals if self.personal else None)

    @on_client(gives="sum")
    def add(self, client: Client, model: Weights, before: Handoff | None) -> Handoff:
        """Add the own sums to those received; the first client settles the features."""
        settled, sums = before or (self.settle(client, model), None)
        return Handoff(settled, self.measure(client, model, settled, sums))

    @on_client(gives=lambda m: "nothing" if m.seeded else "model")
    def settle(self, client: Client, model: Weights) -> Settled:
        """Return the features that follow from the client's samples; with `--dp` their mean, too."""
        features = self.settled_by(client, model)
        told = features.tell()
        if release := client.release(centre=True):
            with torch.no_grad():
                told = (*told, release.centre(self._blocks(client, features), features.width))
        return told

    @on_client(gives="sum")
    def measure(
        self, client: Client, model: Weights, settled: Settled, before: AnySums | None
    ) -> AnySums:
        """Add the sums over the client's samples to those received."""
        # With noise `min_active` leaves nothing out: to leave a sample out would show it.
        if release := client.release():
            features = self.adopted(client, model, settled[:-1])
            centre = centre_of(settled, features.width).to(client.unit())
            with torch.no_grad():
                blocks = ((phi - centre, y) for phi, y in self._blocks(client, features))
                noisy: AnySums = release.sums(
                    blocks, client.classes, features.width, client.unit().device
                )
                return client.added(before, noisy, settled)
        features = self.adopted(client, model, settled)
        rounding = None
        if self.bits < FULL:
            rounding = Rounding.within(self.bits, self.samples, features.variance)
        return client.added(before, self._own_sums(client, features, rounding), settled)

    @on_client(gives="nothing")
    def solve(self, client: Client, model: Weights, totals: Handoff) -> Weights:
        """Return the network with the classifier that follows from the totals."""
        return self.solved(client.network(model), totals, client.task)

    @on_client(gives="nothing")
    def share(self, client: Client, totals: Handoff) -> Common:
        """Return the head of all, for clients that compute a personal head."""
        return self.common(totals, client.task)

    def common(self, totals: Handoff, task: Task) -> Common:
        """Return the head of all from the totals."""
        m = heads.moments(totals.sums, task.unit)
        head = heads.ridge(m, self.ridge)
        parts = (m.mean, m.scale, head.weight, head.bias)
        return Common(totals.settled, *(part.float() for part in parts))

    @on_client(gives=lambda m: "model" if m.personal else None)
    def personalise(self, client: Client, model: Weights, common: Common) -> Weights:
        """Return the network with a head for this client's samples."""
        network = client.network(model)
        features_of(network).adopt(common.settled)
        own = self._own_sums(client, features_of(network))
        unit = client.task.unit
        m = heads.moments_around(own, common.mean.cpu(), common.scale.cpu(), unit)
        towards = heads.Head(common.weight.cpu().double(), common.bias.cpu().double())
        head = heads.outputs(heads.personal_ridge(m, towards), m, client.task)
        return with_rows(network, m.rows(head))

    def solved(self, network: nn.Module, totals: Handoff, task: Task) -> Weights:
        """Return `network` with the features and the classifier of the totals, as weights."""
        features = features_of(network)
        settled = totals.settled
        m = heads.moments(totals.sums, task.unit)
        # With noise, `min_active` leaves nothing out.
        if isinstance(totals.sums, NoisySums):
            m = m.around(centre_of(settled, features.width))
            settled = settled[:-1]
        else:
            self.check_classes(m.targets, task)
        features.adopt(settled)
        head = heads.fitted(self.head, m, self.shrink, self.ridge)
        return with_rows(network, m.rows(heads.outputs(head, m, task)))

    @property
    def one_model(self) -> bool:
        """Return False if there are personal heads."""
        return not self.personal

    def complete(self, state: Summing) -> bool:
        """Return whether all is there, including personal heads if they are wanted."""
        return state.model is not None and bool(state.personal) >= self.personal

    def _blocks(self, client: Client, features: WholeFeatures) -> Iterator[tuple[Tensor, Tensor]]:
        """Return features (b, D) and labels (b,) of the client's training samples, in stored
        order.
        """
        return ((features(x), y) for x, y in client.batches(shuffle=False))

    def _own_sums(
        self, client: Client, features: WholeFeatures, rounding: Rounding | None = None
    ) -> AnySums:
        """Return the sums over the client's own samples, exact or rounded."""
        with torch.no_grad():
            # In stored order, so that floating-point features have the same bits in every step.
            batches = client.batches(self.summed(client), shuffle=False)
            blocks: Iterator[tuple[Tensor, Tensor]] = ((features(x), y) for x, y in batches)
            if self.min_active:
                held = [(phi.to(torch.int8), y) for phi, y in blocks]
                shown = torch.zeros(features.width)
                if held:
                    shown = self.active(torch.cat([phi for phi, _ in held]))
                blocks = ((phi * shown, y) for phi, y in held)
            device = client.unit().device
            return sums_of(
                blocks, client.task, client.classes, features.width, device, rounding=rounding
            )

    def steps(self, clients: int) -> int:
        """N hops and the solution, in a star 2; personal heads take 1 more."""
        hops = 1 if self.topology == "star" else clients
        return hops + 1 + self.personal

    def cost(self, clients: int, model: Size) -> int:
        """(N - 1)·(2D(D + 1) + 4KD + 8K + S); 8(K + 1)D + 16K + 8 instead of 4KD + 8K unless labels
        are classes.

        With `--dp` D + 32 bytes more. With b < 32 bits, ⌈b·D(D - 1)/16⌉ + 4D + 24 instead of 2D(D +
        1).

        S is what is settled: for F filters of patches F·(Cp² + 4) + 8C + 4D, for u random units of
        d numbers 8d + 4u. In a star the sums of all go to the server, and S to the others and the
        server.

        Personal heads are (N - 1)·(S + 4(2D + KD + K)) more, in a star N times that.
        """
        each = self.handed_on(model)
        if self.personal:
            features = features_of(model.network.module)
            numbers = 2 * features.width + model.layout.classes * (features.width + 1)
            each += features.told_bytes() + 4 * numbers
        sends = clients if self.topology == "star" else clients - 1
        return sends * each


def centre_of(settled: Settled, width: int) -> Tensor:
    """Return the mean (D,) that is subtracted from features before noise is added, which comes last
    in `settled`.
    """
    centre = settled[-1] if settled else torch.zeros(0)
    if forms([centre]) != [((width,), torch.int8)]:
        raise UserError(
            "the mean of features received is not one: use the same version of Ekiden everywhere"
        )
    return centre

"""FedELMY in parallel: all clients build their pools at once."""

from collections.abc import Iterator
from dataclasses import dataclass

from ekiden.authoring import (
    Client,
    Fed,
    State,
    Weights,
    mean,
    on_client,
)
from ekiden.methods.blocks.combining import Init
from ekiden.methods.blocks.rounds import own_models
from ekiden.methods.chain.fedelmy import PoolMethod


@dataclass(frozen=True)
class FedELMYParallel(PoolMethod):
    """FedELMY without the chain: every client builds a pool of diverse models, and the pools' means
    are averaged.

    Naibo Wang, Yuchen Deng, Wenjie Feng, Shichen Fan, Jianwei Yin, See-Kiong Ng: One-Shot
    Sequential Federated Learning for Non-IID Data by Enhancing Local Model Diversity. ACM
    Multimedia 2024. https://arxiv.org/abs/2404.12130 (Algorithm 3; Table 9).

    Each client warms up its own random model, then trains S models as in `FedELMY`, and sends the
    mean of its pool to all others. All clients end with the same model, the uniform mean.

    Departures from the paper: none known; there is no released code of this variant. `init =
    "same"` starts all clients from one model instead. Fields mean the same as in `FedELMY`.
    """

    server: bool = False
    """send models to a server that averages them, instead of from every client to every other: N·M
    instead of N(N-1)·M"""
    init: Init = "different"
    """initial models: a different one for each client, as published, or the same for all"""

    @property
    def one_model(self) -> bool:
        """Without a server each client has the model, as its personal one."""
        return self.server

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield two states: after all pools, and after the exchange."""
        if s.step == 0:
            starts = own_models(fed, s)
            if self.init == "different":
                starts = fed.call_all(self.initial)
            if self.warmup:
                starts = fed.call_each(self.warm_up, starts)
            s = s.next(model=None, personal=fed.call_each(self.extend_pool, starts))
            yield s
        if s.step == 1:
            if self.server:
                s = s.next(model=mean(fed.get(s.personal)), personal=())  # type: ignore[arg-type]
            else:
                means = fed.call_all(self.average, s.personal)
                s = s.next(model=means[0], personal=means)
            yield s

    @on_client(gives="nothing")
    def initial(self, client: Client) -> Weights:
        """Return a random model for the client."""
        return client.fresh()

    @on_client(gives="model")
    def average(self, client: Client, models: tuple[Weights, ...]) -> Weights:
        """Return (1/N) Σ m_i."""
        return mean(models)

    def steps(self, clients: int) -> int:
        """Return 2: training and exchange."""
        return 2

    def cost(self, clients: int, model: int) -> int:
        """N(N-1)·M from everyone to everyone, N·M to a server."""
        return clients * (1 if self.server else clients - 1) * model

"""FedOV: one-shot learning by a vote of models that know what they do not know."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.base.checks import Count, CountOrZero, NonNegative
from ekiden.engine.federation import Fed
from ekiden.engine.method import CLASSES, CONTINUOUS, INITIAL, State, Traits, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.one_shot import Init, OneShot
from ekiden.methods.one_shot.blocks.ensemble import copies
from ekiden.methods.one_shot.fedov.outliers import destroy
from ekiden.training.network import Network
from ekiden.training.objective import Forward, Objective, Work
from ekiden.training.weights import Weights


@dataclass(frozen=True)
class FedOV(OneShot):
    """Clients learn to answer "unknown" to classes that they do not have; the more certain models vote on each sample.

    Yiqun Diao, Qinbin Li, Bingsheng He: Towards Addressing Label Skews in One-Shot Federated Learning. ICLR 2023.
    https://openreview.net/forum?id=rzrqh85f4Sc.

    The network has one more output, u. A client trains it on its samples and on outliers made from them: corrupted
    samples, and samples moved by PGD to where the network takes them for known. The result contains all models. It adds
    up the probabilities of the k models that least consider the sample unknown.

    Departures from the paper: where paper and code may differ, the authors' code is followed, for any number of classes
    (the code has the number 10 written into it). The corruptions are those of the code (an overwritten band may begin
    one line further). The k that the paper reports is not known; the default is all. Networks with BatchNorm learn from
    samples and corrupted samples in one pass, without the other terms, as in the code. The distillation of the vote
    into one model needs data that the server does not have and is left out. Samples that are not images are corrupted
    by permuting their numbers. As in the code, local training ends with its last epoch, whatever --select says;
    FedELMY's tables state the epoch of best validation accuracy for all methods.
    """

    traits = Traits(joins_models=True, extra_outputs=1, needs=CLASSES | CONTINUOUS)

    epochs: Count = 200
    """E, epochs at each client"""
    attack_steps: CountOrZero = 5
    """steps of PGD that make outliers harder"""
    attack_step: NonNegative = 0.002
    """length of a PGD step"""
    attack_radius: NonNegative = 0.5
    """how far PGD may move an outlier, in each number"""
    mix: NonNegative = 0.01
    """weight of the term on mixed representations of two classes"""
    voters: CountOrZero = 0
    """k, how many models vote on a sample; 0: all"""
    init: Init = "different"
    """initial models: the same for all clients, or a different one for each"""

    def selection(self, select: str) -> str:
        """Return the last epoch: validation data have no outliers, so on them the first epochs look best."""
        return "last"

    def start(self) -> State:
        """Start without a model: the vote needs its members."""
        return State(model=None)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield one state: train at all clients, join the models into one network."""
        if s.step == 0:
            sent = fed.get([fed.call(self.train, k, INITIAL) for k in fed.clients])
            s = s.next(model=Network(Vote(copies(fed.network(sent[0]), sent), self.voters)).weights())
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        """Train on the open-set loss, to the last epoch."""
        model = model if self.init == "same" else client.fresh()
        terms = OpenSet(client.module, client.classes, self)
        training = replace(client.training, select="last")
        return client.fit(model, epochs=self.epochs, objective=terms, training=training)

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return one network that contains N networks."""
        return Vote([copy.deepcopy(network) for _ in range(clients)], self.voters)

    def cost(self, clients: int, model: int) -> int:
        """N·M, where M is the size of the network with K + 1 outputs."""
        return clients * model


@dataclass(frozen=True)
class OpenSet(Objective):
    """The loss of a mini-batch.

    Attributes:
        module: the network in training.
        unknown: u = K, the index of the additional output.
        method: the method with its weights and settings.
    """

    module: nn.Module
    unknown: int
    method: FedOV

    @property
    def normed(self) -> bool:
        """Whether the network has BatchNorm, whose statistics would be wrong after separate passes."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())

    def further(self, batch: int) -> Work:
        """Count the passes of corrupted and harder samples, and of PGD, which takes a gradient in each step."""
        samples = batch * (1 if self.normed else 2 + self.method.attack_steps)
        return Work(samples, samples)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the sum of the terms for inputs (b, ...) and labels (b,)."""
        spoiled, u = destroy(x), torch.full_like(y, self.unknown)
        if self.normed:
            return F.cross_entropy(forward(torch.cat([x, spoiled])).float(), torch.cat([y, u]))
        harder = attack(self.module, spoiled, u, self.method)
        pairs, share = torch.randperm(len(y)).to(y.device), float(torch.rand(()))
        with Mixed(self.module, pairs, share):
            logits = self.module(torch.cat([x, spoiled, harder])).float()
        known, corrupted, adversarial, mixed = logits.split(len(y))
        loss = F.cross_entropy(known, y) + F.cross_entropy(without(known, y), u)
        loss = loss + F.cross_entropy(corrupted, u) + F.cross_entropy(adversarial, u)
        differ = y != y[pairs]
        return loss + self.method.mix * F.cross_entropy(mixed[differ], u[differ]) if bool(differ.any()) else loss


def without(logits: Tensor, y: Tensor) -> Tensor:
    """Return logits (b, K + 1) in which the true class cannot win."""
    return logits.scatter_add(1, y[:, None], logits.new_full((len(y), 1), -1e4))


def attack(module: nn.Module, x: Tensor, u: Tensor, method: FedOV) -> Tensor:
    """Move outliers by PGD, in evaluation mode, within `attack_radius` of x, to where the answer is less "unknown"."""
    was_training = module.training
    module.eval()
    moved = x.clone()
    for _ in range(method.attack_steps):
        moved.requires_grad_()
        loss = F.cross_entropy(module(moved).float(), u)
        (slope,) = torch.autograd.grad(loss, moved)
        moved = moved.detach() + method.attack_step * slope.sign()
        moved = torch.clamp(moved, x - method.attack_radius, x + method.attack_radius)
    module.train(was_training)
    return moved


class Mixed:
    """While it is entered, one forward pass of 3b samples gives 3b + b rows.

    The last b come of share·h + (1 - share)·h[pairs], h being what the second linear layer (or the only one) reads of
    the first b samples: what the first hidden linear layer gives.
    """

    def __init__(self, module: nn.Module, pairs: Tensor, share: float) -> None:
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        self._handle = linear[:2][-1].register_forward_pre_hook(self._add)
        self._pairs, self._share = pairs, share

    def _add(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        own = args[0][: len(self._pairs)]
        return (torch.cat([args[0], self._share * own + (1 - self._share) * own[self._pairs]]),)

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *exception: object) -> None:
        """Restore ordinary rows."""
        self._handle.remove()


class Vote(nn.Module):
    """N networks of K + 1 outputs that vote. Its weights are those of all members, one after the other."""

    def __init__(self, members: Sequence[nn.Module], voters: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.voters = min(voters or len(members), len(members))

    def scores(self, x: Tensor) -> Tensor:
        """Return (b, K): summed probabilities of the k members with the least "unknown"; ties in the members' order."""
        return self(x).exp()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K): logarithms of the scores, exact also if all members are sure of "unknown"."""
        answers = torch.stack([member(x).float() for member in self.members])
        unknown = answers[:, :, -1] - answers[:, :, :-1].logsumexp(2)  # log-odds
        order = unknown.sort(stable=True, dim=0).indices[: self.voters]
        chosen = answers.log_softmax(2).gather(0, order[..., None].expand(-1, -1, answers.shape[2]))
        return chosen.logsumexp(0)[:, :-1]

"""DENSE: data-free one-shot federated learning by a generator and distillation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ekiden.authoring import (
    NUMBERS,
    VECTORS,
    Count,
    Fed,
    NonNegative,
    Positive,
    Range,
    Traits,
    Work,
)
from ekiden.core.training.network import Network
from ekiden.methods.one_shot.blocks.ensemble import (
    Distilled,
    DistillingMethod,
    EnsembleModel,
    synthesise,
)


@dataclass(frozen=True)
class DENSE(DistillingMethod):
    """Clients send trained models once; the server synthesises samples with them and distils them
    into one model.

    Jie Zhang, Chen Chen, Bo Li, Lingjuan Lyu, Shuang Wu, Shouhong Ding, Chunhua Shen, Chao Wu:
    DENSE: Data-Free One-Shot Federated Learning. NeurIPS 2022. https://arxiv.org/abs/2112.12371.

    Each epoch a new generator makes one batch that the averaged teachers classify as wanted (CE),
    that fits their BatchNorm statistics (BN), and on which the student disagrees with them (ADV);
    then the student learns the teachers' answers on all batches so far.

    Departures from the paper: hyperparameters of the server are those of the authors' README
    command. Their code never sees the clients' BatchNorm layers, so its statistics loss is always 0
    (`bn` = 0). Here it sees them and is a mean over the clients, as the answers are, so that λ_1
    means the same for any N; the code would add the losses up. The student is in evaluation mode
    while samples are made. Samples are augmented as the clients' training data are. The result is
    the last epoch, not the best on the test set. For samples that are not images the generator is a
    perceptron. The student starts from the common initial model, as the clients do; in the released
    code it starts from a fresh network. Local training ends with the epoch that --select names, by
    default the best on validation data.
    """

    epochs: Count = 200
    """E, epochs at each client"""
    distill_epochs: Count = 200
    """T, number of synthesised batches; after each, the student trains once on all batches so
    far"""
    steps_per_batch: Count = 30
    """T_G, steps of the generator for a batch"""
    distill_batch_size: Annotated[int, Range(least=2)] = 256
    """B_s and B_k, samples synthesised per epoch, and batch size of the student"""
    ce: NonNegative = 1.0
    """weight of the loss between the teachers' answers and the wanted classes (labels, numbers)"""
    bn: NonNegative = 1.0
    """λ_1, weight of the distance from the BatchNorm statistics, averaged over the teachers"""
    adv: NonNegative = 1.0
    """λ_2, weight of the disagreement of student and teachers"""
    generator_lr: Positive = 1e-3
    """η_G, learning rate of the generator (Adam)"""
    distill_lr: Positive = 5e-3
    """η_S, learning rate of the student (SGD, momentum 0.9)"""
    temperature: Positive = 20.0
    """temperature of the answers that the student learns"""
    noise: Count = 256
    """length of the generator's input z"""
    generator_width: Count = 64
    """channels of the generator"""

    traits = Traits(needs=VECTORS | NUMBERS)

    def epoch(
        self,
        fed: Fed,
        s: Distilled,
        members: Sequence[nn.Module],
        student: Network,
        momentum: Tensor,
    ) -> Distilled:
        """Make samples on which the student and the mean of the teachers disagree; train it."""
        teacher = EnsembleModel(members, fed.layout.classes, "logits").eval()
        pool = self.synthesise(fed, teacher, student.module)
        if s.pool is not None:
            pool = torch.cat([s.pool, pool])

        def loss_of(x: Tensor, draw: Generator) -> Tensor:
            with fed.autocast():
                with torch.no_grad():
                    answers = teacher(x).float()
                own = student.module(x).float()
            return fed.task.distance(own, answers, self.temperature)

        self.distil(fed, student, momentum, pool, self.distill_lr, loss_of)
        fed.work.add(Work((len(members) + 1) * len(pool), len(pool)))
        return replace(s, pool=pool)

    def synthesise(self, fed: Fed, teacher: EnsembleModel, student: nn.Module) -> Tensor:
        """Return the samples with the smallest loss over all steps of a new generator."""
        draw, generator, z = self.drawn(fed, student)
        wanted = fed.task.drawn(self.distill_batch_size, fed.layout.classes, draw).to(z.device)
        statistics = Statistics(teacher)

        def loss_of(raw: Tensor) -> Tensor:
            statistics.terms.clear()
            with fed.autocast():
                x = fed.feed(raw, draw)
                answers = teacher(x).float()
                own = student(x).float()
            loss = self.ce * fed.task.mean_loss(answers, wanted)
            loss = loss + self.bn * statistics.loss(len(teacher.members))
            return loss + self.adv * disagreement(answers, own, fed.task.kind)

        made = synthesise(fed, generator, z, self.steps_per_batch, self.generator_lr, loss_of)
        statistics.close()
        return made


def disagreement(teacher: Tensor, student: Tensor, kind: str = "classification") -> Tensor:
    """Return L_adv: minus the mean of KL(teacher ‖ student) over the batch, counted only where
    their answers differ.

    The same for labels; for numbers, minus the mean squared difference, of which no more than 1
    counts.
    """
    # a squared difference has no bound, and the generator would run away with it
    if kind == "regression":
        return -(teacher - student).square().clamp(max=1).mean()
    if kind == "multi-label":
        distance = F.binary_cross_entropy_with_logits(student, teacher.sigmoid(), reduction="none")
        return -(distance * ((teacher > 0) != (student > 0))).mean()
    differ = teacher.argmax(1) != student.argmax(1)
    kl = F.kl_div(
        student.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True
    ).sum(1)
    return -(kl * differ).mean()


class Statistics:
    """Watches what the BatchNorm layers of a network read."""

    def __init__(self, network: nn.Module) -> None:
        # ‖var - running var‖ + ‖mean - running mean‖ of each layer in the forward passes since
        # `clear`
        self.terms: list[Tensor] = []
        layers = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._hooks = [
            m.register_forward_pre_hook(self._see) for m in layers if m.track_running_stats
        ]

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        axes = [0, *range(2, args[0].dim())]
        variance, centre = torch.var_mean(args[0].float(), dim=axes, correction=0)
        running = layer.running_var, layer.running_mean
        self.terms.append(sum_of_norms((variance, centre), running))  # type: ignore[arg-type]

    def loss(self, teachers: int) -> Tensor:
        """Return L_BN, a sum over the layers and a mean over the teachers; 0 without such
        layers.
        """
        return sum(self.terms, torch.zeros(())) / teachers

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()


def sum_of_norms(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> Tensor:
    """Σ ‖found - wanted‖₂."""
    return torch.stack(
        [torch.linalg.vector_norm(a - b) for a, b in zip(found, wanted, strict=True)]
    ).sum()

"""A recipe: what is run, how it is trained and measured; the same on one machine and between
silos.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from ekiden.core.base import outside
from ekiden.core.base.checks import Checked, CountOrZero, all_but, made, plain, reading
from ekiden.core.base.errors import UserError
from ekiden.core.base.outside import is_file
from ekiden.core.base.settings import Training
from ekiden.core.engine.evaluation import EvaluateOn
from ekiden.core.engine.method import Method
from ekiden.core.models.pretrained import located, located_file
from ekiden.core.models.split import parse_part
from ekiden.core.training import loop as own_loop
from ekiden.core.training.private.promise import DP, check_training

M_co = TypeVar("M_co", bound=Method, covariant=True)


@dataclass(frozen=True)
class Recipe(Checked, Generic[M_co]):
    """A method, a network, how it is trained and how it is measured."""

    method: M_co
    model: str = "auto"
    """network (see `ekiden list`); auto: the one that fits the data"""
    pretrained: str = ""
    """safetensors file with weights, matched by name; a classifier of another size is skipped.
    Between machines each silo has a file of this name in its own pretrained.folder"""
    train: str = "all"
    """the part that is trained: all; head; last:K, the last K blocks and the head;
    lora:r=8,alpha=16,targets=query+value, adapters of low rank and the head. The rest is frozen: it
    does not travel, and stays in evaluation mode"""
    training: Training = field(default_factory=Training)
    dp: str = ""
    """differential privacy of each training sample: epsilon=8,delta=1e-5,clip=1 (see
    docs/privacy.md). Each gradient is clipped to the norm clip, and noise keeps (epsilon, delta) at
    every silo for the whole run. Training then returns the last epoch instead of the best on
    validation data, which would tell about these. FedGram clips features and adds noise to its
    sums; honest=h shares this noise among the silos, as long as h of them can be trusted"""
    seed: CountOrZero = 0
    """seed of everything random: partition, initial model, training"""
    metric: str = ""
    """headline metric, which chooses epochs and which tables show: its name (see docs/tasks.md), or
    FILE.py:NAME of a function (answers, labels) -> number. If you name one, all metrics are
    measured. By default the task's first, such as accuracy"""
    evaluate_every: CountOrZero = 1
    """steps between evaluations on the test data; 0: only at the end. Between machines each is one
    more message to each silo"""
    evaluate_on: EvaluateOn = "all"
    """measure personal models on all test data, or each on its own client's only, in 1/N of the
    time. With own, the models that clients trained last in the step are also measured, before any
    averaging (client_mean_trained). Between machines only all"""

    def __post_init__(self) -> None:
        """Refuse a part of the network that cannot be trained, and privacy where nothing can be
        promised.
        """
        parse_part(self.train)
        if self.training.loop:
            own_loop.check_training(self.training)
        if self.training.loop and (self.dp or not self.method.traits.weighs):
            what = (
                "--dp clips each gradient"
                if self.dp
                else f"{self.method.title()} does not only train"
            )
            raise UserError(f"{what}, which no loop of your own can do: leave out --loop")
        if self.training.class_weights != "none" and not self.method.traits.weighs:
            raise UserError(
                f"{self.method.title()} does not train on a loss in which classes have weights: "
                "leave out "
                f"--class-weights={self.training.class_weights}"
            )
        dp = DP.parse(self.dp)
        object.__setattr__(self, "method", self.method.with_noise(dp))
        if dp is not None:
            check_training(self.training)
            object.__setattr__(self, "dp", str(dp))
        if (dp is not None or self.training.loop) and self.training.select == "best":
            object.__setattr__(self, "training", replace(self.training, select="last"))

    @property
    def name(self) -> str:
        """The method's name, by which `method_named` finds it."""
        # silos read their own files without any method
        from ekiden.methods import name_of

        return name_of(type(self.method))

    @property
    def step_size(self) -> float | None:
        """The step size of training; None where the model follows from sums with noise, or
        another loop trains.
        """
        own = self.training.loop or (self.dp and self.method.traits.releases)
        return None if own else self.training.lr

    def located(self) -> Self:
        """Return the recipe with absolute paths, and with the model of a run where a hyperparameter
        names one.
        """
        method, model, pretrained = self.method.with_source(
            self.model, located_file(self.pretrained)
        )
        model = located(outside.located(model))
        pretrained = located_file(pretrained)
        loop = self.training.loop
        if isinstance(loop, str):
            loop = outside.located(loop)
        return replace(
            self,
            method=method,
            model=model,
            pretrained=pretrained,
            metric=outside.located(self.metric),
            training=replace(self.training, loop=loop),
        )

    def shared(self) -> dict[str, Any]:
        """Return the recipe as plain values that mean the same everywhere: code in files is named
        by its content.
        """
        return with_code(self.to_json(), outside.by_content)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain values."""
        values = plain(self) | {"method": self.name, "hyperparameters": plain(self.method)}
        if not self.dp:
            del values["dp"]
        if self.training.class_weights == "none":
            del values["training"]["class_weights"]
        if self.training.loop:
            values["training"]["loop"] = own_loop.name_of(self.training.loop)
        else:
            del values["training"]["loop"]
        return values


def with_code(values: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the plain values of a recipe with all names of code in files changed."""

    def changed(entries: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        found = dict(entries)
        for name in names:
            code = entries.get(name)
            if isinstance(code, str) and is_file(code):
                found[name] = change(code)
        return found

    training = values.get("training")
    inner = {}
    if isinstance(training, Mapping):
        inner = {"training": changed(training, ["loop"])}
    return changed(values, ["method", "model"]) | inner


def recipe_of(
    values: object, reader: str = "the version of Ekiden that wrote it"
) -> Recipe[Method]:
    """Return the recipe with these plain values."""
    if not isinstance(values, Mapping) or not isinstance(values.get("method"), str):
        raise UserError(
            f"the settings of the run cannot be read (they name no method): use {reader}"
        )
    from ekiden.methods import method_named

    kind = method_named(values["method"])
    with reading(f"the settings of {values['method']}", reader):
        method = made(kind, values.get("hyperparameters"), "hyperparameters")
        return made(Recipe, all_but(values, "hyperparameters") | {"method": method})

"""What one task of a client may reveal."""

from dataclasses import dataclass, field, replace

from ekiden.core.base.errors import UserError
from ekiden.core.training.private.accountant import Spent
from ekiden.core.training.private.gradients import Mechanism
from ekiden.core.training.private.noise import Noise
from ekiden.core.training.private.promise import DP, Keeper
from ekiden.core.training.private.sums import Release, of_centre, of_sums


@dataclass
class Privacy:
    """What `--dp` lets one task of a client reveal about its samples."""

    dp: DP  # the promise of the run
    plan: Spent  # what the client tells in the whole run
    keeper: Keeper  # has the client's noise, and counts what is spent
    releases: bool  # whether the method gives noisy sums; otherwise it trains
    client: str  # its name in messages
    released: list[Spent] = field(default_factory=list)  # by this task: the mean, then the sums

    def refuse_reading(self) -> None:
        """Refuse a task that reads samples before it has the noise of its sums."""
        if not self.released:
            raise self._error("reads samples other than by training, for which --dp has no noise")

    def mechanism(self, fit: int, steps: int, samples: int, *, whole: bool) -> Mechanism:
        """Return what makes a fit private; `whole`: of the run's network on all training samples."""
        if not whole or self.releases:
            raise self._error("trains on a part of its own, for which --dp promises nothing")
        spent = replace(self.plan, steps=steps)
        return Mechanism(self.dp.clip, spent, Noise(self.keeper.key(fit, spent)), samples)

    def release(self, *, centre: bool) -> Release:
        """Return what adds noise to sums over samples, or to the mean of their features."""
        spent = of_centre(self.plan) if centre else of_sums(self.plan)
        if not self.releases or spent in self.released:
            raise self._error("gives sums for which --dp has no noise")
        self.released.append(spent)
        key = self.keeper.key(int(not centre), spent, note=False)
        return Release(self.dp, self.plan, Noise(key))

    def note(self) -> None:
        """Note that sums with noise are spent, at the end of a task: if it is refused before,
        nothing left.
        """
        for spent in self.released:
            self.keeper.key(int(spent != of_centre(self.plan)), spent)

    def _error(self, why: str) -> UserError:
        return UserError(f"{self.client}: the task {why}")

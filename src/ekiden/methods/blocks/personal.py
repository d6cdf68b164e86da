"""What methods share that end with a model for each client: who begins with which, and how a round's rate falls."""

from dataclasses import replace

from ekiden.authoring import INITIAL, Client, Fed, Method, Model, State, Training, Traits


class PersonalMethod(Method):
    """A method of many rounds whose clients each have a model of their own; there is no global one."""

    rounds: int

    def start(self) -> State:
        """Return the state before the first round: neither a global model nor personal ones."""
        return State(model=None)

    traits = Traits(one_model=False)

    def steps(self, clients: int) -> int:
        """Return the number of rounds."""
        return self.rounds


def own_models(fed: Fed, s: State) -> tuple[Model, ...]:
    """Return each client's own model, the initial one before the first round."""
    return s.personal or (INITIAL,) * len(fed.clients)


def training_of(client: Client, lr_decay: float, round: int) -> Training:
    """Return the client's training at the learning rate of the round."""
    return replace(client.training, lr=client.training.lr * lr_decay**round)

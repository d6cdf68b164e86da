"""A network for signals: (channels, time), or (time,) of one channel."""

from torch import Tensor, nn

from ekiden.models.split import SplitNetwork


class Channels(nn.Module):
    """Gives a signal of one channel its dimension of channels."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, time) or (b, channels, time) to (b, channels, time)."""
        return x.unsqueeze(1) if x.ndim == 2 else x


def cnn_signal(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Three 1-D convolutions of 32, 64 and 64 with group normalisation, the mean over time; any length works."""
    layers: list[nn.Module] = [Channels()]
    for inputs, outputs, kernel in ((shape[0] if len(shape) == 2 else 1, 32, 7), (32, 64, 5), (64, 64, 3)):
        layers += [
            nn.Conv1d(inputs, outputs, kernel, stride=2, padding=kernel // 2),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
        ]
    return SplitNetwork(nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten()), nn.Linear(64, classes))

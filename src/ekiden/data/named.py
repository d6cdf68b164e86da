"""The named data sets: their origin, and how the FedELMY experiments feed them to a network."""

from dataclasses import dataclass, field, replace

from ekiden.data.augment import Augment
from ekiden.data.columns import Columns


@dataclass(frozen=True)
class Named:
    """A named data set.

    Attributes:
        hub: its id on the Hugging Face hub; None if we know no complete and readable copy there.
        config: its configuration there.
        columns: names of its columns there.
        test: the split there that is the test part; None if there is only `train` (then 20 % of
            every (domain, class), or of every group, is held out).
        domains: domain names in the order of the papers.
        size: side to which images are resized; None keeps their size.
        mean: per channel, subtracted after scaling bytes to [0, 1].
        std: per channel, divided by.
        augment: how training batches are augmented.
    """

    hub: str | None = None
    config: str | None = None
    columns: Columns = field(default_factory=Columns)
    test: str | None = "test"
    domains: tuple[str, ...] = ()
    size: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: Augment = field(default_factory=Augment)


_TINY = Named(
    hub="zh-plus/tiny-imagenet",
    test="valid",
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2302, 0.2265, 0.2262),
    augment=Augment(flip=True, rotation=20),
)
_SHIFTED = Named(test=None, size=32, augment=Augment(crop=4, flip=True, rotation=15))
_CIFAR = Named(columns=Columns(image="img"), augment=Augment(crop=4, flip=True))

NAMED: dict[str, Named] = {
    "digits": Named(),  # ships with scikit-learn
    "mnist": Named(hub="ylecun/mnist"),
    "fashion_mnist": Named(hub="zalando-datasets/fashion_mnist"),
    "svhn": Named(hub="ufldl-stanford/svhn", config="cropped_digits"),
    "femnist": Named(hub="flwrlabs/femnist", columns=Columns(label="character", group="writer_id"), test=None),
    "pathmnist": Named(),
    "cifar10": replace(_CIFAR, hub="uoft-cs/cifar10"),
    "cifar100": replace(_CIFAR, hub="uoft-cs/cifar100", columns=Columns(image="img", label="fine_label")),
    "tiny_imagenet": _TINY,
    "tiny_imagenet20": replace(_TINY, hub=None),  # its first 20 classes
    "pacs": replace(
        _SHIFTED,
        hub="flwrlabs/pacs",
        domains=("photo", "art_painting", "cartoon", "sketch"),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    "office_caltech10": replace(_SHIFTED, domains=("amazon", "caltech10", "dslr", "webcam")),
}

"""Faults of masks, labels, signals, texts, embeddings, times, ids and objects: each gives one line,
or is refused."""

import json
import re
import unicodedata
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, TensorDataset

import ekiden
from ekiden.care.units import compare_units
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import from_tensors, load
from ekiden.readers.kinds import Images, Tokens
from ekiden.readers.moments import ColumnMoments
from tests.readers.pictures import encoded

pytestmark = pytest.mark.usefixtures("no_data")
Y = torch.arange(40) % 2
PAIRS = TensorDataset(torch.randn(40, 4), Y)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pictures(n: int = 20, height: int = 6, width: int = 6) -> Any:
    return torch.randint(0, 255, (n, 3, height, width), dtype=torch.uint8)


def mask(*shape: int, classes: int = 2) -> Any:
    return torch.randint(0, classes, (20, *shape))


def table(n: int = 60, **columns: Any) -> Any:
    rng = np.random.default_rng(len(columns))
    return {
        "a": rng.normal(size=n),
        "b": rng.normal(size=n),
        "label": ["p", "q"] * (n // 2),
        **columns,
    }


def texts(of: Callable[[int], str], n: int = 40, **columns: Any) -> Any:
    return {"text": [of(k) for k in range(n)], "label": ["p", "q"] * (n // 2), **columns}


def signals(change: Callable[[Any], Any] = lambda x: x, high: float = 90.0) -> Any:
    return change(torch.stack([torch.randn(40, 30), high + torch.randn(40, 30)], 1)), Y


def two_labels(g: list[int]) -> Any:
    return {"x": np.arange(60.0) ** 2 % 7, "f": [0, 1] * 30, "g": g}


def zeroed(x: Any) -> Any:
    x[:, 1] = 0
    return x


def said(read: Callable[[], Any]) -> str:
    """Return all that is said while data are read."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        read()
    return "\n".join(str(one.message) for one in seen if issubclass(one.category, DataWarning))


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (
            lambda: from_tensors((pictures(), mask(3, 3))),
            "images of train have 6 x 6 pixels, their masks 3 x 3",
        ),
        (
            lambda: from_tensors((pictures(width=8), mask(8, 6))),
            "have 8 x 6 pixels, their masks 6 x 8: give both one",
        ),
        (
            lambda: from_tensors((pictures(), mask(6, 6, 3))),
            r"masks of images need whole numbers of shape \(n, H, W\)",
        ),
        (
            lambda: from_tensors((pictures(), mask(6, 6).float())),
            "masks of images need whole numbers",
        ),
        (
            lambda: from_tensors((torch.randn(40, 4), Y[:, None])),
            r"one class a sample: give y\[:, 0\]",
        ),
        (
            lambda: from_tensors(DataLoader(PAIRS)),  # type: ignore[arg-type]
            "train must be tensors .x, y. or a map-style dataset of pairs",
        ),
        (
            lambda: load({"x": torch.randn(40, 4), "y": Y}),
            r"a dict of tensors \(x, y\): give \(inputs, labels\)",
        ),
        (
            lambda: from_tensors(TensorDataset(PAIRS[:][0])),
            "pairs .*, not samples of type tuple of 1 parts",
        ),
        (
            lambda: from_tensors([{"x": 1, "y": 0}] * 9),
            "pairs .*, not samples of type dict of 2 parts",
        ),
        (
            lambda: load(pa.table({"s": [["x"]] * 40, "label": ["p", "q"] * 20})),
            "give lists of numbers, all of one shape",
        ),
        (
            lambda: load(
                pa.table(
                    {
                        "s": [[1.0, k / k if k else None] for k in range(40)],
                        "label": ["p", "q"] * 20,
                    }
                )
            ),
            "column 's' of the table has NaN or infinity in row 0",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(read: Callable[[], Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        read()


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (
            lambda: ekiden.federate([signals(lambda x: x.flip(1)), signals(), signals()]),
            "channel 0 of the input of client-0 differs from other silos by",
        ),
        (
            lambda: ekiden.federate([signals(zeroed, 0), signals(high=0), signals(high=0)]),
            "channel 1 of the input hardly varies at client-0 (0), but does at other silos",
        ),
        (
            lambda: ekiden.federate([(255 * torch.rand(40, 1, 4, 4), Y) for _ in range(2)]),
            "floats of silo client-0, silo client-1 go up to",
        ),
        (
            lambda: from_tensors(
                (torch.where(torch.arange(40)[:, None] == 5, 0, torch.randn(40, 4)), Y)
            ),
            "1 of 40 samples of train hold nothing (no word, no value, or one value only)",
        ),
        (
            lambda: load(table(a=[None, *range(59)], b=["", *"xy" * 29, "x"])),
            "1 of 60 samples of the table hold nothing",
        ),
        (
            lambda: ekiden.federate([(pictures(), mask(6, 6) * k) for k in (0, 1)]),
            "no training sample has the label '1' (at client-0), and many at other silos have",
        ),
        (
            lambda: ekiden.federate(
                [two_labels([0] * 60), two_labels([1, 1, 0] * 20)],
                label_column=("f", "g"),
            ),
            "no training sample has the label 'g' (at client-0)",
        ),
        (
            lambda: load(texts(lambda k: f"mÃ¼de {k}"), text_column="text"),
            "texts of the table were read in another",
        ),
        (
            lambda: load(texts(lambda k: f"m\ufffdde {k}"), text_column="text"),
            "hold a character that was lost",
        ),
        (
            lambda: load(texts(lambda k: f"<p>R&amp;D {k}"), text_column="text"),
            "hold marks of HTML ('<p>R&amp;D 0')",
        ),
        (
            lambda: load(texts(lambda k: "nan" if k % 4 else f"w {k}"), text_column="text"),
            "30 of 40 texts of the table say",
        ),
        (
            lambda: load(texts(lambda k: f"{'w ' * 300}{k}"), text_column="text"),
            "texts of the table have 256 tokens",
        ),
        (
            lambda: load(texts(lambda k: f"w {k}", age=[1] * 40), text_column="text"),
            "no model of texts gets (age)",
        ),
        (
            lambda: load(table(sample_weight=np.arange(60) ** 2)),
            "'sample_weight' of the table seems to say how",
        ),
    ],
)
def test_what_is_probably_not_meant_is_said(read: Callable[[], Any], line: str) -> None:
    assert line in said(read)


def test_ordinary_texts_and_weights_of_people_are_no_doubt() -> None:
    plain = texts(lambda k: f"müde & a < b, b > {k}; naïve, Köln")
    assert not said(lambda: load(plain, text_column="text"))
    assert not said(lambda: load(table(weight=np.random.default_rng(5).normal(75, 9, 60))))


def test_masks_of_pairs_may_be_pictures_with_a_palette() -> None:
    made = []
    for x, y in zip(pictures(), mask(6, 6, classes=3).to(torch.uint8).numpy(), strict=True):
        picture = Image.fromarray(y, "P")
        picture.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
        made.append((Image.fromarray(x.permute(1, 2, 0).numpy()), picture))
    data = from_tensors(made)
    assert data.outputs == 3
    assert data.train.y.shape == (16, 6, 6)


def test_validation_files_next_to_training_files_are_named(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / f"s_{part}.csv").write_text(
            "a,label\n" + "".join(f"{k * k},{'pq'[k % 2]}\n" for k in range(40))
        )
    assert "s_val.csv is not read: validation samples are" in said(
        lambda: load(str(tmp_path / "s_train.csv"))
    )


@pytest.mark.parametrize("ids", [("001", "1"), ("P-01", "P1")])
def test_subjects_with_leading_zeros_stop_are_merged_or_kept(ids: tuple[str, str]) -> None:
    padded, plain = ids
    people = [[padded, "x7"] * 30, [plain, "x8", "x9"] * 20]
    silos: list[Any] = [table(p=own, c=np.arange(60) + k) for k, own in enumerate(people)]
    with pytest.raises(
        UserError, match=f"the subject column has '{padded}' .* and '{plain}' .* the same"
    ):
        ekiden.federate(silos, subject_column="p")

    def people_of(how: str) -> int:
        data = ekiden.federate(silos, subject_column="p", spelling=how, drop_columns="c").dataset
        return len({*data.train.subject.tolist(), *data.test.subject.tolist()})  # type: ignore[union-attr]

    assert people_of("keep") == 5
    assert people_of("merge") == 4
    silos[0]["p"] = [padded, plain] * 30  # a silo that has both tells them apart
    line = said(lambda: ekiden.federate(silos, subject_column="p", drop_columns="c"))
    assert (
        f"subjects '{padded}' and '{plain}' of silo client-0 differ in leading zeros or hyphens "
        "only" in line
    )


def test_silos_that_differ_step_by_step_are_in_one_unit_and_a_gap_is_another() -> None:
    rng = np.random.default_rng(0)
    sizes = {f"s{k}": 2.0**k for k in range(8)}  # small and large ones

    def moments(each: dict[str, float]) -> Any:
        return {
            s: {"column 'v'": ColumnMoments.of(m * rng.uniform(0.5, 1.5, 99), "v")}
            for s, m in each.items()
        }

    assert not said(lambda: compare_units(moments(sizes)))
    line = said(lambda: compare_units(moments(sizes | {"odd": 1e6})))
    assert "column 'v' of odd differs from other silos by a factor of about" in line
    assert line.count("differs") == 1


def test_what_silos_have_by_nature_is_no_doubt_about_them() -> None:
    n = np.arange(60)
    schools: dict[str, Any] = {"boys": n * 0, "girls": n * 0 + 1, "men": n * 0}
    mixed: dict[str, Any] = {f"s{k}": (n + k) % 2 for k in range(5)}
    ones: dict[str, Any] = {"a": 1 + (n > 57), "b": 1 + (n > 10)}  # nearly all 1, and mostly 2
    for held in (schools | mixed, ones):
        told = {silo: {"column 'v'": ColumnMoments.of(v * 1.0, "v")} for silo, v in held.items()}
        assert not said(lambda told=told: compare_units(told))  # type: ignore[misc]


def test_coarse_rows_with_several_labels_are_no_doubt() -> None:
    rng = np.random.default_rng(0)
    coarse = {
        "a": rng.integers(0, 3, 300),
        "b": rng.choice(["x", "y"], 300),
        "label": rng.integers(0, 2, 300),
    }
    assert "with several labels" not in said(lambda: load(coarse))


def waves(seed: int, rate: float = 1.0, sign: int = 1) -> Any:
    """Return signals of a slow and of a fast class, with peaks that point up."""
    rng, y = np.random.default_rng(seed), np.arange(40) % 2
    phase = (np.arange(128) / (16 - 6 * y[:, None]) / rate + rng.random((40, 1))) % 1
    return (
        (np.exp(-40 * (phase - 0.5) ** 2) + rng.normal(0, 0.05, (40, 128)))[:, None] * sign
    ).astype(np.float32), y


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        (
            waves(2, rate=0.5),
            "signals of c change .* times as fast or as slowly as at other silos: bring all to one "
            "sam",
        ),
        (
            waves(2, sign=-1),
            "signals of c seem as if they are upside down, compared with other silos",
        ),
    ],
)
def test_signals_of_one_silo_at_another_rate_or_upside_down_are_named(odd: Any, line: str) -> None:
    silos = {"a": waves(0), "b": waves(1), "c": waves(2)}
    assert not said(lambda: ekiden.federate(silos))
    assert re.search(line, said(lambda: ekiden.federate(silos | {"c": odd})))


def test_masks_of_one_silo_with_two_classes_changed_places_are_named() -> None:
    silos = {name: (pictures(40), torch.rand(40, 6, 6).gt(0.9).long()) for name in "abc"}
    assert "changed places" not in said(lambda: ekiden.federate(silos, task="segmentation"))
    silos["b"] = (silos["b"][0], 1 - silos["b"][1])
    line = said(lambda: ekiden.federate(silos, task="segmentation"))
    assert "masks of b seem to have '0' and '1' changed places, compared with other silos" in line


def test_rows_that_a_join_repeated_are_named() -> None:
    rng = np.random.default_rng(0)
    visits = {name: np.tile(values, 3) for name, values in table(60, c=rng.normal(size=60)).items()}
    line = said(lambda: load(visits | {"lab": rng.normal(size=180)}))
    assert (
        "training rows of the table equal another in all but column 'lab', so such a row may be in "
        "training" in line
    )
    assert "equal another" not in said(
        lambda: load(table(180, lab=rng.normal(size=180), c=np.arange(180) % 20))
    )


def test_images_as_floats_in_two_ranges_are_named() -> None:
    unit, y = torch.rand(20, 3, 8, 8), Y[:20]
    line = said(lambda: ekiden.federate({"a": (unit, y), "b": (unit * 2 - 1, y)}))
    assert "images of silo b are floats below and above 0, those of silo a only above" in line


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (torch.rand(20, 4, 8, 8).mul(255).byte(), ""),
        (torch.rand(20, 3, 32, 3), "if the channels come last, move them"),
        (torch.rand(20, 3, 32, 3).mul(255).byte(), "if the channels come last, move them"),
        (
            torch.where(torch.arange(20)[:, None] % 5 > 0, torch.randn(20, 4), -999.0),
            "value 0 of the inputs of train hol",
        ),
    ],
)
def test_arrays_that_are_not_what_they_seem_are_named(x: torch.Tensor, line: str) -> None:
    found = said(lambda: from_tensors((x, Y[:20])))
    assert line in found if line else not found


def test_numbers_of_classes_are_names_in_any_order_of_these() -> None:
    def silo(names: list[str], seed: int) -> Any:
        """Return what Hugging Face makes of a column of ClassLabel."""
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 2, 60)
        label = (codes == names.index("f")) ^ (rng.random(60) < 0.2)
        told = json.dumps({"info": {"features": {"sex": {"names": names}}}})
        return pa.table(
            {"a": rng.normal(size=60), "sex": codes, "label": label}
        ).replace_schema_metadata({"huggingface": told})

    data = ekiden.federate([silo(["f", "m"], 0), silo(["m", "f"], 1)]).dataset
    assert data.inputs.vocabularies == (("f", "m"),)  # type: ignore[attr-defined]
    assert load(silo(["f", "m"], 0), group_column="sex").groups == ("f", "m")


def test_a_quotation_mark_that_swallows_rows_is_named(tmp_path: Path) -> None:
    lines = [f"{k},{'ok' if k % 3 else 'high'},{k % 2}" for k in range(40)]
    lines[5], lines[15] = '5,"ok,1', '15,ok",1'
    (tmp_path / "t.csv").write_text("\n".join(["a,note,label", *lines]))
    line = said(lambda: load(str(tmp_path / "t.csv")))
    assert "a cell of column 'note' of " in line
    assert (
        "holds 9 lines that look like rows ('6,high,0'): check for a quotation mark that is not "
        "closed" in line
    )
    (tmp_path / "t.csv").write_text(
        "\n".join(
            ["a,note,label", *(f'{k * k},"one\ntwo, three\nfour",{k % 2}' for k in range(40))]
        )
    )
    assert "quotation" not in said(lambda: load(str(tmp_path / "t.csv")))


@pytest.mark.parametrize(
    ("columns", "how", "line"),
    [
        (
            {"c": [f"{2022 + k % 3}-{1 + k % 12:02d}" for k in range(60)]},
            {},
            "months, quarters or weeks without a day",
        ),
        (
            {"c": [9007199254740994.0 + 2 * (k // 2) for k in range(60)]},
            {"subject_column": "c"},
            "codes above 2.53",
        ),
    ],
)
def test_what_would_be_read_as_other_names_is_refused(columns: Any, how: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        load(table(**columns), **how)


def test_complex_numbers_of_a_file_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.ones((4, 2, 16), dtype=np.complex64), y=np.arange(4) % 2)
    with pytest.raises(UserError, match=r"not an array of numbers .*give real and imaginary parts"):
        load(str(tmp_path / "t.npz"))


def test_one_text_has_the_same_tokens_in_any_form_of_its_characters() -> None:
    text = "Élève: café brûlé"
    for other in (unicodedata.normalize("NFD", text), "Él\u00adève:\u200b café brûlé\ufeff"):
        assert torch.equal(Tokens().encode([other]), Tokens().encode([text]))


def test_images_that_another_library_allows_to_be_cut_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    cut = encoded(Image.fromarray(pictures(1, 64, 64)[0].permute(1, 2, 0).numpy()), "JPEG")[:1500]
    assert "missing parts of damaged images are read as grey" in said(
        lambda: Images().encode([cut])
    )


def test_pictures_of_the_test_that_were_compressed_again_are_named() -> None:
    smooth = [
        Image.fromarray(pictures(1, 3, 3)[0].permute(1, 2, 0).numpy()).resize((24, 24))
        for _ in range(60)
    ]
    again = [Image.open(BytesIO(encoded(image, "JPEG", quality=95))) for image in smooth[:10]]
    x, copies = (
        torch.from_numpy(np.stack([*map(np.asarray, each)])).movedim(3, 1)
        for each in (smooth, again)
    )
    y = torch.arange(60) % 2
    line = said(lambda: from_tensors((x, y), (torch.cat([copies, 255 - x[:10]]), y[:20])))
    assert re.search(
        r"\d+ of 20 test images .* nearly a training image, as if it was compressed again", line
    )
    assert "compressed" not in said(lambda: from_tensors((x[:40], y[:40]), (x[40:], y[40:])))

"""DICOM files and NIfTI volumes that show the same give the same tensor."""

import gzip
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import join, load
from ekiden.readers import medical
from ekiden.readers.kinds import Images
from ekiden.runs.batches import SampleReader
from tests.fuzz import examples
from tests.readers.pictures import dicom, encoded

pydicom, nibabel = pytest.importorskip("pydicom"), pytest.importorskip("nibabel")
few = settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**16)
AXES = [
    tuple(zip(order, mirrored, strict=True))
    for order in itertools.permutations(range(3))
    for mirrored in itertools.product((1, -1), repeat=3)
]
"""the 48 ways to store a volume: for each stored axis, which axis of the patient it is, and whether
it is mirrored"""


def volume(seed: int = 0, shape: tuple[int, ...] = (4, 5, 6)) -> NDArray[np.int16]:
    return np.random.default_rng(seed).integers(0, 1000, shape).astype(np.int16)


def shown(values: Any) -> NDArray[Any]:
    """Return an axial slice (x, y) of a volume in RAS+ as a picture: front above, left at the
    left."""
    return np.asarray(values)[:, ::-1].T


# NIfTI


@few
@given(seeds, st.sampled_from(AXES), st.integers(0, 5), st.sampled_from([".nii", ".nii.gz"]))
def test_a_volume_is_turned_by_its_affine(
    tmp_path: Path, seed: int, axes: Any, number: int, ending: str
) -> None:
    values = volume(seed)
    tilt = np.eye(4)  # a scanner that is tilted by 20 degrees
    tilt[:3, :3] = np.array([[0.94, -0.34, 0], [0.34, 0.94, 0], [0, 0, 1]])
    for affine in (np.diag([2.0, 3, 4, 1]), tilt):
        upright = nibabel.Nifti1Image(values, affine)
        nibabel.save(
            upright.as_reoriented(nibabel.orientations.ornt_transform(AXES[0], axes)),
            tmp_path / f"a{ending}",
        )
        assert (
            np.asarray(medical.load(tmp_path / f"a{ending}#{number}").image)
            == shown(values[:, :, number])
        ).all()
        assert (
            np.asarray(medical.load(tmp_path / f"a{ending}").image) == shown(values[:, :, 3])
        ).all()
        assert medical.look(tmp_path / f"a{ending}").size == (4, 5)


@pytest.mark.parametrize("axes", AXES)
def test_a_volume_of_one_slice_is_that_slice(tmp_path: Path, axes: Any) -> None:
    values = volume(shape=(1, 5, 6))
    upright = nibabel.Nifti1Image(values, np.eye(4))
    nibabel.save(
        upright.as_reoriented(nibabel.orientations.ornt_transform(AXES[0], axes)),
        tmp_path / "a.nii",
    )
    assert (np.asarray(medical.load(tmp_path / "a.nii").image) == shown(values[0])).all()
    assert medical.look(tmp_path / "a.nii").pages == 1


def test_values_of_a_volume(tmp_path: Path) -> None:
    scaled = nibabel.Nifti1Image(volume(), np.eye(4))
    scaled.header.set_slope_inter(2.0, -100.0)
    scaled.dataobj[:] = volume()
    nibabel.save(scaled, tmp_path / "a.nii")
    stored = np.asarray(nibabel.load(tmp_path / "a.nii").dataobj)
    assert np.allclose(np.asarray(medical.load(tmp_path / "a.nii").image), shown(stored[:, :, 3]))
    big = nibabel.Nifti1Image(volume(), np.eye(4), nibabel.Nifti1Header(endianness=">"))
    nibabel.save(big, tmp_path / "b.nii")
    assert (np.asarray(medical.load(tmp_path / "b.nii").image) == shown(volume()[:, :, 3])).all()
    colours = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    rgb = colours.view([("R", "u1"), ("G", "u1"), ("B", "u1")])[..., 0]
    nibabel.save(nibabel.Nifti1Image(rgb, np.eye(4)), tmp_path / "c.nii")
    picture = np.asarray(medical.load(tmp_path / "c.nii").image)
    assert (picture == np.stack([shown(colours[:, :, 3, k]) for k in range(3)], axis=2)).all()
    assert Images().encode([tmp_path / "c.nii#3"]).shape == (1, 3, 5, 4)
    holes = volume().astype(np.float32)
    holes[0] = np.nan
    nibabel.save(nibabel.Nifti1Image(holes, np.eye(4)), tmp_path / "d.nii")
    with pytest.warns(DataWarning, match="have pixels that are not a number"):
        x = Images(window=(-1000, 1000)).encode([tmp_path / "d.nii#0"])
    assert (x[0, 0, :, 0] == 0).all()
    assert (x[0, 0, :, 1:] >= 127).all()


def test_volumes_that_cannot_be_cut_say_why(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(volume(shape=(4, 5, 6, 1)), np.eye(4)), tmp_path / "a.nii")
    assert (np.asarray(medical.load(tmp_path / "a.nii").image) == shown(volume()[:, :, 3])).all()
    nibabel.save(nibabel.Nifti1Image(volume(shape=(4, 5, 6, 2)), np.eye(4)), tmp_path / "b.nii")
    with pytest.raises(
        UserError, match=r"b.nii: it has 4 dimensions, 4 x 5 x 6 x 2: give a volume with three"
    ):
        Images().encode([tmp_path / "b.nii"])
    nibabel.save(nibabel.Nifti1Image(volume().astype(np.complex64), np.eye(4)), tmp_path / "c.nii")
    with pytest.raises(UserError, match="its voxels are complex64: give real numbers"):
        Images().encode([tmp_path / "c.nii"])
    nibabel.save(nibabel.Nifti1Image(volume(), np.eye(4)), tmp_path / "d.nii.gz")
    whole = (tmp_path / "d.nii.gz").read_bytes()
    for share in (0.0, 0.3, 0.9):
        (tmp_path / "d.nii.gz").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(
            UserError, match=r"d.nii.gz cannot be decoded \(.*\): replace or remove it"
        ) as caught:
            Images(window=(0, 1000)).encode([tmp_path / "d.nii.gz"])
        assert "\n" not in str(caught.value)
    nibabel.save(nibabel.Nifti1Image(volume(shape=(4, 5)), np.eye(4)), tmp_path / "e.nii")
    assert (np.asarray(medical.load(tmp_path / "e.nii").image) == shown(volume(shape=(4, 5)))).all()


def test_headers_that_disagree_or_say_nothing_are_counted(tmp_path: Path) -> None:
    both = nibabel.Nifti1Image(volume(), np.eye(4))
    both.set_qform(np.diag([-1.0, 1, 1, 1]), 1)
    both.set_sform(np.eye(4), 1)
    none = nibabel.Nifti1Image(volume(), None)
    none.header["qform_code"] = none.header["sform_code"] = 0
    nibabel.save(both, tmp_path / "both.nii")
    nibabel.save(none, tmp_path / "none.nii")
    files = [tmp_path / "both.nii#3", tmp_path / "none.nii#3"]
    with pytest.warns(DataWarning) as seen:
        x = Images(window=(0, 1000)).encode(files)
    first, second = sorted(str(one.message) for one in seen)
    assert "1 of 2 images in the images given do not say where their axes point" in first
    assert (
        "1 of 2 images in the images given have a qform and an sform that point to different sides"
        in second
    )
    assert torch.equal(x[0, 0], x[1, 0].flip(-1))


# DICOM


@few
@given(
    seeds,
    st.booleans(),
    st.integers(2, 16),
    st.floats(0.25, 4).map(lambda x: round(x, 3)),
    st.integers(-2000, 2000),
)
def test_grey_values_are_in_the_unit_of_the_file(
    tmp_path: Path, seed: int, signed: bool, bits: int, slope: float, intercept: int
) -> None:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    stored = np.random.default_rng(seed).integers(low, high + 1, (3, 5))
    stored[0, :2] = low, high
    how: dict[str, Any] = {
        "bits": bits,
        "signed": signed,
        "RescaleSlope": slope,
        "RescaleIntercept": intercept,
    }
    dicom(tmp_path / "bright", stored, "MONOCHROME2", **how)
    dicom(tmp_path / "dark", low + high - stored, "MONOCHROME1", **how)
    values = (stored * slope + intercept).astype(np.float32)
    assert np.allclose(np.asarray(medical.load(tmp_path / "bright").image), values)
    assert np.allclose(np.asarray(medical.load(tmp_path / "dark").image), values)
    bright, dark = Images(window=(-500, 700)).encode([tmp_path / "bright", tmp_path / "dark"])
    assert torch.equal(bright, dark)


def test_bits_that_are_not_stored_do_not_count(tmp_path: Path) -> None:
    for signed in (False, True):
        dicom(tmp_path / "a", np.array([[0x0FFF, 0x1001]]), "MONOCHROME2", bits=12, signed=signed)
        wanted = [-1 if signed else 4095, 1]
        assert np.asarray(medical.load(tmp_path / "a").image).tolist() == [wanted]


@few
@given(seeds, st.booleans())
def test_colours(tmp_path: Path, seed: int, planar: bool) -> None:
    colours = np.random.default_rng(seed).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    dicom(tmp_path / "rgb", colours, "RGB", PlanarConfiguration=int(planar))
    assert (np.asarray(medical.load(tmp_path / "rgb").image) == colours).all()
    ycc = np.asarray(Image.fromarray(colours).convert("YCbCr"))
    dicom(tmp_path / "ycc", ycc, "YBR_FULL", PlanarConfiguration=int(planar))
    assert np.abs(np.asarray(medical.load(tmp_path / "ycc").image).astype(int) - colours).max() <= 3
    deep = dicom(tmp_path / "deep", colours.astype(np.uint16) * 16 + 3, "RGB", bits=12)
    assert (np.asarray(medical.load(deep).image) == colours).all()
    palette, codes = colours.reshape(15, 3), np.arange(15).reshape(3, 5)
    for wide in (False, True):
        table: dict[str, Any] = {}
        for k, name in enumerate(("Red", "Green", "Blue")):
            values = palette[:, k].astype(np.uint16) * (257 if wide else 1)
            table[f"{name}PaletteColorLookupTableDescriptor"] = [15, 0, 16]
            table[f"{name}PaletteColorLookupTableData"] = values.tobytes()
        dicom(tmp_path / "palette", codes, "PALETTE COLOR", **table)
        assert (np.asarray(medical.load(tmp_path / "palette").image) == colours).all()
        png = encoded(Image.fromarray(colours))
        assert torch.equal(*Images().encode([tmp_path / "palette", png]))


def test_films(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 3), dtype=np.uint8)
    dicom(tmp_path / "film", frames, "RGB", NumberOfFrames=5)
    with pytest.warns(DataWarning, match=r"\(up to 5\); the middle one is read \(number 2 of 5"):
        x = Images().encode([tmp_path / "film"])
    assert torch.equal(x[0], torch.from_numpy(frames[2]).permute(2, 0, 1))
    for k in range(5):
        assert (np.asarray(medical.load(tmp_path / f"film#{k}").image) == frames[k]).all()
    with pytest.raises(UserError, match="film#5: it has 5 frames, so there is no frame 5"):
        Images().encode([tmp_path / "film#5"])
    groups = []
    for slope in (1, 2, 3, 4, 5):  # enhanced files scale each frame
        scaling, group = pydicom.Dataset(), pydicom.Dataset()
        scaling.RescaleSlope, scaling.RescaleIntercept, scaling.RescaleType = slope, -slope, "US"
        group.PixelValueTransformationSequence = [scaling]
        groups.append(group)
    more: dict[str, Any] = {"NumberOfFrames": 5, "PerFrameFunctionalGroupsSequence": groups}
    dicom(tmp_path / "grey", frames[..., 0], "MONOCHROME2", **more)
    for k in range(5):
        assert (
            np.asarray(medical.load(tmp_path / f"grey#{k}").image)
            == frames[k, ..., 0].astype(int) * (k + 1) - k - 1
        ).all()


def test_grey_levels_of_few_bits_go_from_black_to_white(tmp_path: Path) -> None:
    for bits, most in ((1, 1), (4, 15), (8, 255)):
        dicom(tmp_path / f"{bits}", np.array([[0, most]]), "MONOCHROME2", bits=bits)
    assert (
        Images().encode([tmp_path / "1", tmp_path / "4", tmp_path / "8"]).flatten(1).tolist()
        == [[0, 255]] * 3
    )
    dicom(tmp_path / "dark", np.array([[0, 1]]), "MONOCHROME2")
    assert Images().encode([tmp_path / "dark"]).flatten().tolist() == [0, 1]


def test_the_window_of_the_file_is_suggested(tmp_path: Path) -> None:
    dicom(
        tmp_path / "a",
        np.array([[0, 2000]]),
        "MONOCHROME2",
        bits=12,
        WindowCenter=["40", "50"],
        WindowWidth=["400", "9"],
    )
    line = r"from 0 to 2000: .*, as in pixel_window=\[-160, 240\] \(what the file shows\)"
    with pytest.raises(UserError, match=line):
        Images().encode([tmp_path / "a"])


def test_files_without_extension_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(0), []
    for label in ("ill", "well"):
        (tmp_path / "scans" / label).mkdir(parents=True)
        (tmp_path / "scans" / label / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
        for k in range(6):
            name = f"{label}/IM{k:06d}" if k % 2 else f"{label}/1.2.840.113619.{k}"
            dicom(tmp_path / "scans" / name, rng.integers(0, 4096, (8, 8)), "MONOCHROME2", bits=12)
            rows.append((f"scans/{name}", label))
    data = load(str(tmp_path / "scans"), pixel_window=(0, 4095))
    assert (len(data.train) + len(data.test), data.classes) == (12, ("ill", "well"))
    pandas.DataFrame(rows, columns=["file", "label"]).to_csv(tmp_path / "t.csv", index=False)
    table = load(str(tmp_path / "t.csv"), image_column="file", pixel_window=(0, 4095))
    for kind in (0, 1):
        both = [
            torch.cat([part.x[part.y == kind] for part in (one.train, one.test)])
            for one in (table, data)
        ]
        assert {x.numpy().tobytes() for x in both[0]} == {x.numpy().tobytes() for x in both[1]}


def test_files_without_extension_are_predicted(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for label, value in (("dark", 100), ("light", 3900)):
        Path(f"scans/{label}").mkdir(parents=True)
        for k in range(10):
            dicom(Path(f"scans/{label}/IM{k}"), np.full((8, 8), value + k), "MONOCHROME2", bits=12)
    flags = (
        "--pixel-window",
        "0",
        "4095",
        "--clients",
        "2",
        "--partition",
        "iid",
        "--model",
        "mlp",
        "--epochs",
        "10",
    )
    code, said = command("run", "fedseq", "--data", "scans", *flags)
    assert code == 0, said
    code, said = command("predict", "runs/fedseq-scans-seed0", "scans", "-o", "answers.csv")
    assert code == 0, said
    answers = pandas.read_csv("answers.csv")
    assert len(answers) == 20
    assert (answers.prediction == answers.file.str.split("/").str[-2]).all()
    code, said = command("evaluate", "runs/fedseq-scans-seed0", "--data", "scans", "--part", "test")
    assert code == 0, said


def test_folders_without_images_and_odd_files_name_the_cause(tmp_path: Path) -> None:
    (tmp_path / "scans" / "ill").mkdir(parents=True)
    for name in ("a.mha", "b.mha", "c"):
        (tmp_path / "scans" / "ill" / name).write_bytes(b"0" * 300)
    with pytest.raises(
        UserError,
        match=r'holds no image: the extensions of its 3 files \(.mha, none\) .* "DICM" at byte',
    ):
        load(str(tmp_path / "scans"))
    with pytest.raises(
        UserError, match=r"scans holds nothing to predict \(the extensions of its 3 files"
    ):
        SampleReader(Images(), (1, 8, 8)).found([tmp_path / "scans"])
    (tmp_path / "a.dcm").write_bytes(b"0" * 300)
    with pytest.raises(UserError, match=r'a.dcm: it has no "DICM" at byte 128'):
        Images().encode([tmp_path / "a.dcm"])
    data = pydicom.dcmread(dicom(tmp_path / "b", np.zeros((2, 2)), "MONOCHROME2"))
    del data.PixelData
    data.Modality = "SR"
    data.save_as(tmp_path / "b")
    with pytest.raises(UserError, match=r"b: it holds no picture \(SR\): leave it out"):
        Images().encode([tmp_path / "b"])
    data = pydicom.dcmread(dicom(tmp_path / "c", np.zeros((2, 2)), "MONOCHROME2"))
    data.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless
    data.PixelData = pydicom.encaps.encapsulate([b"junk" * 8])
    data["PixelData"].is_undefined_length = True
    data.save_as(tmp_path / "c", enforce_file_format=True)
    with pytest.raises(
        UserError, match=r"c: its pixels are compressed as JPEG-LS Lossless .* no installed package"
    ) as said:
        Images().encode([tmp_path / "c"])
    assert "\n" not in str(said.value)
    dicom(tmp_path / "h", np.zeros((20, 20)), "MONOCHROME2", bits=12, HighBit=15)
    with pytest.raises(UserError, match="h: 12 bits are stored, and the highest is number 15"):
        Images().encode([tmp_path / "h"])
    whole = dicom(tmp_path / "d", np.zeros((20, 20)), "MONOCHROME2").read_bytes()
    (tmp_path / "d").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"d cannot be decoded \(.*\): replace or remove it"):
        Images().encode([tmp_path / "d"])


def in_groups(spacing: float) -> dict[str, Any]:
    """Return the spacing as files of several frames give it."""
    measures, group = pydicom.Dataset(), pydicom.Dataset()
    measures.PixelSpacing, group.PixelMeasuresSequence = [spacing, spacing], [measures]
    return {"SharedFunctionalGroupsSequence": [group]}


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        (
            {"PixelSpacing": [0.5, 0.5]},
            {"PixelSpacing": [1, 1]},
            "s0 are 0.5 mm high, those of other silos 1 mm",
        ),
        (
            {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0]},
            {"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]},
            "sagittal",
        ),
        (
            {"Modality": "CT"},
            {"Modality": "MR"},
            "are CT, those in .*s1 MR: check that they show the same",
        ),
        (
            {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]},
            {},
            "4 of 8 images in .* are localizers",
        ),
        (
            {"Modality": "DX", "ViewPosition": "AP"},
            {"Modality": "DX", "ViewPosition": "PA"},
            "are DX AP, those .* DX PA",
        ),
        (in_groups(0.5), in_groups(1), "s0 are 0.5 mm high, those of other silos 1 mm"),
        (
            {"BurnedInAnnotation": "YES"},
            {},
            "4 of 8 images in .* have names or marks in their pixels",
        ),
        ({"PresentationLUTShape": "INVERSE"}, {}, "4 of 8 images in .* are to be shown inverted"),
        (
            {"PatientID": "P1"},
            {"PatientID": "P2"},
            "headers name 2 patients for 8 images, so a patient may be in",
        ),
    ],
)
def test_silos_whose_scans_were_taken_otherwise_are_named(
    tmp_path: Path, one: Any, other: Any, line: str
) -> None:
    for k, how in enumerate((one, other)):
        for place in range(4):
            (folder := tmp_path / f"s{k}" / "ab"[place % 2]).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(4 * k + place).integers(0, 256, (4, 4))
            dicom(folder / f"{place}.dcm", pixels, "MONOCHROME2", bits=8, **how)
    with pytest.warns(DataWarning, match=line) as seen:
        join([str(tmp_path / "s0"), str(tmp_path / "s1")])
    assert len(seen) == 1


def test_silos_whose_volumes_have_another_spacing_are_named(tmp_path: Path) -> None:
    for k, height in enumerate((0.7, 0.7, 2.1)):
        for place in range(4):
            (folder := tmp_path / f"s{k}" / "ab"[place % 2]).mkdir(parents=True, exist_ok=True)
            image = nibabel.Nifti1Image(
                volume(4 * k + place, (4, 5, 1)) % 256, np.diag([height, height, 3, 1])
            )
            nibabel.save(image, folder / f"{place}.nii")
    with pytest.warns(DataWarning, match="s2 are 2.1 mm high, those of other silos 0.7 mm") as seen:
        join([str(tmp_path / f"s{k}") for k in range(3)])
    assert len([one for one in seen if "mm high" in str(one.message)]) == 1


@pytest.mark.parametrize("ending", [".nii.gz", ".dcm"])
def test_a_header_that_says_more_pixels_than_any_memory_holds_is_refused(
    ending: str, tmp_path: Path
) -> None:
    """Of files of a few kilobytes, before anything is decoded."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for k in range(6):
            Image.fromarray((volume(k)[:, :, 0] % 256).astype(np.uint8)).save(
                tmp_path / name / f"{k}.png"
            )
    bomb = tmp_path / "a" / f"bomb{ending}"
    if ending == ".dcm":
        dicom(bomb, np.zeros((4, 5)), "MONOCHROME2", Rows=60_000, Columns=60_000)
    else:
        header = nibabel.Nifti1Header()
        header.set_data_shape((30_000, 30_000, 1))
        header["vox_offset"], header["magic"] = 352, b"n+1"
        bomb.write_bytes(gzip.compress(header.binaryblock + bytes(1_000_000)))
    assert bomb.stat().st_size < 5_000
    with pytest.raises(
        UserError, match=rf"bomb{ending}: its header says .*0000 pixels, 67108864 are read at most"
    ):
        load(tmp_path, size=8)

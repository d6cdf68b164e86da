"""What is published: all places that name the version agree, the packages hold what they must, and
they install."""

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ekiden import __version__

ROOT = Path(__file__).parents[1]


def test_the_badges_say_what_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = (ROOT / "docs" / "assets" / "badges.svg").read_text(encoding="utf-8")
    low, high = re.search(r"torch>=([\d.]+),<2\.(\d+)", " ".join(project["dependencies"])).groups()  # type: ignore[union-attr]
    python = project["requires-python"].removeprefix(">=")
    said = f"version {__version__}, not released, python {python} or later, pytorch {low} to 2.{int(high) - 1}, "
    assert f"{said}licence {project['license']}" in badges


def _citation() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")  # comes with mkdocs
    read: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return read


def test_the_citation_is_valid_and_names_this_version() -> None:
    """By the schema of the Citation File Format 1.2.0, as far as the file uses it."""
    cited = _citation()
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # what the format demands
    assert set(cited) <= {
        "cff-version", "message", "title", "authors", "type", "version", "license", "keywords", "abstract",
        "date-released", "doi", "url", "repository-code", "identifiers", "references", "preferred-citation",
    }  # fmt: skip
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] in {"software", "dataset"}
    assert all(
        isinstance(cited[name], str) and cited[name]
        for name in ("message", "title", "version", "license")
    )
    assert all(isinstance(word, str) for word in cited["keywords"])
    assert len(set(cited["keywords"])) == len(cited["keywords"]) > 0
    for author in cited["authors"]:  # a person, or an entity, which has a name
        assert set(author) <= {"name", "website", "email"} or {
            "family-names",
            "given-names",
        } <= set(author)
    for paper in cited["references"]:
        assert {"type", "title", "authors"} <= set(paper)
        assert all({"family-names", "given-names"} <= set(author) for author in paper["authors"])
    assert cited["version"] == __version__
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


def test_a_tag_publishes_what_ci_has_built() -> None:
    yaml = pytest.importorskip("yaml")
    path = ROOT / ".github" / "workflows" / "publish.yml"
    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert flow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    build, publish = (flow["jobs"][name] for name in ("build", "publish"))
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}, "a trusted publisher needs no token"
    assert any("python -m build" in step.get("run", "") for step in build["steps"])


def test_the_changelog_has_what_is_not_released_above_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[:2] == ["Unreleased", __version__]
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source package, and the wheel that is built from it, as `python -m build` makes them for
    an upload."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


@pytest.mark.slow
def test_the_packages_hold_what_they_must_and_nothing_else(packages: tuple[Path, Path]) -> None:
    source, wheel = packages
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        told = file.read(f"ekiden-{__version__}.dist-info/METADATA").decode()
    tree = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/ekiden").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    about = {name for name in names if name.startswith(f"ekiden-{__version__}.dist-info/")}
    assert names - about == tree
    assert {"ekiden/py.typed", "ekiden/lab/reporting/page.html"} <= tree
    assert {name.partition("/")[2] for name in about} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip
    assert f"\nVersion: {__version__}\n" in told
    assert "\nLicense-Expression: Apache-2.0\n" in told
    assert wheel.stat().st_size < 2_000_000
    with tarfile.open(source) as file:
        parts = {name.split("/")[1] for name in file.getnames() if "/" in name}
    assert {
        "src",
        "tests",
        "docs",
        "experiments",
        "LICENSE",
        "README.md",
        "CITATION.cff",
        "PKG-INFO",
    } <= parts
    assert not parts & {".git", ".venv", "runs", "site", "dist"}


@pytest.mark.slow
def test_the_wheel_runs_in_a_fresh_environment(packages: tuple[Path, Path], tmp_path: Path) -> None:
    """Without the repository; only the packages that Ekiden depends on are those of this
    environment."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    here = home / ("Scripts" if sys.platform == "win32" else "bin")
    site = next(home.rglob("site-packages"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(here / "python"),
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, str(packages[1])], check=True, capture_output=True)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text(
        "".join(f"{path}\n" for path in others)
    )  # behind its own, without their .pth files

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(here / words[0]), *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("ekiden", "--version").strip() == __version__
    assert Path(
        run("python", "-c", "import ekiden; print(ekiden.__file__)").strip()
    ).is_relative_to(site)
    run("ekiden", "run", "fedgram", "--clients", "3", "--out", "runs")
    run("ekiden", "report", "runs", "-o", "report")
    assert (tmp_path / "report" / "index.html").exists()

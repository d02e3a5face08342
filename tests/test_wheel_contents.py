"""The built wheel and sdist hold the tree: no module, sub-package or data file is forgotten."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Folder in the tree -> folder in the wheel.
FOLDERS = {"tvmpaged": "tvmpaged", "runtime": "tvmpaged/runtime", "schedules": "tvmpaged/schedules"}

#: Data files are made when the wheel is built; these stand for them.
DATA = ("tvmpaged/data/lib/libtvm_runtime.so", "tvmpaged/data/bundles/cpu/x/manifest.json")

IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "data", "*.egg-info", ".*")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what is packaged, with data files."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in (*FOLDERS, "ci", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=IGNORED)
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, copy)
    for name in DATA:
        (copy / name).parent.mkdir(parents=True)
        (copy / name).write_text("data")
    return copy


def build(tree: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run([*command, "."], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tree / "dist").glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
    return result


def modules(tree: Path) -> set[str]:
    return {
        f"{target}/{file.relative_to(tree / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (tree / folder).rglob("*.py")
    }


def test_the_wheel_holds_every_module_and_data_file(tree: Path) -> None:
    with zipfile.ZipFile(build(tree, "wheel")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == modules(tree) | set(DATA) | {"tvmpaged/py.typed"}


def test_the_sdist_holds_what_the_wheel_is_built_from(tree: Path) -> None:
    with tarfile.open(build(tree, "sdist")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {
        file.relative_to(tree).as_posix()
        for folder in (*FOLDERS, "ci", "tests")
        for file in (tree / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert sources <= names
    assert {"LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "pyproject.toml"} <= names

"""Where TVM's runtime libraries are, without importing TVM.

An installed wheel of tvmpaged carries them; a source checkout finds them in the installed
apache-tvm, through its metadata: importing it would bring the compiler.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

RUNTIME = "libtvm_runtime.so"
RUNTIME_CUDA = "libtvm_runtime_cuda.so"

_CARRIED = Path(__file__).parent / "data" / "lib"


def candidates(name: str = RUNTIME) -> list[Path]:
    """Return the places where library `name` may be, best first."""
    places = [_CARRIED / name]
    with suppress(PackageNotFoundError):
        places.append(Path(str(distribution("apache-tvm").locate_file(f"tvm/lib/{name}"))))
    return [place.absolute() for place in places]


def find(name: str = RUNTIME) -> Path:
    """Return the path of library `name`.

    Raises
    ------
    FileNotFoundError
        Listing the places that were looked at.
    """
    places = candidates(name)
    for place in places:
        if place.is_file():
            return place
    looked = "\n".join(f"  {place}" for place in places)
    raise FileNotFoundError(
        f"{name} is not in\n{looked}\nA wheel of tvmpaged carries it; a source checkout needs "
        "apache-tvm: pip install 'tvmpaged[tune]'"
    )


def runtime_version() -> str | None:
    """Return the release of the library that `find` returns, or None when there is none."""
    if (_CARRIED / RUNTIME).is_file():
        return (_CARRIED / "VERSION").read_text(encoding="utf-8").strip()
    with suppress(PackageNotFoundError):
        return distribution("apache-tvm").version
    return None

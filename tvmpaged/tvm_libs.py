"""Where TVM's runtime libraries are, and loading them, without importing TVM.

An installed wheel of tvmpaged carries them; a source checkout finds them in the installed
apache-tvm, through its metadata: importing it would bring the compiler.
"""

import ctypes
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

RUNTIME = "libtvm_runtime.so"
RUNTIME_CUDA = "libtvm_runtime_cuda.so"

_CARRIED = Path(__file__).parent / "data" / "lib"


def candidates(name: str = RUNTIME) -> list[Path]:
    """Return the places where library `name` may be, best first.

    A process can hold one copy only. So an installed apache-tvm of the carried release comes first:
    whoever imports ``tvm`` later in the same process loads that copy.
    """
    carried, installed = [_CARRIED / name], []
    with suppress(PackageNotFoundError):
        tvm = distribution("apache-tvm")
        installed.append(Path(str(tvm.locate_file(f"tvm/lib/{name}"))))
        if tvm.version == _carried_version():
            carried, installed = installed, carried
    return [place.absolute() for place in (*carried, *installed)]


def _carried_version() -> str | None:
    if (_CARRIED / RUNTIME).is_file():
        return (_CARRIED / "VERSION").read_text(encoding="utf-8").strip()
    return None


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
    carried = _carried_version()
    if carried is None:
        with suppress(PackageNotFoundError):
            return distribution("apache-tvm").version
    return carried


def load(kind: str) -> None:
    """Load what artifacts of a kind need to be loaded themselves, ``cpu`` or ``cuda``.

    After tvm_ffi, which they link to; for CUDA also after torch, whose CUDA runtime is found by its
    name once it is loaded.

    Raises
    ------
    FileNotFoundError
        When a library is not there.
    RuntimeError
        When the one for CUDA lacks another, with its name and what to do.
    """
    if sys.modules.get("tvm") is None:  # the compiler brings its own copy
        ctypes.CDLL(str(find()), ctypes.RTLD_GLOBAL)
    if kind == "cuda":
        try:
            ctypes.CDLL(str(find(RUNTIME_CUDA)), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise RuntimeError(
                f"TVM's library for CUDA cannot be loaded: {error}. It needs NVIDIA's driver and "
                "the CUDA 13 runtime, which a torch built for CUDA 13 brings"
            ) from error

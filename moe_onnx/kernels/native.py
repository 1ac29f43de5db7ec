"""Where the native library is, or why there is none.

The library holds the operators as onnxruntime custom ops in C++. It is compiled when the package is
installed and lies beside this file; without a C++ compiler the package is installed all the same, and
the other routes do its work. Nothing here runs when the package is imported: the library is opened when
somebody first asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

from moe_onnx.errors import ModelError
from moe_onnx.spec import PACKAGE_VERSION

# Switches the native route off ("0", as when the package is installed), or names another library.
SWITCH = "MOE_ONNX_NATIVE"
OVERRIDE = "MOE_ONNX_NATIVE_LIBRARY"
_OFF = ("0", "off", "no", "false")

_NAMES = {"win32": "ascend_moe.dll", "darwin": "libascend_moe.dylib"}
LIBRARY_NAME = _NAMES.get(sys.platform, "libascend_moe.so")

_HOW_TO_GET_IT = (
    "Install a C++17 compiler and then moe-onnx again (pip install --force-reinstall --no-deps "
    "--no-cache-dir, or pip install -e . in a checkout); MOE_ONNX_NATIVE=1 makes pip say why a build fails."
)


def native_library_path() -> str:
    """Path of the library of native kernels, for ``SessionOptions.register_custom_ops_library``.

    The library is no part of Python: sessions in C++, C# or Java register the same file. The
    environment variable ``MOE_ONNX_NATIVE_LIBRARY`` names another one, ``MOE_ONNX_NATIVE=0`` switches
    the native kernels off.

    Returns:
        An absolute path of a library that can be loaded and is of this version.

    Raises:
        ModelError: If there is none; the message says why, and what to do.
    """
    reason = unavailable()
    if reason:
        raise ModelError(f"The native kernels are unavailable: {reason}")
    return str(_where())


def unavailable() -> str:
    """Why the native kernels cannot be used, and what to do; an empty text if they can."""
    if is_switched_off():
        return f"they are switched off by the environment variable {SWITCH}={os.environ[SWITCH]}. Unset it."
    path = _where()
    return _look(path)[0] if path.is_file() else _no_file(path)


def is_switched_off() -> bool:
    """Whether it is the user's wish that there are no native kernels."""
    return os.environ.get(SWITCH, "").lower() in _OFF


def is_native_library(path: str | os.PathLike[str]) -> bool:
    """Whether a file is the library of native kernels, of whatever version and wherever it is."""
    try:
        return hasattr(ctypes.CDLL(os.fspath(path)), "ascend_moe_version")
    except OSError:
        return False


def build_line() -> str:
    """What the library says of itself: compiler, sources, vector widths; empty if it is unavailable."""
    return "" if unavailable() else _look(_where())[1]


def _where() -> Path:
    """The file that is asked for, whether it is there or not."""
    return Path(os.path.abspath(os.environ.get(OVERRIDE) or Path(__file__).with_name(LIBRARY_NAME)))


def _no_file(path: Path) -> str:
    if os.environ.get(OVERRIDE):
        return f"{OVERRIDE} must name a library, got '{path}', which is no file. Correct or unset it."
    return f"this moe-onnx was installed without them, there is no '{path}'. {_HOW_TO_GET_IT}"


@functools.cache
def _look(path: Path) -> tuple[str, str]:
    """Why the library cannot be used, and its build line. A loaded library stays: look once."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"'{path}' cannot be loaded ({error}). {_HOW_TO_GET_IT}", ""
    texts = []
    for name in ("ascend_moe_version", "ascend_moe_build"):
        function = getattr(library, name, None)
        if function is None or not hasattr(library, "RegisterCustomOps"):
            return f"'{path}' is not the library of moe-onnx: '{name}' or 'RegisterCustomOps' is missing.", ""
        function.argtypes, function.restype = (), ctypes.c_char_p
        texts.append((function() or b"").decode("utf-8", "replace"))
    version, build = texts
    wrong = f"'{path}' must be of version {PACKAGE_VERSION}, as this moe-onnx is, got {version}."
    return ("", build) if version == PACKAGE_VERSION else (f"{wrong} {_HOW_TO_GET_IT}", "")

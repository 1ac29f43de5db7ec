"""The native library is what it is taken for; where there is none, it is said why, and all else works.

The parity lane builds real wheels and installs (pip fetches the build backend): with a compiler, without
one, with one that fails.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moe_onnx
from moe_onnx.kernels import native

ROOT = Path(__file__).parent.parent
OPS = ROOT / "ops"
IN_CHECKOUT = Path(native.__file__).with_name(native.LIBRARY_NAME)


def compiler() -> list[str]:
    """The command of the C++ compiler that CMake would take, or nothing."""
    named = shlex.split(os.environ.get("CXX", ""))
    names = [named[0]] if named else ["c++", "g++", "clang++"]
    found = [path for path in map(shutil.which, names) if path]
    command = [*found[:1], *named[1:]]
    works = bool(found) and subprocess.run([*command, "--version"], capture_output=True).returncode == 0
    return command if works else []


def source_digest() -> str:
    """What CMakeLists.txt computes of the sources."""
    shared = [f"native/{name}" for name in ("*.cpp", "*.h", "*.inl", "*.map", "CMakeLists.txt")]
    paths = [path for pattern in (*shared, "*/kernel.cpp") for path in OPS.glob(pattern)]
    files = {path.relative_to(OPS).as_posix(): path for path in paths}
    lines = [f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that neither switches native kernels off nor names another library."""
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.delenv(native.OVERRIDE, raising=False)
    return monkeypatch


def fake_library(folder: Path, version: str, extra: str = "") -> Path | None:
    """A library with nothing in it, compiled; None where there is no compiler."""
    if not compiler():
        return None
    source = folder / "fake.cpp"
    source.write_text(f'extern "C" const char* ascend_moe_version() {{ return "{version}"; }}\n{extra}')
    library = folder / "fake.so"
    subprocess.run([*compiler(), "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


REST = 'extern "C" const char* ascend_moe_build() { return "fake"; } extern "C" void RegisterCustomOps() {}'


def test_the_library_is_of_this_version_and_of_these_sources(plain: pytest.MonkeyPatch) -> None:
    """If this fails: ``pip install -e .``."""
    if not IN_CHECKOUT.exists():
        assert not compiler(), f"'{IN_CHECKOUT}' is not built, and there is a compiler: pip install -e ."
        assert str(IN_CHECKOUT) in native.unavailable()
        return
    assert not native.unavailable()
    assert moe_onnx.native_library_path() == str(IN_CHECKOUT)
    library = ctypes.CDLL(moe_onnx.native_library_path())
    library.ascend_moe_version.restype = ctypes.c_char_p
    assert library.ascend_moe_version().decode() == moe_onnx.__version__
    assert source_digest() in native.build_line(), "the library is of other sources: pip install -e ."


@pytest.mark.skipif(sys.platform != "linux", reason="other linkers, other tools")
def test_nothing_else_is_exported(plain: pytest.MonkeyPatch) -> None:
    """Templates of the standard library, say, which would be mixed with those of other libraries."""
    if native.unavailable() or not shutil.which("nm"):
        assert not compiler()
        return
    run = ["nm", "-D", "--defined-only", "--format=posix", native.native_library_path()]
    lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
    names = {line.split()[0] for line in lines}
    assert names == {"RegisterCustomOps", "ascend_moe_version", "ascend_moe_build"}


def test_no_file(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain.setattr(native, "__file__", str(tmp_path / "native.py"))
    with pytest.raises(moe_onnx.ModelError, match="installed without them") as caught:
        moe_onnx.native_library_path()
    assert str(tmp_path / native.LIBRARY_NAME) in str(caught.value)
    assert "C++17 compiler" in str(caught.value)
    assert native.build_line() == ""


def test_switched_off(plain: pytest.MonkeyPatch) -> None:
    plain.setenv(native.SWITCH, "0")
    with pytest.raises(moe_onnx.ModelError, match="switched off by the environment .* MOE_ONNX_NATIVE=0"):
        moe_onnx.native_library_path()
    plain.setenv(native.SWITCH, "1")
    assert "switched off" not in native.unavailable()


def test_another_library_that_is_not_there(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain.setenv(native.OVERRIDE, str(tmp_path / "not_there.so"))
    assert "MOE_ONNX_NATIVE_LIBRARY must name a library" in native.unavailable()
    assert "not_there.so" in native.unavailable()


def test_garbage(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.so"
    garbage.write_text("no library")
    plain.setenv(native.OVERRIDE, str(garbage))
    assert f"'{garbage}' cannot be loaded (" in native.unavailable()


def test_another_version(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = fake_library(tmp_path, "0.0.7", REST)
    if library is None:
        library = tmp_path / "fake.so"
        library.touch()
        plain.setattr(ctypes, "CDLL", lambda path: FakeLibrary())
    plain.setenv(native.OVERRIDE, str(library))
    assert (
        f"must be of version {moe_onnx.__version__}, as this moe-onnx is, got 0.0.7." in native.unavailable()
    )


class FakeLibrary:
    """What ctypes would make of a library of version 0.0.7, where nothing can be compiled."""

    def __getattr__(self, name: str) -> object:
        return type("Function", (), {"__call__": lambda self: b"0.0.7"})()


def test_a_library_of_somebody_else(plain: pytest.MonkeyPatch) -> None:
    """Any extension module can be loaded; none of its functions is called."""
    plain.setenv(native.OVERRIDE, __import__("_ctypes").__file__)
    assert "is not the library of moe-onnx" in native.unavailable()


def test_another_library_of_this_version(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = fake_library(tmp_path, moe_onnx.__version__, REST) or (
        IN_CHECKOUT if IN_CHECKOUT.exists() else None
    )
    if library is None:
        assert not compiler()
        return
    plain.setenv(native.OVERRIDE, os.path.relpath(library))
    assert moe_onnx.native_library_path() == str(library)
    assert native.build_line()


def test_importing_opens_no_library() -> None:
    """Neither the library nor a reason for its absence is looked for before it is asked for."""
    code = "import moe_onnx.kernels.native as native; assert not native._look.cache_info().misses"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def info(**env: str) -> str:
    run = [sys.executable, "-m", "moe_onnx.cli", "info"]
    env = {**os.environ, "COLUMNS": "500", **env}
    return subprocess.run(run, check=True, timeout=100, capture_output=True, text=True, env=env).stdout


def test_info_says_which_routes_there_are(plain: pytest.MonkeyPatch) -> None:
    text = info()
    if native.unavailable():
        assert native.unavailable() in text
    else:
        assert f"native library: {native.native_library_path()}\n" in text
        assert f"built by: {native.build_line()}\n" in text
    assert "no: they are switched off by the environment variable MOE_ONNX_NATIVE=0" in info(
        MOE_ONNX_NATIVE="0"
    )


# ---- real builds -------------------------------------------------------------------------------------------

FOLDERS = ("moe_onnx", "ops", "models", "tests", "benchmarks")
BUILT = ("__pycache__", "*ascend_moe.*", "CMakeCache.txt", "CMakeFiles", "build.ninja", ".ninja*")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout in which nothing is built yet."""
    copy = tmp_path / "checkout"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(*BUILT))
    for name in ("README.md", "CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def pip(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pip with nothing said about native kernels and compilers but what is given."""
    clean = {key: value for key, value in os.environ.items() if key not in (native.SWITCH, "CC", "CXX")}
    run = [sys.executable, "-m", "pip", *map(str, arguments)]
    return subprocess.run(run, timeout=600, capture_output=True, text=True, env={**clean, **env})


def wheel_of(checkout: Path, **env: str) -> tuple[str, bool]:
    """Tag of the wheel that is built, and whether the library is in it."""
    folder = checkout.parent / "wheels"
    done = pip("wheel", "--no-deps", "--no-cache-dir", "-w", folder, checkout, **env)
    assert not done.returncode, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "moe_onnx/validation/pages/MO001.md" in names
    assert not [name for name in names if name.startswith(("ops/", "tests/", "README"))]
    return wheel.stem.split("-", 2)[2], f"moe_onnx/kernels/{native.LIBRARY_NAME}" in names


def unoptimised(folder: Path) -> dict[str, str]:
    """Optimising takes most of the time, and the install that runs this has optimised.

    CMake calls the compiler by a script, which has the last word.
    """
    if os.name == "nt":
        return {}
    launcher = folder / "without_optimising"
    launcher.write_text('#!/bin/sh\nexec "$@" -O0\n')
    launcher.chmod(0o755)
    return {"CMAKE_CXX_COMPILER_LAUNCHER": str(launcher)}


BROKEN = {"CC": "/bin/false", "CXX": "/bin/false"}


@pytest.mark.parity
@pytest.mark.timeout(600)
def test_a_wheel_with_a_compiler(checkout: Path, tmp_path: Path) -> None:
    if not compiler():
        pytest.skip("there is no compiler")
    tag, has_library = wheel_of(checkout, **unoptimised(tmp_path))
    assert has_library
    assert tag.startswith("py3-none-")
    assert tag != "py3-none-any"


@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.parametrize("why", ["no compiler", "compiler fails", "source fails", "switched off"])
def test_a_wheel_without_the_library(checkout: Path, why: str) -> None:
    if why == "source fails":
        with (checkout / "ops/native/spec.h").open("a") as file:  # so that no file compiles, which takes long
            file.write("#error broken\n")
    # CMake looks for compilers in more places than PATH: name one that is not there.
    env = {
        "no compiler": {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"},
        "compiler fails": BROKEN,
        "source fails": {},
        "switched off": {"MOE_ONNX_NATIVE": "0"},
    }[why]
    assert wheel_of(checkout, **env) == ("py3-none-any", False)


@pytest.mark.parity
@pytest.mark.timeout(600)
def test_a_wheel_that_must_have_the_library(checkout: Path) -> None:
    done = pip("wheel", "--no-deps", "-w", checkout, checkout, MOE_ONNX_NATIVE="1", **BROKEN)
    assert done.returncode
    assert "compiler" in done.stdout + done.stderr


@pytest.mark.parity
@pytest.mark.timeout(600)
def test_an_editable_install(checkout: Path, tmp_path: Path) -> None:
    """The library is built in the checkout; PYTHONPATH and the working folder still come before it."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=100
    )
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    wanted = unoptimised(tmp_path) | ({"MOE_ONNX_NATIVE": "1"} if compiler() else {})
    done = pip("--python", python, "install", "--no-deps", "-e", checkout, **wanted)
    assert not done.returncode, done.stdout + done.stderr
    assert (checkout / "moe_onnx/kernels" / native.LIBRARY_NAME).exists() == bool(compiler())

    other = tmp_path / "other" / "moe_onnx"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    code = "from importlib.util import find_spec; print(find_spec('moe_onnx').origin)"

    def found(folder: Path, **env: str) -> Path:
        env = {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **env}
        run = [str(python), "-c", code]
        out = subprocess.run(run, check=True, capture_output=True, text=True, env=env, cwd=folder, timeout=60)
        return Path(out.stdout.strip()).parent

    assert found(tmp_path) == checkout / "moe_onnx"
    assert found(tmp_path, PYTHONPATH=str(other.parent)) == other
    assert found(other.parent) == other

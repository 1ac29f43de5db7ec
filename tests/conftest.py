"""Assertions in helper modules say as much as those in tests; property tests know no deadline.

Under pytest-xdist the tests of a file whose tests share what is dear to make stay on one worker.
"""

from __future__ import annotations

import functools
import gc
import os
import re
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from hypothesis import settings

import moe_onnx  # noqa: F401 (it wraps a method of onnxruntime's options, which is inherited here)

pytest.register_assert_rewrite("report_tools", "routes")
settings.register_profile("fast", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("fast")
# The workers and some hundred processes that tests start import the package: without files of bytecode each
# would compile it anew, which takes as long as what most of them are for.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


class CalmOptions(onnxruntime.SessionOptions):  # type: ignore[misc]
    """Options whose threads sleep while they wait for work: nothing else of a session changes.

    By default they spin for some 50 ms after each run, which takes longer than what most tests run, and takes
    the processor from the other worker.
    """

    def __init__(self) -> None:
        super().__init__()
        for pool in ("intra_op", "inter_op"):
            self.add_session_config_entry(f"session.{pool}.allow_spinning", "0")


def without_spinning(init: Any) -> Any:
    """The constructor of sessions, which have such options where they are given none."""

    @functools.wraps(init)
    def calm(self: Any, model: Any, sess_options: Any = None, *args: Any, **named: Any) -> None:
        init(self, model, CalmOptions() if sess_options is None else sess_options, *args, **named)

    return calm


onnxruntime.SessionOptions = CalmOptions
onnxruntime.InferenceSession.__init__ = without_spinning(onnxruntime.InferenceSession.__init__)

# Their tests share sessions, graphs, models or processes, so that on two workers these are made twice.
# The tests of all other files go one by one to the worker that is free, after these.
TOGETHER = {
    "test_autodiff.py",
    "test_finalize_routing.py",
    "test_grouped_matmul.py",
    "test_operators.py",
    "test_permute.py",
    "test_process.py",
    "test_properties.py",
    "test_reports_graphs.py",
    "test_reports_numerics.py",
    "test_reports_routing.py",
    "test_session.py",
    "test_validation.py",
    "test_validation_documents.py",
    "test_validation_full.py",
    "test_validation_fuzz.py",
    "test_validation_ops.py",
    "test_validation_run.py",
    "test_validation_training.py",
}
# In these, those with the same argument.
BY_ARGUMENT = {"test_goldens.py", "test_validation_intact.py"}
# Each of their tests takes long: they start before other single tests, so that no worker ends with one alone.
LONG = {"test_backend_models.py", "test_gallery.py", "test_native_packaging.py", "test_native_versions.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--every N``: only each N-th test, where a whole run would take too long."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="run only each N-th test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What ``--every`` leaves out is counted as deselected; what takes long comes first."""
    every = config.getoption("--every")
    if every > 1:
        left_out = [item for number, item in enumerate(items) if number % every]
        items[:] = items[::every]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no need to walk over them for each hundred new objects of a test.

    A tenth of the time of a run went to that.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_report_header(config: pytest.Config) -> str:
    """Whether the native route is among the tested ones, and which library it is."""
    from moe_onnx.kernels import native

    return f"native kernels: {native.build_line() or native.unavailable()}"


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of a run have in common, for what takes long to make."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def group_of(nodeid: str) -> str:
    """Tests of one group run on one worker."""
    path, _, test = nodeid.partition("::")
    name = path.rpartition("/")[2]
    if name in TOGETHER:
        return name
    argument = re.search(r"\[(.*)\]", test)
    return f"{name}[{argument[1]}]" if argument and name in BY_ARGUMENT else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups by the names of tests: pytest-xdist 3.8 does not see ``xdist_group`` with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        """The largest groups come first, so that the workers end together."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)

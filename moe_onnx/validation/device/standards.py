"""The accuracy standards that tensors of a device are customarily held to in CANN.

Both look at the relative error ``|actual - expected| / (|expected| + 1e-7)``: its mean (MERE) and its
maximum (MARE).

*Single benchmark* (CANN opbase, ``experimental_standard.md``, as of 2025): against a reference of higher
precision MERE must be below a threshold of the dtype, MARE below ten times that.

*Double benchmark* (operator accuracy standard L0 to L2): the errors of the device, and those of a second
implementation of the same dtype, both against that reference. MERE, MARE and the root mean square of the
error (RMSE) may be so many times the second one's. Elements whose expected value is small are left out of
these and counted instead: how many err by more than an absolute limit, at most twice as many as in the
second one. MoE operators stand in level L1, the tests of both source documents' kernels too.
"""

from __future__ import annotations

from dataclasses import dataclass

EPSILON = 1e-7  # keeps the relative error of an expected 0 finite


@dataclass(frozen=True)
class DtypeStandard:
    """Limits for tensors of one dtype.

    Attributes:
        threshold: MERE must be below it, MARE below ``MARE_FACTOR`` times it.
        small: Expected values of less than this size count as small.
        small_error: Absolute error above which a small element counts as wrong; also the least error that
            a second implementation is taken to have.
    """

    threshold: float
    small: float
    small_error: float


MARE_FACTOR = 10.0
STANDARDS = {
    "float16": DtypeStandard(2.0**-10, 2.0**-11, 2.0**-16),
    "bfloat16": DtypeStandard(2.0**-7, 2.0**-8, 2.0**-16),
    "float32": DtypeStandard(2.0**-13, 2.0**-14, 2.0**-30),
    # The threshold is the single benchmark's own. What is small is ours, as no standard says it: half the
    # threshold as for all dtypes, and one step of the dtype below that, as for bfloat16.
    "float8_e4m3fn": DtypeStandard(2.0**-3, 2.0**-4, 2.0**-8),
    "float8_e5m2": DtypeStandard(2.0**-2, 2.0**-3, 2.0**-6),
    # Not in the standards, which know no float64: scaled from float32 by the 29 bits between them.
    "float64": DtypeStandard(2.0**-42, 2.0**-43, 2.0**-59),
}


@dataclass(frozen=True)
class Ratios:
    """How many times the second implementation's error the device's may be."""

    mare: float
    mere: float
    rmse: float
    small: float = 2.0


LEVELS = {"L0": Ratios(10.0, 2.0, 2.0), "L1": Ratios(5.0, 1.5, 1.5), "L2": Ratios(2.0, 1.2, 1.2)}

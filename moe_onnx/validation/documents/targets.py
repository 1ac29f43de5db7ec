"""The devices a model may be validated for, and what the source documents say of them.

Products, dtypes and what must be written out are those of the operators' documents from 2025-11 to 2026-07;
where they differ, the newest one is followed and the difference reported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A device: its products, and how many bytes of its unified buffer an operator may use."""

    products: str
    ub_size: int


DEVICES = {
    # Of 192 KiB the system keeps 256 bytes; of the 256 KiB of the newer cores, 8 KiB.
    "ascend910b": Target("Atlas A2", 196352),
    "ascend910_93": Target("Atlas A3", 196352),
    "ascend950": Target("Ascend 950PR, 950DT", 253952),
}
TARGETS = tuple(DEVICES)

# Operators that are in the documents, on all three devices in the newest ones; on the last one since when,
# where older documents say that they are not.
SINCE: dict[str, str] = {
    "MoeInitRoutingV2": "",
    "MoeInitRoutingV2Grad": "2025-12-31",
    "MoeTokenPermuteWithRoutingMap": "2026",
    "MoeTokenPermuteWithRoutingMapGrad": "",
    "MoeTokenUnpermuteWithRoutingMap": "2026",
    "MoeTokenUnpermuteWithRoutingMapGrad": "2026-02-26",
    "MoeFinalizeRoutingV2": "",
    "MoeFinalizeRoutingV2Grad": "",
}
# Weights in float32 beside rows in bfloat16: the argument of the weights, and since when it is documented.
MIXES: dict[str, tuple[str, str]] = {
    "MoeTokenPermuteWithRoutingMap": ("probs", "2026-01-23"),
    "MoeTokenPermuteWithRoutingMapGrad": ("permuted_probs_output_grad", "2026-01-23"),
    "MoeTokenUnpermuteWithRoutingMap": ("probs", "2026-01-23"),
    "MoeTokenUnpermuteWithRoutingMapGrad": ("probs", "2026-01-23"),
    "MoeFinalizeRoutingV2": ("scales", ""),
    "MoeFinalizeRoutingV2Grad": ("scales", ""),
}

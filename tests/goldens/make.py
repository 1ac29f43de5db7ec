"""Records the runs of ``golden_cases.py`` with PyTorch in float64, rounded to float32.

    PYTHONPATH=.:tests python tests/goldens/make.py            # writes tests/goldens/*.npz
    PYTHONPATH=.:tests python tests/goldens/make.py --check    # compares, writes nothing

A file holds, for each step (first dimension), ``loss``, ``main_loss`` (lm_loss; a layer: the mean
squared error), ``aux_loss`` and ``z_loss`` (of any coefficient, also 0), ``grad_norm`` (before
clipping), ``num_tokens`` (what the main loss is the mean over), ``expert_load`` and, where tokens can
be, ``dropped``; then
``grad/<parameter>``, the gradients of the first step before clipping, and ``final/<parameter>``, the
parameters after the last step. ``logits`` (a layer: ``output``) are those of the first batch before
any step, zero at padding, where they mean nothing.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch_models
from golden_cases import CASES, GOLDENS, Arrays, Case

# A router score this close to its rival's could fall the other way in float32.
MARGIN = 1e-4
# Most that a run in float32 may differ from the record, relative to a tensor's largest value.
FLOAT32 = {"grad": 1e-5, "final": 1e-5, "": 1e-5}


# Standard deviation of the noise on gradients, relative to a tensor's largest, and what may come of it.
NOISE, NOISE_LIMIT = 3e-7, 2e-5


def record(case: Case, dtype: torch.dtype = torch.float64, noise: float = 0.0) -> Arrays:
    """The run in ``dtype``, rounded to float32.

    Raises:
        AssertionError: If a real token chose an expert by a hair.
    """
    parameters, batches = case.parameters(), case.batches()
    run = torch_models.train_steps(case.config, case.optimizer, parameters, batches, case.lr, dtype, noise)
    assert run.margin > MARGIN, f"{case.name}: a router margin of {run.margin:.1e}; choose another seed"
    first = torch_models.tensors(batches[0], dtype)
    out = torch_models.forward(case.config, torch_models.tensors(parameters, dtype), first)
    found = {name: np.array([np.asarray(v) for v in values]) for name, values in run.metrics.items()}
    if case.config.dispatch_mode == "dropless":
        del found["dropped"]
    if "logits" in out:
        found["logits"] = (out["logits"] * first["attention_mask"][..., None]).numpy()
    else:
        found["output"] = out["output"].numpy()
    found |= {f"grad/{name}": value.numpy() for name, value in run.gradients.items()}
    found |= {f"final/{name}": value.numpy() for name, value in run.parameters.items()}
    return {name: v.astype(np.float32) if v.dtype.kind == "f" else v for name, v in found.items()}


def difference(got: Arrays, want: Arrays) -> dict[str, float]:
    """Largest difference of each kind, relative to the largest value of its tensor; integers: absolute."""
    assert got.keys() == want.keys()
    worst = {"grad": 0.0, "final": 0.0, "": 0.0}
    for name, value in want.items():
        scale = np.abs(value).max(initial=0) if value.dtype.kind == "f" else 1
        gap = np.abs(got[name] - value).max(initial=0)
        kind = name.split("/")[0] if "/" in name else ""
        worst[kind] = max(worst[kind], float(gap / scale) if scale else float(gap))
    return worst


def main() -> None:
    total = 0
    for case in CASES.values():
        golden = record(case)
        if "--check" not in sys.argv:
            np.savez_compressed(GOLDENS / f"{case.name}.npz", **golden)
        again = difference(golden, case.golden())
        single = difference(record(case, torch.float32), golden)
        noisy = difference(record(case, noise=NOISE), golden)["final"]
        total += (size := (GOLDENS / f"{case.name}.npz").stat().st_size)
        line = ", ".join(f"{kind or 'metrics'} {value:.1e}" for kind, value in single.items())
        print(f"{case.name:20} {size / 1e3:5.1f} kB; in float32: {line}; final with noise {noisy:.1e}")
        assert max(again.values()) <= 1e-6
        assert noisy <= NOISE_LIMIT
        assert all(single[kind] <= limit for kind, limit in FLOAT32.items())
    print(f"{total / 1e3:.1f} kB")


if __name__ == "__main__":
    main()

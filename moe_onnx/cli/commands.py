"""What the commands print. The work is done in the other rooms."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

import moe_onnx
from moe_onnx.adapters.cards import card_files
from moe_onnx.adapters.python_ops import SERVED, UNAVAILABLE
from moe_onnx.operators import ALL
from moe_onnx.spec import DOMAIN

_CONSOLE = Console()


def demo() -> bool:
    """One model with both backward operators, by every route; whether all routes agree."""
    rng = np.random.default_rng(0)
    tokens, experts, top_k, hidden = 4, 3, 2, 2
    probs = rng.random((tokens, experts)).astype(np.float32).round(2)
    expert_idx = np.sort(np.argsort(-probs, axis=1)[:, :top_k], axis=1).astype(np.int32)
    routing_map = np.zeros((tokens, experts), bool)
    np.put_along_axis(routing_map, expert_idx, True, axis=1)
    x = rng.integers(-4, 5, (tokens, hidden)).astype(np.float32)
    rows, row_idx, counts, _ = moe_onnx.moe_init_routing_v2(
        x, expert_idx, expert_num=experts, expert_tokens_count_or_cumsum_flag=2
    )
    feed = {
        "dy": rng.integers(-4, 5, (tokens, hidden)).astype(np.float32),
        "index": row_idx,
        "map": routing_map,
        "rows": rows,
        "probs": probs,
    }
    _CONSOLE.print(f"{tokens} tokens, {top_k} of {experts} experts each, hidden size {hidden}")
    _CONSOLE.print(f"rows per expert: {None if counts is None else counts.tolist()}")
    dispatch = row_idx.reshape(tokens, top_k).tolist()
    _CONSOLE.print(f"expanded_row_idx, a line per token: {dispatch}\n")
    d_rows, d_probs = moe_onnx.moe_token_unpermute_with_routing_map_grad(
        feed["dy"], row_idx, row_idx, routing_map, rows, probs
    )
    assert d_probs is not None  # probs are given
    want = {
        "permuted_tokens_grad": d_rows,
        "probs_grad": d_probs,
        "grad_x": moe_onnx.moe_init_routing_v2_grad(d_rows, row_idx, top_k=top_k),
    }
    model = _demo_model(top_k)
    table = Table("output", "numpy reference", "python ops", "function bodies")
    routes = ["body"] if UNAVAILABLE else ["python", "body"]
    got = {route: moe_onnx.InferenceSession(model, kernels=route).run(list(want), feed) for route in routes}
    same = True
    for i, (name, value) in enumerate(want.items()):
        cells = [_text(value)]
        for route in ("python", "body"):
            if route in got:
                good = bool(np.allclose(got[route][i], value, rtol=1e-6, atol=1e-6))
                same = same and good
                cells.append(f"{_text(got[route][i])}\n{'equal' if good else 'DIFFERENT'}")
            else:
                cells.append("unavailable")
        table.add_row(name, *cells)
    _CONSOLE.print(table)
    _CONSOLE.print(
        "All routes agree." if same else "[bold red]The routes do not agree.[/bold red]", style="bold"
    )
    return same


def _demo_model(top_k: int) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    inputs = [
        value("dy", TensorProto.FLOAT, ["T", "H"]),
        value("index", TensorProto.INT32, ["N"]),
        value("map", TensorProto.BOOL, ["T", "E"]),
        value("rows", TensorProto.FLOAT, ["N", "H"]),
        value("probs", TensorProto.FLOAT, ["T", "E"]),
    ]
    outputs = [
        value("permuted_tokens_grad", TensorProto.FLOAT, ["N", "H"]),
        value("probs_grad", TensorProto.FLOAT, ["T", "E"]),
        value("grad_x", TensorProto.FLOAT, ["T", "H"]),
    ]
    nodes = [
        helper.make_node(
            "MoeTokenUnpermuteWithRoutingMapGrad",
            ["dy", "index", "index", "map", "rows", "probs"],
            ["permuted_tokens_grad", "probs_grad"],
            domain=DOMAIN,
            name="combine_grad",
        ),
        helper.make_node(
            "MoeInitRoutingV2Grad",
            ["permuted_tokens_grad", "index"],
            ["grad_x"],
            domain=DOMAIN,
            name="dispatch_grad",
            top_k=top_k,
        ),
    ]
    graph = helper.make_graph(nodes, "demo", inputs, outputs)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def _text(array: np.ndarray[Any, Any]) -> str:
    return "\n".join("  ".join(f"{v:5.2f}" for v in row) for row in np.atleast_2d(array))


def show_info() -> None:
    """Print versions, and the routes each operator can run by."""
    for package in ("moe-onnx", "onnx", "onnxruntime", "onnxruntime-extensions", "numpy", "ml_dtypes"):
        try:
            _CONSOLE.print(f"{package:24} {version(package)}")
        except ModuleNotFoundError:
            _CONSOLE.print(f"{package:24} not installed")
    if UNAVAILABLE:
        _CONSOLE.print(f"Python kernels: {UNAVAILABLE}")
    _CONSOLE.print("\nRoutes of each operator, and the float types they take:")
    table = Table("numpy", "python op", "function body", "operator")
    for spec in ALL:
        python = "-" if spec.name not in SERVED else "unavailable" if UNAVAILABLE else "fp32, fp64"
        table.add_row("all", python, "all", spec.name)
    _CONSOLE.print(table)


def write_cards(folder: Path, *, check: bool) -> list[Path]:
    """Write the generated files that are stale, or only name them; give the stale ones."""
    stale = []
    for path, text in card_files(folder).items():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(path.suffix + ".new")
            beside.write_text(text, "utf-8")
            os.replace(beside, path)
        _CONSOLE.print(f"{'stale' if check else 'written'}: {path}")
    if not stale:
        _CONSOLE.print("All files are fresh.")
    return stale

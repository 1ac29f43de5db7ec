"""OpSpec -> the generated files of ``ops/<Op>/``: ``card.md`` and ``function.txt``."""

from __future__ import annotations

import json
from pathlib import Path

from moe_onnx.adapters.function_body import OLDEST_OPSET, body_text
from moe_onnx.adapters.schema import TYPE_STRINGS
from moe_onnx.operators import ALL
from moe_onnx.spec import AXES, DOMAIN, VERSION, Arg, OpSpec

COMMAND = "moe-onnx cards"


def card_files(folder: Path) -> dict[Path, str]:
    """The generated files below ``folder`` (the project's ``ops/``) and what must stand in them."""
    files = {}
    for spec in ALL:
        home = folder / spec.name
        files[home / "card.md"] = card(spec, home / "cases.json")
        files[home / "function.txt"] = function_text(spec)
    return files


def function_text(spec: OpSpec) -> str:
    """The function body in ONNX text, one node a line."""
    lines = [f'<domain: "{DOMAIN}", opset_import: ["" : {OLDEST_OPSET}]>']
    depth = 0
    for line in body_text(spec).splitlines():
        words = " ".join(line.split())
        if not words:
            continue
        closing = len(words) - len(words.lstrip("})>"))
        lines.append("  " * max(depth - closing, 0) + words)
        depth += sum(words.count(c) for c in "{(") - sum(words.count(c) for c in "})")
        depth += words.endswith("<") - words.startswith(">")
    return "\n".join(lines) + "\n"


def card(spec: OpSpec, cases: Path) -> str:
    """The operator's card: signature, formula, attributes, gradient, hand cases."""
    parts = [
        f"# {spec.name}",
        f"<!-- Made by `{COMMAND}` from moe_onnx/operators; do not edit. -->",
        spec.summary,
        f"Domain `{DOMAIN}`, version {VERSION}. Source: {spec.source}.",
        f"```\n{spec.formula}\n```",
        "## Inputs\n" + _table(spec.inputs),
        "## Outputs\n" + _table(spec.outputs),
        "## Attributes\n" + _attributes(spec),
        "## Axes\n" + _axes(spec),
    ]
    if spec.gradient:
        parts.append(f"## Gradient\n[{spec.gradient}](../{spec.gradient}/card.md)")
    if cases.exists():
        rows = json.loads(cases.read_text("utf-8"))["cases"]
        good = [f"- `{row['name']}`: {row['why']}" for row in rows if "error" not in row]
        bad = [
            f"- `{row['name']}` ({row['error']['class']}, aclnn {row['error']['aclnn_status']}): {row['why']}"
            for row in rows
            if "error" in row
        ]
        parts.append("## Hand cases\n" + "\n".join(good))
        parts.append("## Errors\n" + "\n".join(bad))
    return "\n\n".join(parts) + "\n"


def _table(args: tuple[Arg, ...]) -> str:
    lines = ["", "| name | shape | types | meaning |", "|---|---|---|---|"]
    for arg in args:
        name = f"`{arg.name}`" + (" (optional)" if arg.optional else "")
        types = ", ".join(TYPE_STRINGS[dtype] for dtype in arg.dtypes)
        axes = " or ".join(f"[{axes.strip()}]" for axes in arg.axes.split("|"))
        lines.append(f"| {name} | {axes} | {arg.type_var}: {types} | {arg.doc} |")
    return "\n".join(lines)


def _attributes(spec: OpSpec) -> str:
    if not spec.attributes:
        return "\nnone"
    lines = ["", "| name | kind | legal | default | meaning |", "|---|---|---|---|---|"]
    for attr in spec.attributes:
        default = "required" if attr.required else "absent" if attr.default is None else str(attr.default)
        lines.append(f"| `{attr.name}` | {attr.kind} | {attr.rule} | {default} | {attr.doc} |")
    return "\n".join(lines)


def _axes(spec: OpSpec) -> str:
    used = {letter for arg in (*spec.inputs, *spec.outputs) for letter in arg.axes.split()}
    return "\n".join(f"- {letter}: {meaning}" for letter, meaning in AXES.items() if letter in used)

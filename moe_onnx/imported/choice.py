"""Which of a model's weights become parameters, by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from moe_onnx.autodiff.subgraphs import captured, is_float
from moe_onnx.errors import GradientError, OptionError
from moe_onnx.imported.parts import Weight, Weights

_WILD = "*?["


def chosen(weights: Weights, patterns: Sequence[str] | None, root: ir.Value) -> list[Weight]:
    """The weights to train, in the model's order.

    Args:
        weights: Of the model.
        patterns: As of :func:`moe_onnx.training_graph_from`.
        root: What the loss is, or is made from.

    Raises:
        OptionError: If a pattern is none, or matches nothing.
        GradientError: If a weight that is named has no way to the loss, or nothing is left to train.
    """
    texts = [patterns] if isinstance(patterns, str) else list(patterns or [])
    if not all(isinstance(text, str) and text.strip("!") for text in texts):
        raise OptionError(f"params must be patterns of names, got {patterns!r}.")
    wanted = [text for text in texts if not text.startswith("!")]
    unwanted = [text[1:] for text in texts if text.startswith("!")]
    reached = _reached(root)
    known = {name: weights.renamed.get(name, weights.split.get(name, name)) for name in weights.found}
    by_rule = {name for name, weight in weights.found.items() if weights.is_weight(weight)}
    picked = set() if wanted else {name for name in by_rule if weights.found[name].value in reached}
    for pattern in wanted:
        matched = [n for n, old in known.items() if pattern in (n, old) or fnmatchcase(n, pattern)]
        exact = [name for name in matched if pattern in (name, known[name])]
        # A pattern chooses among the weights, a name whatever it names.
        fitting = exact or [name for name in matched if name in by_rule]
        if not fitting:
            raise _no_match(pattern, matched, sorted(by_rule))
        ways = [name for name in fitting if weights.found[name].value in reached]
        if not ways or (exact and len(ways) < len(exact)):
            lost = next(name for name in fitting if name not in ways)
            raise GradientError(
                f"params: the loss has no differentiable path to '{lost}', which {pattern!r} names. Leave "
                "it out, or give a loss that depends on it."
            )
        picked.update(ways)
    for pattern in unwanted:
        matched = [name for name in known if fnmatchcase(name, pattern) or pattern == known[name]]
        if not matched:
            raise _no_match(pattern, matched, sorted(by_rule))
        picked.difference_update(matched)
    if not picked:
        raise GradientError(
            f"There is nothing to train: no weight of the {len(by_rule)} that the model has "
            f"is chosen and has a differentiable path to the loss '{root.name}'."
        )
    return [weight for name, weight in weights.found.items() if name in picked]


def _no_match(pattern: str, matched: Sequence[str], names: Sequence[str]) -> OptionError:
    if matched:
        return OptionError(
            f"params: {pattern!r} matches only constants that are no weights: {', '.join(matched[:4])}. "
            "Name one in full to train it."
        )
    close = difflib.get_close_matches(pattern, names, 1)
    hint = f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(names[:6]) or 'none'}."
    return OptionError(f"params: no weight matches {pattern!r}. {hint}")


def _reached(root: ir.Value) -> set[ir.Value]:
    """Floats that a value depends on by floats alone: integers and booleans end such paths."""
    found, left = {root}, [root]
    while left:
        node = left.pop().producer()
        if node is None:
            continue
        for value in (*node.inputs, *captured(node)):
            if value is not None and is_float(value) and value not in found:
                found.add(value)
                left.append(value)
    return found

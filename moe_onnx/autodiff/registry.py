"""Gradient rules by (domain, operator, version), and ``register_gradient`` for users' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from moe_onnx.errors import OptionError

# rule(g, node, *gradients of the outputs) -> a gradient for each input, None where there is none.
# The gradient of an output that the loss does not use is None.
Rule = Callable[..., Sequence["ir.Value | None"]]


@dataclass(frozen=True)
class _Entry:
    since: int
    until: int | None
    rule: Rule


# Rules that return, after the gradients of a node's inputs, those of the outer values its subgraphs use.
_CAPTURING: set[Rule] = set()


def sees_captured(rule: Rule) -> Rule:
    """Mark a rule as one that also returns gradients for ``g.captured(node)``; a decorator."""
    _CAPTURING.add(rule)
    return rule


def captures(rule: Rule) -> bool:
    """Whether a rule returns gradients of captured values too."""
    return rule in _CAPTURING


_RULES: dict[tuple[str, str], list[_Entry]] = {}


def register_gradient(
    op_type: str, domain: str = "", *, since: int = 1, until: int | None = None, replace: bool = False
) -> Callable[[Rule], Rule]:
    """Register a gradient rule for an operator; a decorator.

        @moe_onnx.register_gradient("Square", "my.domain")
        def square(g, node, grad_y):
            (x,) = node.inputs
            return [g.mul(grad_y, g.mul(x, g.like(2.0, x)))]

    A rule is called with a :class:`~moe_onnx.autodiff.gradients.Gradients` ``g`` that emits nodes,
    the node (an ``onnx_ir.Node``) and the gradient of each of its outputs (None where the loss does
    not use the output). It returns a value or None for each input, in their order.

    Args:
        op_type: Name of the operator.
        domain: Its domain; ``""`` is ``ai.onnx``.
        since: First version of the domain's opset that the rule is right for.
        until: Last version; None: all later ones.
        replace: Whether the rule takes the place of one that is there, for its own versions.

    Raises:
        OptionError: If there is a rule for one of the versions already, or there are no such versions.
    """
    domain = "" if domain == "ai.onnx" else domain
    if not isinstance(op_type, str):
        raise OptionError(f"register_gradient: op_type must be the name of an operator, got {op_type!r}.")
    if until is not None and until < since:
        raise OptionError(f"register_gradient: until must be at least since ({since}), got {until}.")

    def register(rule: Rule) -> Rule:
        entries = _RULES.setdefault((domain, op_type), [])
        new = _Entry(since, until, rule)
        clashes = [old for old in entries if _overlap(old, new)]
        if clashes and not replace:
            raise OptionError(
                f"register_gradient: {_label(domain, op_type)} has a rule for versions "
                f"{_range(clashes[0])} already. Pass replace=True to take its place."
            )
        entries[:] = [part for old in entries for part in _without(old, new)]
        entries.append(new)
        entries.sort(key=lambda entry: entry.since)
        return rule

    return register


def find_rule(domain: str, op_type: str, version: int | None) -> Rule | None:
    """The rule for an operator in an opset, or None."""
    for entry in _RULES.get((domain, op_type), []):
        if version is None or entry.since <= version <= (entry.until or version):
            return entry.rule
    return None


def rules() -> dict[tuple[str, str], list[str]]:
    """What there are rules for: versions by (domain, operator)."""
    return {key: [_range(entry) for entry in entries] for key, entries in sorted(_RULES.items())}


def _overlap(a: _Entry, b: _Entry) -> bool:
    return a.since <= (b.until or a.since) and b.since <= (a.until or b.since)


def _without(old: _Entry, new: _Entry) -> list[_Entry]:
    """What of an entry's versions another one leaves."""
    if not _overlap(old, new):
        return [old]
    parts = []
    if old.since < new.since:
        parts.append(_Entry(old.since, new.since - 1, old.rule))
    if new.until is not None and (old.until is None or new.until < old.until):
        parts.append(_Entry(new.until + 1, old.until, old.rule))
    return parts


def _range(entry: _Entry) -> str:
    return f"{entry.since}-{entry.until}" if entry.until else f"{entry.since}+"


def _label(domain: str, op_type: str) -> str:
    return f"{domain or 'ai.onnx'}::{op_type}"

"""Checks that the config and optimizer dataclasses share: each error names field, value and rule."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import fields
from typing import Any, Self

from moe_onnx.errors import ConfigError


class Options:
    """A frozen dataclass of options that refuses names it does not have, and lists those it has."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown names before the dataclass's own ``__init__`` sees them."""
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean '{close[0]}'? " if close else ""
                raise ConfigError(
                    f"{cls.__name__}: there is no option '{name}'. {hint}Legal: {', '.join(known)}."
                )
        return super().__new__(cls)

    def refuse(self, field: str, rule: str, mend: str = "") -> ConfigError:
        """The error for a field whose value breaks a rule."""
        value = getattr(self, field)
        return ConfigError(f"{type(self).__name__}: '{field}' must be {rule}, got {value!r}. {mend}".rstrip())

    def check_int(self, *names: str, low: int = 1) -> None:
        """Whole numbers of at least ``low``."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise self.refuse(name, f"an integer >= {low}")

    def check_float(
        self, *names: str, low: float = 0.0, high: float = math.inf, above: bool = False, below: bool = False
    ) -> None:
        """Finite numbers in ``[low, high]``; ``above`` and ``below`` leave out the ends."""
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if (
                not number
                or value < low
                or value > high
                or (above and value == low)
                or (below and value == high)
            ):
                left, right = "(" if above else "[", ")" if below or high == math.inf else "]"
                raise self.refuse(name, f"a finite number in {left}{low:g}, {high:g}{right}")

    def check_bool(self, *names: str) -> None:
        """True or False, not a number that looks like it."""
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise self.refuse(name, "True or False")

    def check_choice(self, name: str, choices: Collection[str]) -> None:
        """One of the legal words."""
        value = getattr(self, name)
        if not isinstance(value, str) or value not in choices:
            close = difflib.get_close_matches(str(value), choices, 1)
            hint = f"Did you mean {close[0]!r}?" if close else ""
            raise self.refuse(name, f"one of {', '.join(map(repr, choices))}", hint)

"""Large numbers as people read them."""

from __future__ import annotations

from rich.filesize import decimal

_LETTERS = ("", "K", "M", "G", "T", "P", "E")


def count(number: float) -> str:
    """``46.7 B``: parameters are counted in billions."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:g}"


def flops(number: float) -> str:
    """``12.3 TFLOP``."""
    power = 0
    while number >= 1000 and power < len(_LETTERS) - 1:
        number /= 1000
        power += 1
    return f"{number:.1f} {_LETTERS[power]}FLOP" if power else f"{number:g} FLOP"


def size(number: float) -> str:
    """``1.2 GB``."""
    return decimal(int(number))

"""Assertions in helper modules say as much as those in tests."""

import pytest

pytest.register_assert_rewrite("report_tools", "routes")

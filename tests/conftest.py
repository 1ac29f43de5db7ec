"""Assertions in helper modules say as much as those in tests; property tests know no deadline."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("report_tools", "routes")
settings.register_profile("fast", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("fast")

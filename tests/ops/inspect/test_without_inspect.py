"""Without inspect-ai, the error names the extra. Real evals: real_evals.py."""

import importlib
import importlib.util

import pytest

from probemon.errors import MissingExtra


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is not None, reason="inspect-ai is installed")
def test_missing_package_is_named_with_its_extra():
    with pytest.raises(MissingExtra, match=r"evals need inspect-ai: pip install 'probemon\[inspect\]'"):
        importlib.import_module("probemon.ops.inspect")

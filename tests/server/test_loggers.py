"""The names that stand in the log, and by which an operator sets levels."""

from importlib import import_module

import pytest

from tests.sources import MODULES

WITH_LOGGERS = [
    module for module, path in MODULES.items() if "\nlogger = " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", WITH_LOGGERS)
def test_a_logger_is_called_as_its_module_below_vllms(module: str) -> None:
    assert import_module(module).logger.name == f"vllm.{module}"

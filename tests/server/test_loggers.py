"""The names that stand in the log, and by which an operator sets levels."""

from importlib import import_module

from tests.sources import MODULES


def test_a_logger_is_called_as_its_module_below_vllms() -> None:
    with_logger = [
        module
        for module, path in MODULES.items()
        if "\nlogger = " in path.read_text(encoding="utf-8")
    ]
    assert len(with_logger) > 10
    for module in with_logger:
        assert import_module(module).logger.name == f"vllm.{module}"

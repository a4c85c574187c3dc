"""A tiny model of each family that replay is tested with."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.shapes import SHAPES, SIXTEEN_BIT, make_model

FAMILIES = {shape.model_type: shape for shape in (*SHAPES, *SIXTEEN_BIT)}
QWEN3 = replace(SHAPES[-1], options={**SHAPES[-1].options, "num_experts_per_tok": 3})
FAMILIES["qwen3_moe"] = QWEN3

Load = Callable[..., Any]
"""Makes a model of a family, by its type, with the weights that all of its models have."""


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("families")

    @cache
    def folder_of(model_type: str) -> Path:
        make_model(FAMILIES[model_type], folder / model_type)
        return folder / model_type

    def loaded(model_type: str = "qwen3_moe") -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder_of(model_type), dtype=torch.float32
        ).eval()

    return loaded

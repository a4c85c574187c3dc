"""A tiny Qwen3-VL-MoE with random weights, images for it, and an oracle of what it makes of prompts
with images."""

import base64
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText

from routed_experts.server.cli.tiny_model import make_tokenizer
from tests.e2e.harness import ON_GPU
from tests.e2e.shapes import HookOracle, Shape, fill_and_save, rewritten

_START, _END, _IMAGE, _VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_PATCH, _MERGED = 16, 32
"""Pixels of a side of a patch, and of the square that becomes a token."""
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_TEXT: dict[str, Any] = {
    **{
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 5,
    },
    **{
        "intermediate_size": 128,
        "moe_intermediate_size": 96,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    **{"mlp_only_layers": [0], "norm_topk_prob": True, "max_position_embeddings": 4096},
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
_VISION = {
    **{
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
    },
    **{"patch_size": _PATCH, "num_position_embeddings": 400, "deepstack_visual_indexes": [0, 1]},
}
SHAPE = Shape("qwen3-vl-moe, images", "qwen3_vl_moe", _TEXT, (1, 2, 3, 4))
PLACE = tuple(len(make_tokenizer()) + offset for offset in (0, 2, 1))
"""Tokens of an image in a prompt that is not processed yet: start, the image, end."""
MAX_TOKENS = 128
"""Of an image."""


def make_vision_model(directory: Path) -> None:
    """Writes a random float32 model, its tokenizer and the configuration of its processors to
    `directory`."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(token, special=True) for token in (_START, _END, _IMAGE, _VIDEO)]
    )
    tokenizer.chat_template = _TEMPLATE
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(
        zip(names, tokenizer.convert_tokens_to_ids([_START, _END, _IMAGE, _VIDEO]), strict=True)
    )
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    text = {**_TEXT, **special, "vocab_size": len(tokenizer), "dtype": "float32"}
    vision = {**_VISION, "dtype": "float32"}
    config = AutoConfig.for_model(
        "qwen3_vl_moe", text_config=text, vision_config=vision, dtype="float32", **ids
    )
    fill_and_save(AutoModelForImageTextToText, config, tokenizer, directory)
    # as the released ones are stored; Hugging Face reads both
    with rewritten(directory) as tensors:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    pixels = {"shortest_edge": _MERGED**2, "longest_edge": MAX_TOKENS * _MERGED**2}
    sizes = {"patch_size": _PATCH, "temporal_patch_size": 2, "merge_size": 2, "size": pixels}
    means = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    for name, processor in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        described = {**sizes, **processor, "processor_class": "Qwen3VLProcessor", **means}
        (directory / name).write_text(json.dumps(described))


def make_image(seed: int, width: int = 6, height: int = 5) -> Image.Image:
    """An image of width x height tokens: large squares of colours that a seed decides."""
    colours = np.random.default_rng(seed).integers(
        0, 256, (height * 2, width * 2, 3), dtype=np.uint8
    )
    return Image.fromarray(colours.repeat(_PATCH, 0).repeat(_PATCH, 1))


def url_of(image: Image.Image) -> str:
    """A `data:` URL."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class VisionOracle(HookOracle):
    """As `HookOracle`, for prompts with images."""

    def __init__(self, model: Path) -> None:
        # Here, as releases of transformers before 5 have no such file, and programs that make
        # images need none.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        super().__init__(
            AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32), SHAPE
        )
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(model)
        self._images: Sequence[Image.Image] = ()

    def show(self, *images: Image.Image) -> None:
        """Makes these the images of the prompts that are asked about next, in their order."""
        self._images = images
        self._known.clear()

    def inputs(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([list(tokens)])
        seen: dict[str, Any] = (
            self._processor(self._images, return_tensors="pt") if self._images else {}
        )
        return {
            "input_ids": ids,
            "mm_token_type_ids": (ids == self.model.config.image_token_id).int(),
            **seen,
        }


def turn(*parts: str | Image.Image) -> dict[str, Any]:
    """A message of a user."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


_APART = Path(sys.prefix) / "apart"
WITH_TORCHVISION: dict[str, str] = {}
"""Of processes that process images: vLLM's CPU build does without torchvision, and `make setup`
puts it apart."""
if not ON_GPU:
    _paths = (Path(__file__).parent / "with_torchvision", _APART, os.environ.get("PYTHONPATH"))
    WITH_TORCHVISION["PYTHONPATH"] = os.pathsep.join(str(path) for path in _paths if path)
needs_torchvision = pytest.mark.skipif(
    not (ON_GPU or _APART.is_dir()),
    reason="there is no torchvision, which processes images: run `make setup`",
)

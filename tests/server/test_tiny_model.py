"""Writing the tiny model: all of it or nothing, whatever happens on the way."""

import argparse
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedTokenizerFast

from routed_experts.server.cli import serve
from routed_experts.server.cli.tiny_model import make_tiny_model


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def use(directory: Path) -> None:
    args = argparse.Namespace(
        served_model_name=None,
        dtype="auto",
        kv_cache_memory_bytes=None,
        enforce_eager=False,
        enable_return_routed_experts=True,
        additional_config={},
    )
    serve.use_tiny_model(args, directory)


@pytest.mark.parametrize("part", [PreTrainedTokenizerFast, GenerationConfig])
def test_an_interrupted_start_is_repaired_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, part: type
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    directory = tmp_path / "cache" / "tiny"
    with monkeypatch.context() as interrupted:
        interrupted.setattr(part, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            use(directory)
    use(directory)
    assert contents(directory) == contents(tiny_model)


def test_only_what_is_missing_is_made(tiny_model: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()}
    use(tiny_model)
    assert {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()} == before
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    for missing in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / missing).unlink()
        use(tmp_path)
        assert contents(tmp_path) == contents(tiny_model)


def test_two_starts_at_once(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    replace = Path.replace
    others: list[dict[str, bytes]] = []

    def replace_after_another_start(file: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        make_tiny_model(tmp_path)
        others.append(contents(tmp_path))
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", replace_after_another_start)
    make_tiny_model(tmp_path)
    assert others == [contents(tiny_model)]
    assert contents(tmp_path) == contents(tiny_model)


def test_routers_are_wider_than_the_rest(tiny_model: Path) -> None:
    """So rounding never decides which expert is chosen."""
    for name, weights in load_file(tiny_model / "model.safetensors").items():
        if weights.dim() > 1 and not name.startswith("lm_head"):  # which prefers some tokens
            expected = 1.0 if name.endswith("mlp.gate.weight") else 0.08
            assert float(weights.std()) == pytest.approx(expected, rel=0.1), name

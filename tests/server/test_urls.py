"""URLs where a folder or a file may be named."""

from pathlib import Path

import pytest

from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.settings import Settings, SettingsError


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket", "az://a/b", "file:///x"])
def test_a_url_that_became_a_path_is_refused_in_words(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a folder below the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("routed_experts_store", "routed_experts_record"):
        with pytest.raises(SettingsError, match="a URL as text"):
            Settings(**{name: Path(url)})
    with pytest.raises(ValueError, match="as text"):
        ArrayStore(Path(url))
    assert [*tmp_path.iterdir()] == []

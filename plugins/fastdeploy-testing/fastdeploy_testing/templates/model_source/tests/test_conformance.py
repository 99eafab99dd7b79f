"""A model is found by name; one that is not there is an error that names those that are."""

from pathlib import Path

import pytest
from fd_myhub.source import MyHubSource

from fastdeploy_core.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("small", "small@v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setenv("MYHUB_FOLDER", str(tmp_path))
    return tmp_path


def test_a_model_is_found_by_name(root: Path) -> None:
    assert MyHubSource().fetch("small", "", None) == root / "small"
    assert MyHubSource().fetch("small", "v2", None) == root / "small@v2"


@pytest.mark.parametrize("name", ["large", "../etc", "/etc"])
def test_one_that_is_not_there_is_an_error(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="possible: small"):
        MyHubSource().fetch(name, "", None)


def test_without_its_folder_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MYHUB_FOLDER", raising=False)
    with pytest.raises(ConfigError, match="MYHUB_FOLDER"):
        MyHubSource()

"""The command's words and exit codes."""

import pytest
from fd_mycommand.command import main

from fastdeploy_core.errors import FastDeployError


def test_it_greets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


def test_what_it_does_not_know_is_an_error() -> None:
    with pytest.raises(FastDeployError, match="loud"):
        main(["you", "--loud"])

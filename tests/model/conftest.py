from __future__ import annotations

import socket
from pathlib import Path

import pytest
from toy_model import ToyModel


@pytest.fixture
def toy(tmp_path: Path) -> ToyModel:
    return ToyModel(tmp_path / "toy")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

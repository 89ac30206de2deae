from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.deployment.parts import Federation, federation, make_parties, namespaces_work


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not namespaces_work():
        pytest.skip("needs root and network namespaces")
    return make_parties(tmp_path_factory.mktemp("made"))


@pytest.fixture
def parties(made: Path, tmp_path: Path) -> Iterator[Federation]:
    """Yield a federation whose networks are connected and whose parties have not been started."""
    with federation(made, tmp_path) as one:
        yield one

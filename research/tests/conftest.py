"""Gives the research tests the fixtures that the product's tests use."""

from tests.conftest import (  # noqa: F401
    _own_directory,
    _pools_of_the_module,
    _pools_of_the_session,
    _pools_of_the_test,
    hippocampus,
    pytest_collection_finish,
    real_data,
)

"""Provides the images, as for the tests of the federation on one host."""

from tests.docker.conftest import images as images

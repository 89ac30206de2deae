"""Tests that terminal pictures show what a command printed, without a web font or other network access."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import terminal_pictures

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"


def words_of(picture: str) -> str:
    return " ".join("".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ").split())


def test_a_picture_is_of_a_real_command_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    command = "consilium study publish trial --images nowhere"
    picture = terminal_pictures.drawn(command, terminal_pictures.captured(command, cwd=tmp_path))
    assert f"$ {command}" in words_of(picture)
    assert "got 'nowhere'; allowed: " in words_of(picture)
    assert not re.search(r"url\((?!#)|href=", picture)


def test_a_live_bar_stands_as_it_was_at_the_end() -> None:
    frames = "\x1b[?25l\r\x1b[2Krun 0\r\x1b[2Krun 1\ncollect 0\r\x1b[2K\x1b[1A\x1b[2Krun 2\ncollect 9\n\x1b[?25hdone\n"
    assert terminal_pictures.last_frame(frames) == "run 2\ncollect 9\ndone"


def test_output_that_names_a_folder_of_this_machine_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="names"):
        terminal_pictures.captured(f"consilium study publish trial --images {tmp_path}/nowhere", cwd=tmp_path)


def test_every_picture_stands_in_a_document_and_is_of_its_command() -> None:
    text = "".join(path.read_text() for path in (DOCS / "deployment.md", DOCS.parent / "README.md"))
    assert {path.stem for path in terminal_pictures.FOLDER.glob("*.svg")} == set(terminal_pictures.PICTURES)
    for name, command in terminal_pictures.PICTURES.items():
        assert f"terminal/{name}.svg" in text
        assert f"$ {command}" in words_of((terminal_pictures.FOLDER / f"{name}.svg").read_text())

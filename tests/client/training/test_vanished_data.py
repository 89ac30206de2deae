"""Tests that a site whose data vanished or were not mounted spends nothing, keeps its teachers and says what to do."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from client.policy import load_site
from client.site.books import open_books
from client.training import side_by_side
from client.training import voter as voter_training
from client.training.command import PrivateOptions, TrainOptions, train
from client.training.site import plan_site
from client.training.voter import train_voter
from common.config import TrainingConfig
from common.data.msd import Case
from common.data.volume import load_example
from common.errors import InvalidInput
from tests.own_site import make_own_site
from tests.worlds import DATA, site_data


@pytest.mark.parametrize("options", [PrivateOptions("dp-sgd", epsilon=8.0), PrivateOptions()])
def test_a_training_without_any_image_is_refused_before_it_is_charged_and_keeps_the_teacher(
    tmp_path: Path, options: PrivateOptions
) -> None:
    """As when the disk with the images is not mounted. The training would have made a teacher of noise."""
    site = make_own_site(tmp_path, "consented")
    (tmp_path / "data" / "imagesTr").rename(tmp_path / "away")
    weights = site / "teachers" / "voter-000" / "weights.pt"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"an earlier teacher")
    with pytest.raises(InvalidInput, match="4 left out: the image file is missing; to fix: put it back") as refused:
        train(TrainOptions(site, private=options), progress=lambda *_: nullcontext(print), on_warning=print)
    assert str(tmp_path / "data") in str(refused.value)
    assert weights.read_bytes() == b"an earlier teacher"
    with open_books(load_site(site)) as ledger:
        assert not ledger.books.teachers.trainings


@pytest.mark.parametrize("lost", ["imagesTr", ".", "closed"])
def test_a_folder_that_vanishes_while_its_scans_are_read_stops_the_training_and_keeps_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    data = site_data(tmp_path)
    folder = data.cases[0].image.parent if lost == "imagesTr" else data.cases[0].image.parent.parent
    (task,) = plan_site(data, teachers=tmp_path / "t", data=DATA, recipe=TrainingConfig(steps=1), voters=1, seed=3)
    seen: list[Case] = []

    def reading_until_the_folder_is_gone(case: Case, *arguments: Any) -> Any:
        seen.append(case)
        if len(seen) == 3:
            folder.rename(tmp_path / "away")
            if lost == "closed":
                folder.symlink_to(folder)  # a system error other than "missing", also for root
        return load_example(case, *arguments)

    monkeypatch.setattr(voter_training, "load_example", reading_until_the_folder_is_gone)
    task.directory.mkdir(parents=True)
    (task.directory / "weights.pt").write_bytes(b"an earlier teacher")
    with pytest.raises(InvalidInput, match=f"gone or closed.*{folder}.*to fix: put it back"):
        train_voter(task, on_step=lambda *_: pytest.fail("a step was taken"))
    assert (task.directory / "weights.pt").read_bytes() == b"an earlier teacher"


def test_a_voter_that_stops_early_names_the_cause_and_the_remedy_without_the_name_of_a_class() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "site/teachers/voter-000/weights.pt")
    assert side_by_side._why(full).endswith(
        "weights.pt: No space left on device; to fix: make room on this disk: free space (`df`)"
    )
    refused = InvalidInput("folder", value="x", remedy="put it back")
    assert side_by_side._why(refused) == str(refused)
    assert side_by_side._why(ZeroDivisionError("a fault")) == "ZeroDivisionError: a fault"

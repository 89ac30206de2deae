"""Writes training curves to a folder for TensorBoard or MLflow, whose packages are optional extras.

Called by the trainings of sites and server if `--metrics` is given; a package is imported only then. Everything is
written to files below the folder. No server is contacted, and MLflow's telemetry is turned off before MLflow is
imported. Refuses a form other than ``tensorboard`` and ``mlflow``. The error for a missing package says how to install
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from common.errors import InvalidInput
from common.registry import optional

Kind = TypeVar("Kind")


class Curves(Protocol):
    """Interface that records the training curves of one run, each by its name."""

    def point(self, name: str, value: float, *, step: int) -> None:
        """Add a point to a curve.

        Args:
            name: Name of the curve.
            value: Value of the point.
            step: Step of the training.
        """
        ...

    def close(self) -> None:
        """Write the points that are still in memory, and end the run."""
        ...


class TensorBoardCurves:
    """Records training curves as a TensorBoard log in ``folder``/``run``."""

    def __init__(self, folder: Path, run: str) -> None:
        writer = optional("torch.utils.tensorboard", user="--metrics tensorboard", install="'tensorboard>=2.18'")
        self._writer = writer.SummaryWriter(log_dir=str((folder / run).absolute()))

    def point(self, name: str, value: float, *, step: int) -> None:
        """Add a point to a curve."""
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MlflowCurves:
    """Records training curves as a run of the experiment ``consilium`` in MLflow's file store at ``folder``."""

    EXPERIMENT = "consilium"

    def __init__(self, folder: Path, run: str) -> None:
        os.environ |= {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }  # MLflow reads them on import
        client = optional("mlflow.tracking", user="--metrics mlflow", install="'mlflow-skinny>=3'")
        self._client = client.MlflowClient(tracking_uri=folder.absolute().as_uri())
        found = self._client.get_experiment_by_name(self.EXPERIMENT)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.EXPERIMENT)
        self._run = self._client.create_run(experiment, run_name=run).info.run_id

    def point(self, name: str, value: float, *, step: int) -> None:
        """Add a point to a curve."""
        self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


FORMS: Mapping[str, Callable[[Path, str], Curves]] = {"tensorboard": TensorBoardCurves, "mlflow": MlflowCurves}


def open_curves(asked: str, *, run: str) -> Curves:
    """Begin the curves of a run. TensorBoard and MLflow show the runs of one folder together.

    Args:
        asked: Form and folder, such as ``tensorboard:runs``.
        run: Name of the run.

    Returns:
        The curves.

    Raises:
        InvalidInput: If the form is unknown, the folder cannot be created, or the package is not installed.
    """
    form, _, folder = asked.partition(":")
    if form not in FORMS or not folder:
        raise InvalidInput(
            "--metrics",
            value=asked,
            limit=f"FORM:FOLDER, where FORM is {' or '.join(FORMS)}",
            remedy="write for instance tensorboard:runs",
        )
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            "folder of --metrics",
            value=folder,
            limit=f"a folder that can be created; the system says: {error.strerror}",
        ) from error
    return FORMS[form](Path(folder), run)


@contextmanager
def curves_of(asked: str | None, kind: Callable[[Curves], Kind], *, run: Callable[[], str]) -> Iterator[Kind | None]:
    """Open the curves of one run, and close them at the end.

    Args:
        asked: Form and folder, as given to ``--metrics``; None for no curves.
        kind: Class of the caller's writer, which is made from the open curves.
        run: Returns the name of the run.

    Yields:
        The writer; None if ``asked`` is None.

    Raises:
        InvalidInput: For the reasons in :func:`open_curves`.
    """
    if asked is None:
        yield None
        return
    with closing(open_curves(asked, run=run())) as curves:
        yield kind(curves)

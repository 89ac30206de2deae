"""Runs the whole demo on one machine: data, teachers, a federation of real daemons, a study, a student, a report.

1. Split the data, or make phantoms.
2. Create the study; fit its codec while server and dashboard start.
3. Train the teachers while the server admits the hospitals.
4. Start the federation and run the study; or, simulated, run it in this process.
5. Score everything and write the report, while one hospital pulls and evaluates the student.

The demo plays every party, so it can score teachers and ensemble on held-out cases and compare labels with the true
label maps, which no party of a real study can. These scores are not used in the study. Finished stages are not repeated
when the same command is run again. The module refuses a directory that holds a demo with other options.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Event, Lock
from typing import Any

from client.data.case_checks import readable
from client.training.side_by_side import default_jobs, import_libraries
from common.data.dataset import Dataset, left_out_lines
from common.data.msd import nifti_files, read_dataset
from common.data.split import (
    SITES,
    Split,
    SplitCounts,
    plan_split,
    private_label_hashes,
    with_own_sites,
    without_channel,
    write_split,
)
from common.data.synthetic import PhantomImaging, write_phantoms
from common.errors import InvalidInput, Refused
from common.locks import take
from common.names import is_utf8
from common.objects import write_json
from common.protocol_terms import CODECS
from consilium.demo.dashboard import dashboard
from consilium.demo.federation import enrolled, joined, refuse_stranger, serving, write_server, write_sites
from consilium.demo.options import MOST_HOSPITALS, DemoFolders, DemoOptions, dataset_of
from consilium.demo.simulation import simulate
from consilium.demo.terms import PATIENTS, VOLUMES, check_terms, terms
from consilium.demo.training import train_all
from server.operations.supervisor import OnEvent, supervise
from server.study import create_study as setup

HOSPITALS = 3  # unless the options or the data state a number
MAPS = 24  # number of public label maps, from phantoms
TESTED = 45
"""Number of phantoms for testing. With this many, the gain's interval is at most half as wide as the gain."""
CLINIC = PhantomImaging(cut_mm=(-2.5, 4.0), clutter=0.0, noise=0.5, size=1.25, shift_mm=6.0)
"""Settings of the hospitals' phantoms. The position of their structures varies so much that neither the mean shape nor
another volume's answer is a good label."""
ATLAS = replace(CLINIC, border_mm=6.0)
KNOWN = (
    f"The hospitals draw the border between the two structures where brightness changes. The public label maps draw it "
    f"{ATLAS.border_mm * ATLAS.size:g} mm away from there, and no public image has a label. So only the hospitals know "
    "where the border is."
)
"""A sentence for the report on the knowledge that only the phantoms' hospitals have."""
SCORING_NICENESS = 10
"""Niceness of the thread that scores teachers and student, so that the study's daemons get the processor first."""


@dataclass(frozen=True, slots=True)
class DemoProgress:
    """The functions to which a demo reports its progress.

    Attributes:
        start: Called with the name and total of a stage that begins.
        advance: Called with a stage's name, the number done and the total; may be called before ``start``.
        finish: Called with the name of a stage that ends.
        event: Called with each event of the study.
        say: Called with other lines.
    """

    start: Callable[[str, int], None]
    advance: Callable[[str, int, int], None]
    finish: Callable[[str], None]
    event: OnEvent
    say: Callable[[str], None]


def run_demo(out: Path, options: DemoOptions, *, watch: DemoProgress, show_dashboard: bool = True) -> Path:
    """Run or resume a demo. A simulation has no daemons and no dashboard.

    Args:
        out: The output directory.
        options: The demo's options.
        watch: Functions to which progress is reported.
        show_dashboard: True to start a dashboard beside the federation.

    Returns:
        Path of the report.

    Raises:
        InvalidInput: If the directory holds other files or a demo with other options, or the options do not fit the
            data.
        Refused: ``busy`` if another run writes to the directory.
        DaemonFailed: If a daemon fails.
    """
    with _alone(out, options):
        return _demo(out, options, watch=watch, show_dashboard=show_dashboard)


def _demo(out: Path, options: DemoOptions, *, watch: DemoProgress, show_dashboard: bool) -> Path:
    import_libraries()  # beside the preparation, which uses one core
    from consilium.demo.evaluate import report_facts, score_teachers  # imported late: needs torch and matplotlib
    from consilium.reports.study_report import write_report

    seconds, federation = Stopwatch(out / "seconds.json", watch), None
    study = create_demo_study(out, options, watch=watch, stopwatch=seconds)
    places, workspace = study.places, study.places.workspace

    def reported() -> None:
        with seconds.stage("evaluation"):
            known = "" if options.data else KNOWN
            facts = report_facts(
                places,
                tested.result(),
                on_volume=check,
                source=study.source,
                options=options,
                federation=federation,
                seconds=seconds.seconds,
                known=known,
            )
        write_report(out, facts)

    with _one_thread(niceness=SCORING_NICENESS) as (beside, check):
        with ExitStack() as stack:
            if options.simulated:
                sites = study.publish()
                study.train(sites)
                tested = beside.submit(score_teachers, places, on_volume=check)
                with seconds.stage("study run"):
                    simulate(workspace, sites, on_event=watch.event)
                report = beside.submit(reported)
            else:
                group = stack.enter_context(serving(workspace))
                show: Callable[[], None] = lambda: None  # noqa: E731
                if show_dashboard:
                    show = stack.enter_context(dashboard(workspace.root, places.dashboard, say=watch.say))

                with _one_thread() as (
                    opening,
                    check_enrolling,
                ):  # it ends before the daemons stop, even after an error

                    def enrol() -> str:
                        def say_next(step: str) -> None:
                            check_enrolling()
                            watch.say(step)

                        enrolled(group, workspace, sites, on_step=say_next)
                        say_next("a stranger")
                        return refuse_stranger(group, workspace)

                    shown = opening.submit(show)
                    sites = study.publish()
                    enrolling = opening.submit(enrol)
                    study.train(sites)
                shown.result()
                with seconds.stage("federation"):
                    join = joined(group, workspace, sites, refusal=enrolling.result(), on_step=watch.say)
                    federation = stack.enter_context(join)
                tested = beside.submit(score_teachers, places, on_volume=check)  # while the study waits for messages
                with seconds.stage("study run"):
                    supervise(workspace, on_event=watch.event, check=federation.group.check)
                report = beside.submit(reported)  # while a hospital scores the student and the daemons stop
                with seconds.stage("student home"), _another_process() as process:
                    process.submit(_take_home, next(iter(sites.values()))).result()
        report.result()
    return out / "report.html"


@dataclass(frozen=True, slots=True)
class DemoStudy:
    """A demo whose study is created; the server's daemons can start.

    Attributes:
        places: The demo's folders.
        source: Folder of the dataset.
        options: The demo's options.
        watch: Functions to which progress is reported.
        stopwatch: Measures the stages.
    """

    places: DemoFolders
    source: Path
    options: DemoOptions
    watch: DemoProgress
    stopwatch: Stopwatch

    def publish(self) -> dict[str, Path]:
        """Publish the study's volumes, codec and public start, and set up the hospitals, unless it was done before.

        Returns:
            Directory of each hospital by name.
        """
        names = [folder.name for folder in _hospitals(self.places)]
        with self.stopwatch.stage("public material"):
            _publish(self.places, self.options, len(names), self.watch)
            return write_sites(  # each kit holds the public start
                self.places.workspace,
                self.places.sites,
                names=names,
                data=self.places.split / "sites",
                absent=self.options.lacking,
            )

    def train(self, sites: Mapping[str, Path]) -> None:
        """Train the teachers of all hospitals; resume what an earlier run began.

        Args:
            sites: Directory of each hospital by name.
        """
        study = self.places.workspace.study()
        private = self.options.private(begun=self.places.workspace.start_file.exists())
        steps = study.teacher.steps if private is None else private.steps
        voters = study.privacy.voters_per_site * len(sites)
        with self.stopwatch.stage("teachers", total=steps * voters):
            train_all(
                sites,
                private=private,
                seed=self.options.seed,
                processes=default_jobs(voters),
                on_steps=lambda done, total: self.watch.advance("teachers", done, total),
            )


def create_demo_study(out: Path, options: DemoOptions, *, watch: DemoProgress, stopwatch: Stopwatch) -> DemoStudy:
    """Split the data and create the study, unless an earlier run did.

    Args:
        out: The output directory.
        options: The demo's options.
        watch: Functions to which progress is reported.
        stopwatch: Measures the stages.

    Returns:
        The demo.

    Raises:
        InvalidInput: If the directory holds a demo with other options, or the options do not fit the data.
    """
    places = DemoFolders(out)
    _claim(out, options)
    with stopwatch.stage("data"):
        source = _data(places, options, on_case=partial(watch.advance, "reading cases"), tell=watch.say)
    with stopwatch.stage("study"):
        _create(places, options)
    return DemoStudy(places, source, options, watch, stopwatch)


def _take_home(site_dir: Path) -> None:
    """Run a hospital's last steps: pull the student, check it against receipts, and score it on its own cases."""
    from client.teachers.evaluation import evaluate
    from client.teachers.pulled_student import pull

    pull(site_dir)
    evaluate(site_dir, now=datetime.now(UTC))


_RENAMED = {"joint": "rounds"}
"""New name of each option that version 0.2.0 stored under another name."""


LOCK_NAME = ".lock"
"""File in the output directory that a run locks. The kernel frees the lock when the process ends."""


@contextmanager
def _alone(out: Path, options: DemoOptions) -> Iterator[None]:
    """Hold the lock of the output directory; ``busy`` if another run holds it."""
    _check_claim(out, options)  # a refused run leaves no folder and no lock file; checked again under the lock
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK_NAME).open("ab") as lock:
        if not take(lock):
            raise Refused(
                "busy",
                f"another `consilium demo` or `consilium simulate` writes to {out}; allowed: one run at a time in a "
                "directory; to fix: wait until it ends, or choose another --out",
            )
        yield


def _claim(out: Path, options: DemoOptions) -> None:
    """Store the options in the output directory; refuse a directory in which a run with other options has begun."""
    _check_claim(out, options)
    write_json(out / "demo.json", asdict(options))


def _check_claim(out: Path, options: DemoOptions) -> None:
    """Refuse options that cannot be run in this output directory. Writes nothing."""
    path = out / "demo.json"
    wanted = asdict(options)
    for option, folder in (("--out", str(out.resolve())), ("--data", options.data or "")):
        if not is_utf8(folder):
            raise InvalidInput(
                f"folder of {option}",
                value=folder,
                limit="a path in UTF-8, because the run writes the path into its files",
                remedy="rename the folder, or choose another",
            )
    if options.codec not in CODECS:
        raise InvalidInput("--codec", value=options.codec, limit=", ".join(sorted(CODECS)))
    check_terms(options, options.hospitals or (MOST_HOSPITALS if options.data else HOSPITALS))
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        held = {_RENAMED.get(key, key): value for key, value in held.items()}
        before = asdict(DemoOptions()) | held  # an older demo lacks newer options
        other = [f"{key}: {before.get(key)} before" for key in wanted if before.get(key) != wanted[key]]
        begun = {one.name for one in out.iterdir()} - {path.name, "seconds.json", LOCK_NAME}
        if other and begun:  # a run that was refused at once has left nothing else
            raise InvalidInput(
                "output directory holds a run with other options",
                value=f"{out} ({'; '.join(other)})",
                remedy="choose another --out, or give the options of the first run",
            )
    elif out.exists() and any(one.name != LOCK_NAME for one in out.iterdir()):
        raise InvalidInput(
            "output directory holds other files than a demo's", value=str(out), remedy="choose another --out"
        )


def _data(
    places: DemoFolders,
    options: DemoOptions,
    *,
    on_case: Callable[[int, int], None] = lambda done, total: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Split the data unless they are split already, and return the dataset's folder.

    ``tell`` is called with lines on the cases used and left out.
    """
    source = Path(options.data) if options.data else places.source
    if (places.split / "split.json").exists():
        return source
    if options.data:
        own = dataset_of(source, options)
        dataset = with_own_sites(own, source)
        if dataset is not own and len({case.hospital for case in dataset.labelled}) < 2:
            dataset = own
            tell(f"{SITES} is not used, because it names a single hospital: patients are assigned at random")
        dataset = readable(dataset, on_case=on_case)
        split = plan_split(dataset, _counts(dataset, options), seed=options.seed)
        check_terms(options, len(split.sites))
        for sentence in left_out_lines(len(split.cases), split.problems):
            tell(sentence)
    else:
        dataset, split = _phantoms(places, options)
    shutil.rmtree(places.split, ignore_errors=True)
    write_split(split, dataset, places.split)
    for site, contrast in options.lacking.items():
        without_channel(places.split / "sites" / site, contrast)
    return source


def _counts(dataset: Dataset, options: DemoOptions) -> SplitCounts:
    cases = len(dataset.labelled)
    named = all(case.hospital for case in dataset.labelled)
    return SplitCounts(
        hospitals=options.hospitals or (None if named else HOSPITALS),
        public_images=options.queries or min(30, max(8, cases // 5)),
        label_maps=options.label_maps or max(8, cases // 8),
        paired=options.paired,
        validation=max(2, cases // 20),
        test=max(4, cases // 6),
    )


def _phantoms(places: DemoFolders, options: DemoOptions) -> tuple[Dataset, Split]:
    """Make the hospitals' phantoms and split them; return the dataset and the split.

    The public label maps are of other phantoms, whose border between structures is drawn elsewhere (:data:`ATLAS`).
    """
    hospitals = options.hospitals or HOSPITALS
    counts = SplitCounts(
        public_images=options.queries or VOLUMES, label_maps=0, paired=options.paired, validation=3, test=TESTED
    )
    total = PATIENTS * hospitals + counts.set_aside
    for directory, cases, first, drawing in (
        (places.source, total, 0, CLINIC),
        (places.atlas, MAPS, total, ATLAS),
    ):
        if not (directory / "dataset.json").exists():
            shutil.rmtree(directory, ignore_errors=True)  # the rest of an interrupted demo
            scanners = hospitals if first == 0 else 1
            write_phantoms(directory, cases=cases, first=first, hospitals=scanners, seed=options.seed, drawing=drawing)
    dataset = read_dataset(places.source)
    split = plan_split(dataset, counts, seed=options.seed)
    return dataset, replace(split, label_maps=read_dataset(places.atlas).labelled)


def _create(places: DemoFolders, options: DemoOptions) -> None:
    """Create the study and its server, unless they exist."""
    workspace = places.workspace
    if not workspace.study_file.exists():
        patients = [_patients(folder) for folder in _hospitals(places)]
        setup.create_study(workspace, terms(options, places, _label_maps(places), patients))
    if not (workspace.root / "endpoint.json").exists():
        write_server(workspace)


def _publish(places: DemoFolders, options: DemoOptions, hospitals: int, watch: DemoProgress) -> None:
    """Publish the public volumes and the validation cases, and fit the codec, unless it was done before.

    The validation cases are read in another process, because reading them and fitting each use one core.
    """
    workspace = places.workspace
    if not (workspace.root / "public.json").exists():
        pairs = read_dataset(places.split / "public" / "paired") if options.paired else None
        images = nifti_files(places.split / "public" / "images", what="public images")
        setup.publish_volumes(workspace, images, paired=pairs)
    with _another_process() as process:
        published = None
        if not workspace.validation():
            published = process.submit(setup.publish_validation, workspace, read_dataset(places.split / "test"))
        if not workspace.codec_file.exists():
            setup.fit_study_codec(
                workspace,
                _label_maps(places),
                sites=hospitals,
                private_hashes=private_label_hashes(places.split / "split.json"),
                on_stage=watch.advance,
            )
        if published is not None:
            published.result()  # raises the error of a case that cannot be read


@contextmanager
def _one_thread(*, niceness: int = 0) -> Iterator[tuple[ThreadPoolExecutor, Callable[[], None]]]:
    """Run work beside a with-block in one thread, and make this work end early if the block fails or is interrupted.

    Args:
        niceness: Niceness of the thread.

    Yields:
        The thread's executor, and a function that the work must call regularly. After an error in the block this
        function raises CancelledError, and queued work is not started.
    """
    ended = Event()

    def check() -> None:
        if ended.is_set():
            raise CancelledError

    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(niceness,)) as thread:
        try:
            yield thread, check
            thread.shutdown()
        except BaseException:
            ended.set()
            thread.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _another_process() -> Iterator[ProcessPoolExecutor]:
    """Yield an executor with one process, which ends at once if the block fails or is interrupted.

    The process is forked from the trainings' fork server, which has imported torch.
    """
    before = active_children()
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as process:
        try:
            yield process
        except BaseException:
            for child in active_children():
                if child not in before:
                    child.terminate()
            raise


def _label_maps(places: DemoFolders) -> tuple[Path, ...]:
    return nifti_files(places.split / "public" / "label-maps", what="public label maps")


def _hospitals(places: DemoFolders) -> list[Path]:
    """Return the folder of each hospital's data, by name."""
    return sorted(path for path in (places.split / "sites").iterdir() if path.is_dir())


def _patients(folder: Path) -> int:
    dataset = read_dataset(folder)
    return len({dataset.patient_of(case.id) for case in dataset.labelled})


class Stopwatch:
    """Measures the seconds spent in each stage of a demo, added up over resumptions, and stores them in a file."""

    def __init__(self, path: Path, watch: DemoProgress) -> None:
        self._path, self._watch, self._writing = path, watch, Lock()
        self.seconds: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @contextmanager
    def stage(self, name: str, *, total: int = 1) -> Iterator[None]:
        self._watch.start(name, total)
        started = time.monotonic()
        try:
            yield
        finally:
            with self._writing:  # two stages can end at once
                self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 2)
                write_json(self._path, self.seconds)
        self._watch.finish(name)

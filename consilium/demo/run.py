"""The whole road on one machine: data, teachers, a federation of real daemons, a study, a student, a report.

The demo plays every party, so it may do what no party of a real study can: score teachers and ensemble on held-out
cases and compare pseudo-labels with the truth. Nothing of that reaches the study. Stages that are done are not
repeated when the same command is run again; another command on the same directory is refused.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from client.training.side_by_side import default_jobs
from common.codecs.paper import codec_terms
from common.config import JOINT_ROUNDS, STUDENT_RECIPE, DataConfig, PrivacyConfig, Study, TrainingConfig
from common.data.grid import choose_grid
from common.data.msd import read_dataset
from common.data.split import SplitCounts, plan_split, private_label_hashes, write_split
from common.data.synthetic import study_data, write_phantoms
from common.errors import InvalidInput
from common.objects import write_atomically
from consilium.demo.dashboard import dashboard
from consilium.demo.federation import running, write_server, write_sites
from consilium.demo.options import DemoOptions, Places
from consilium.demo.training import train_all
from server.operations.supervisor import OnEvent, supervise
from server.study import create_study as setup

PATIENTS = 20  # a hospital, of phantoms
SYNTHETIC_RECIPE = (
    TrainingConfig(channels=(8, 16, 32), steps=400),
    TrainingConfig(channels=(8, 16, 32), steps=400, learning_rate=1e-2),
)
REAL_RECIPE = (TrainingConfig(), STUDENT_RECIPE)


@dataclass(frozen=True, slots=True)
class Watch:
    """How a demo tells what it does: stages begin, at the latest when they advance, and end."""

    start: Callable[[str, int], None]
    advance: Callable[[str, int, int], None]
    finish: Callable[[str], None]
    event: OnEvent
    say: Callable[[str], None]


def run_demo(out: Path, options: DemoOptions, *, watch: Watch, show_dashboard: bool = True) -> Path:
    """Run or resume the demo in ``out``, with a dashboard beside the federation; returns the report's path."""
    from consilium.demo.evaluate import report_facts  # torch and matplotlib once there is something to score
    from consilium.reports.study_report import write_report

    places = Places(out)
    _claim(out, options)
    seconds = _Stopwatch(out / "seconds.json", watch)
    with seconds.stage("data"):
        source = _data(places, options)
    with seconds.stage("study"):
        study = _study(places, options, source, watch)
    names = sorted(path.name for path in (places.split / "sites").iterdir() if path.is_dir())
    sites = write_sites(places.workspace, places.sites, names=names, data=places.split / "sites")
    private = options.private()
    steps = study.teacher.steps if private is None else private.steps
    with seconds.stage("teachers", total=steps * study.privacy.voters_per_site * len(names)):
        train_all(
            sites,
            private=private,
            seed=options.seed,
            processes=default_jobs(study.privacy.voters_per_site * len(names)),
            on_steps=lambda done, total: watch.advance("teachers", done, total),
        )
    with ExitStack() as stack:
        if show_dashboard:
            stack.enter_context(dashboard(places.workspace.root, places.dashboard, say=watch.say))
        with seconds.stage("federation"):
            federation = stack.enter_context(running(places.workspace, sites, on_step=watch.say))
        with seconds.stage("study run"):
            supervise(places.workspace, on_event=watch.event, check=federation.group.check)
        with seconds.stage("student home"):
            take_home(next(iter(sites.values())))
    with seconds.stage("evaluation"):
        facts = report_facts(places, source=source, options=options, federation=federation, seconds=seconds.seconds)
    write_report(out, facts)
    return out / "report.html"


def take_home(site_dir: Path) -> None:
    """What a hospital does at the end: pull the student, check it against its receipts, score it on its own cases."""
    from client.teachers.evaluation import evaluate
    from client.teachers.student import pull

    pull(site_dir)
    evaluate(site_dir, now=datetime.now(UTC))


def _claim(out: Path, options: DemoOptions) -> None:
    path = out / "demo.json"
    wanted = asdict(options)
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        if asdict(DemoOptions()) | held != wanted:  # an older demo says nothing of options it did not have
            raise InvalidInput(
                "output directory holds a demo with other options", value=str(out), remedy="choose another --out"
            )
    elif out.exists() and any(out.iterdir()):
        raise InvalidInput("output directory is not empty and holds no demo", value=str(out), remedy="another --out")
    write_atomically(path, (json.dumps(wanted, indent=1) + "\n").encode())


def _data(places: Places, options: DemoOptions) -> Path:
    source = Path(options.data) if options.data else places.source
    if (places.split / "split.json").exists():
        return source
    if options.data:
        cases = len(read_dataset(source).labelled)
        counts = SplitCounts(
            hospitals=options.hospitals,
            public_images=options.queries,
            label_maps=max(8, cases // 8),
            validation=max(2, cases // 20),
            test=max(4, cases // 6),
        )
    else:
        counts = SplitCounts(public_images=options.queries, label_maps=24, validation=4, test=16)
        if not (source / "dataset.json").exists():
            shutil.rmtree(source, ignore_errors=True)  # what an interrupted demo left
            total = PATIENTS * options.hospitals + counts.set_aside
            write_phantoms(source, cases=total, hospitals=options.hospitals, seed=options.seed)
    shutil.rmtree(places.split, ignore_errors=True)
    dataset = read_dataset(source)
    write_split(plan_split(dataset, counts, seed=options.seed), dataset, places.split)
    return source


def _study(places: Places, options: DemoOptions, source: Path, watch: Watch) -> Study:
    workspace = places.workspace
    maps = sorted((places.split / "public" / "label-maps").glob("*.nii.gz"))
    if not workspace.study_file.exists():
        dataset = read_dataset(source)
        teacher, student = REAL_RECIPE if options.data else SYNTHETIC_RECIPE
        spacing = (1.0, 1.0, 1.0)
        data = study_data()
        if options.data:
            grid = choose_grid(maps, spacing_mm=spacing)
            data = DataConfig(labels=dataset.labels, channels=dataset.channels, spacing_mm=spacing, grid=grid)
        study = Study(
            name="demo",
            data=data,
            privacy=PrivacyConfig(
                epsilon=options.epsilon,
                delta=options.delta,
                planned_queries=JOINT_ROUNDS if options.joint else options.queries,
                quorum=max(1, options.hospitals // 2 + 1),
                accountant=options.accountant,  # type: ignore[arg-type]  # PrivacyConfig parses it
                relation=options.relation,  # type: ignore[arg-type]
                unit=options.unit,  # type: ignore[arg-type]
                voters_per_site=options.voters,
                aggregation=options.aggregation,
                colluders=options.colluders,
                spare_draws=options.spare_draws,
            ),
            codec=codec_terms(options.codec, labels=len(data.labels), grid=data.grid, joint=options.joint),
            teacher=teacher,
            student=student,
        )
        setup.create_study(workspace, study)
    if not (workspace.root / "public.json").exists():
        setup.publish_volumes(workspace, sorted((places.split / "public" / "images").glob("*.nii.gz")))
    if not (workspace.root / "codec.json").exists():
        private = private_label_hashes(places.split / "split.json")
        setup.fit_study_codec(workspace, maps, sites=options.hospitals, private_hashes=private, on_stage=watch.advance)
    if not (workspace.root / "endpoint.json").exists():
        write_server(workspace)
    return workspace.study()


class _Stopwatch:
    """Seconds spent in each stage, kept over resumptions."""

    def __init__(self, path: Path, watch: Watch) -> None:
        self._path, self._watch = path, watch
        self.seconds: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @contextmanager
    def stage(self, name: str, *, total: int = 1) -> Iterator[None]:
        self._watch.start(name, total)
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 2)
            write_atomically(self._path, (json.dumps(self.seconds, indent=1) + "\n").encode())
        self._watch.finish(name)

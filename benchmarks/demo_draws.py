"""Repeats the demo's noise, and counts its warnings, without daemons: ``python -m benchmarks.demo_draws``.

Phantoms, public start and teachers are made once, as `consilium demo` makes them, and stored in ``--out``. Then:

* ``--draws N``: N times fresh noise, each with its labels, student and controls, scored on the demo's test cases;
* ``--studies N``: N honest studies, in which each site's voters are drawn with replacement from those trained, and N/10
studies of each poisoned kind, in which the first site pushes by a multiple of its radius m·R, against its own honest
vote or in a fixed direction. It prints how often ``answers-weighed`` warns; nothing is trained.

Answers are made, noised and read by the functions of a run (:mod:`consilium.memory`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64

from client.teachers.teacher import Teachers
from common.data.msd import read_dataset
from common.data.volume import load_label, load_volume
from common.errors import Refused
from common.measured_gain import Score, over_best
from common.metrics import score
from common.models.fit import predict
from common.objects import json_bytes
from common.privacy.mechanism import QuerySpec
from common.protocols.site_protocol import Encoder, vote_of
from consilium.demo.options import DemoFolders, DemoOptions
from consilium.demo.run import DemoProgress, Stopwatch, create_demo_study
from consilium.memory.asked import AnswerInMemory, Asked, answers_to, released
from server.protocols.query_protocol import protocol_of
from server.protocols.rounds import FRAMES
from server.public.material import START_FILE, PublicMaterial
from server.public.public_files import FilesInMemory

PUSHES = (1, 2, 3, 4)
"""Length of the push in units of m·R; a push of five is refused as a spoiled sum."""
KINDS = ("against", "fixed")
Picks = Sequence[Sequence[int]]
"""For each site, the indices of the voters that answer."""


@dataclass(frozen=True, eq=False)
class World:
    """A demo's public part and its teachers' codes of the public volumes.

    Attributes:
        places: The demo's folders.
        public: What is public of its study.
        codes: Codes by site, voter and volume.
    """

    places: DemoFolders
    public: PublicMaterial
    codes: Sequence[Sequence[Sequence[Float[np.ndarray, "l"]]]]

    @classmethod
    def open(cls, out: Path, *, seed: int) -> World:
        """Create the demo or continue it, and have every teacher predict every public volume once.

        Args:
            out: Folder of the demo.
            seed: Seed of phantoms, split and training.
        """
        quiet = DemoProgress(*[lambda *_: None] * 5)
        options = DemoOptions(seed=seed, simulated=True)
        study = create_demo_study(out, options, watch=quiet, stopwatch=Stopwatch(out / "seconds.json", quiet))
        study.train(study.publish())
        places = study.places
        made = places.workspace.public()
        public = replace(made, kept=_before(made), images={volume: made.image(volume) for volume in made.volumes})
        (query,) = next(iter(protocol_of(public.study).configure(public, lambda _: None)))
        encoder = _encoder(public, query)
        codes = []
        for folder in sorted(places.sites.glob("hospital-*")):
            teachers = Teachers.load(folder / "teachers")
            volumes = [list(teachers.predict(public.image(volume))) for volume in public.volumes]
            codes.append([[_code(encoder, each[voter]) for each in volumes] for voter in range(len(teachers.models))])
        return cls(places, public, codes)

    @property
    def picks(self) -> Picks:
        """Return all voters of every site."""
        return [range(len(site)) for site in self.codes]

    def ask(
        self, picks: Picks, *, push: float = 0.0, kind: str = ""
    ) -> tuple[PublicMaterial, tuple[AnswerInMemory, ...]]:
        """Return the study's answers by these voters, with fresh noise.

        Args:
            picks: The voters.
            push: How far the first site pushes, in units of m·R.
            kind: ``against`` its honest vote, or ``fixed`` direction.

        Returns:
            What is public of the study afterwards, and the answers.
        """
        public = replace(self.public, kept=_before(self.public))

        def codes(encoder: Encoder, query: QuerySpec) -> list[Int64[np.ndarray, "d"]]:
            found = []
            for site, voters in zip(self.codes, picks, strict=True):
                votes = {voter: vote_of(encoder, site[voter], query.mechanism) for voter in set(voters)}
                found.append(np.sum([votes[voter] for voter in voters], axis=0))
            if push:
                fixed = np.random.default_rng(7).normal(size=len(found[0]))
                way = -found[0].astype(float) if kind == "against" else fixed
                found[0] = np.rint(way / np.linalg.norm(way) * push * query.mechanism.site_radius_int).astype(np.int64)
            return found

        voters = sum(map(len, picks))
        draw: Callable[..., Int64[np.ndarray, "d"]] = lambda query, each: released(each, query.mechanism)  # noqa: E731
        return public, answers_to(public, codes=codes, draw=draw, voters=voters)

    def warned(self, picks: Picks, *, push: float = 0.0, kind: str = "") -> list[str]:
        """Return the warnings that an operator of one such study gets."""
        try:
            public, answers = self.ask(picks, push=push, kind=kind)
        except Refused:
            return ["the sum is refused as spoiled"]
        weighed = protocol_of(public.study).aggregate(public, answers).plausibility()
        assert weighed is not None
        return list(weighed.warnings)

    @cached_property
    def tested(self) -> tuple[list[Float[np.ndarray, "c x y z"]], list[np.ndarray]]:
        """Return images and label maps of the demo's test cases."""
        data, cases = self.public.study.data, read_dataset(self.places.split / "test").labelled
        labels = [load_label(case.label, data, mapping=dict(case.label_map)) for case in cases if case.label]
        return [load_volume(case.image, data).image for case in cases], labels

    def dice(self, model: torch.nn.Module) -> Score:
        """Return a network's score on the test cases."""
        images, labels = self.tested
        found = [predict(model, image).argmax(axis=0).astype(np.uint8) for image in images]
        return score(found, labels, self.public.study.data.members)

    def draws(self, count: int) -> Iterator[str]:
        """Yield one line on the student's gain for each of ``count`` noise draws."""
        for number in range(1, count + 1):
            public, answers = self.ask(self.picks)
            asked = Asked(public, answers, len(self.codes))
            student = self.dice(asked.student().model)
            controls = {name: self.dice(network.model) for name, network in asked.controls().items()}
            weighed = protocol_of(public.study).aggregate(public, answers).plausibility()
            found = over_best(student, controls)
            assert found is not None
            assert weighed is not None
            yield f"draw {number}: {found.sentence} {'; '.join(weighed.warnings) or 'no warning'}"


def _before(public: PublicMaterial) -> FilesInMemory:
    """Return what a study has stored before any query: its start, and the first round's frame."""
    kept = FilesInMemory()
    start, frames = public.kept.read(START_FILE), public.kept.read(FRAMES)
    assert start is not None
    assert frames is not None
    kept.write(START_FILE, start)
    kept.write(FRAMES, json_bytes(json.loads(frames)[:1]))
    return kept


def _encoder(public: PublicMaterial, query: QuerySpec) -> Encoder:
    from common.codecs import load_codec
    from common.protocols.site_protocol import site_protocol

    codec = load_codec(public.objects.get(public.codec.sha256))
    return site_protocol(public.study).encoder(query, codec, fetch=public.objects.get)


def _code(encoder: Encoder, probabilities: Float[np.ndarray, "k x y z"] | None) -> Float[np.ndarray, "l"]:
    """Return the code of one teacher's prediction of a volume, which does not depend on the round."""
    assert probabilities is not None  # every phantom of a demo can be read
    return encoder.of_volume(probabilities, lambda: probabilities)


def studies(world: World, count: int, *, seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield each kind of study, the number of studies with a warning, and the number of studies.

    Args:
        world: The demo.
        count: Number of honest studies.
        seed: Seed of the drawn voters.
    """
    rng = np.random.default_rng(seed)

    def picks() -> Picks:
        return [rng.integers(len(site), size=len(site)).tolist() for site in world.codes]

    yield "honest", sum(bool(world.warned(picks())) for _ in range(count)), count
    for kind in KINDS:
        for push in PUSHES:
            each = max(1, count // 10)
            yield (
                f"{kind}, {push} m·R",
                sum(bool(world.warned(picks(), push=push, kind=kind)) for _ in range(each)),
                each,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo's noise again and again, in one process")
    parser.add_argument("--out", type=Path, default=Path("demo-draws"), help="where the demo is made and kept")
    parser.add_argument("--seed", type=int, default=0, help="of phantoms, split, training and drawn voters")
    parser.add_argument("--draws", type=int, default=0, help="students of fresh noise")
    parser.add_argument("--studies", type=int, default=0, help="honest studies to be weighed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = World.open(given.out, seed=given.seed)
    for line in world.draws(given.draws):
        print(line, flush=True)
    for kind, warned, count in studies(world, given.studies, seed=given.seed) if given.studies else ():
        print(f"{kind}: {warned} of {count} warned", flush=True)


if __name__ == "__main__":
    main()

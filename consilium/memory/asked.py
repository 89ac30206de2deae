"""Runs a study's queries in memory: every teacher's answer is clipped, quantised, summed, noised and decoded.

``consilium.ask``, the notebook and the README's example call it. It uses the functions of a site's worker and of the
server's core: the encoders, :func:`~common.protocols.site_protocol.vote_of`, :func:`~common.privacy.release.noisy_sum`
or the noise shares of a sealed sum, and the query protocol's queries, labels and controls.

Signatures, encryption, masks and ledgers are left out, because they change no number. One person holds every teacher,
code and noise value, so the result protects nobody. The module refuses a study that publishes volumes with their label
maps, that has a student on a finer grid, or that begins from given weights: such a study needs files (``consilium
simulate``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from jaxtyping import Float, Int64

from client.masked import with_share
from common.canonical import MAX_INTEGER, check_integer, digest, sha256_bytes
from common.codecs.codec import Codec, frozen, load_codec
from common.config import Study
from common.data.copies import voxel_hash
from common.errors import BudgetExceeded, InvalidInput
from common.objects import ObjectsInMemory
from common.privacy.accounting import Guarantee, admits, compose, guarantee, max_mu_squared
from common.privacy.checks import check_kind
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.mechanism import Mechanism, QuerySpec
from common.privacy.release import noisy_sum
from common.privacy.shares import share_std, unmasked
from common.protocols.site_protocol import Encoder, site_protocol, vote_of
from common.wording import many
from consilium.memory.given import Teacher, images_given, probabilities_given, sites_given
from consilium.memory.networks import Controls, Network
from server.protocols.controls import CONTROLS
from server.protocols.query_protocol import STUDENT_SEED, StudentData, check_study, protocol_of
from server.protocols.stored_labels import LabelsInMemory
from server.public.material import START_FILE, CodecRecord, PublicMaterial
from server.public.public_files import FilesInMemory

HELD = (
    "one person held every teacher, code and draw of noise here: this is what such a study would guarantee, and this "
    "one protects nobody"
)


@dataclass(frozen=True, slots=True, eq=False)
class AnswerInMemory:
    """A noisy answer to a query (:class:`~server.protocols.query_protocol.Answer`) that is stored in no ledger.

    Attributes:
        query: The query.
        noisy_sum: Read-only int64 array [d] in grid steps of 2⁻¹⁶.
        voters: Number of voters in the sum.
    """

    query: QuerySpec
    noisy_sum: Int64[np.ndarray, "d"]
    voters: int


@dataclass(frozen=True, slots=True)
class GuaranteeInMemory:
    """The guarantee that these releases would have in a real study, where each hospital keeps its own data.

    Here one person holds all data, so nobody is protected. The text that ``str`` returns says so.

    Attributes:
        spent: ε and δ of all releases, with their unit and relation.
        releases: Number of releases.
        sites: Number of sites.
        colluders: Number of sites that may tell the server what they know; None in a study without sealed sums.
    """

    spent: Guarantee
    releases: int
    sites: int
    colluders: int | None

    def __str__(self) -> str:
        against = ""
        if self.colluders is not None:
            against = f", against the server together with {self.colluders} of the sites"
        return f"{self.spent}{against}; {many(self.releases, 'release')} over {self.sites} sites; {HELD}"


@dataclass(frozen=True, eq=False)
class Asked:
    """The noisy answers to a study's queries. Guarantee, labels, student and controls all use these releases.

    Attributes:
        public: Everything about the study that is public.
        answers: The releases. The noisy sum of each is int64 of shape [d], in grid steps of 2⁻¹⁶.
        sites: Number of sites in each release.

    >>> asked = c.ask(study, c.fit_codec(study, maps, sites=8), volumes=images[:2], teachers=teachers)
    >>> [label.shape for label in asked.labels()]
    [(2, 8, 8, 8), (2, 8, 8, 8)]
    """

    public: PublicMaterial
    answers: tuple[AnswerInMemory, ...]
    sites: int

    @property
    def study(self) -> Study:
        """The study that was run."""
        return self.public.study

    @property
    def guarantee(self) -> GuaranteeInMemory:
        """The guarantee of these releases by the study's accountant.

        Each further call of ``ask`` costs its own ε in addition, because no ledger adds the calls up.
        """
        privacy = self.study.privacy
        spent = compose([answer.query.mechanism for answer in self.answers], privacy.protection)
        cost = guarantee(spent, privacy.budget, privacy.protection, privacy.accountant)
        return GuaranteeInMemory(cost, len(self.answers), self.sites, privacy.sealed_colluders)

    def labels(self) -> tuple[Float[np.ndarray, "k x y z"], ...]:
        """Decode the answers.

        Returns:
            Float32 probabilities of shape [k, x, y, z] for every volume, in the order in which the volumes were given.
            They are copies: writing to them changes neither the answers nor the student.
        """
        return tuple(self._labels[volume].copy() for volume in self.public.volumes)

    def student(self, *, seed: int = STUDENT_SEED) -> Network:
        """Train the student by the study's protocol.

        The training begins from the public start if the protocol trains one, otherwise from random weights.

        Args:
            seed: Seed of the first weights, the batches and the augmentation.

        Returns:
            The trained network.
        """
        training = protocol_of(self.study).finish(self._student_data(seed))
        return self._network(training.train(None, _quietly), seed)

    def controls(self, *, seed: int = STUDENT_SEED) -> Controls:
        """Train the student's controls: networks with its recipe and seed that learn without the teachers' answers.

        Args:
            seed: Seed of the first weights, the batches and the augmentation.

        Returns:
            The controls by name.
        """
        protocol, networks = protocol_of(self.study), dict[str, Network]()
        student_data = replace(self._student_data(seed), trained=lambda name: networks[name].model)
        for name in CONTROLS:  # in this order, because the last control may be trained on the first one's predictions
            training = protocol.control(student_data, name)
            if training is not None:
                networks[name] = self._network(training.train(None, _quietly), seed)
        return Controls(self.study, networks)

    @cached_property
    def _labels(self) -> LabelsInMemory:
        found = protocol_of(self.study).aggregate(self.public, self.answers).labels()
        return LabelsInMemory({label.volume: label.probabilities for label in found})

    def _student_data(self, seed: int) -> StudentData:
        check_integer("seed", seed, least=0, most=MAX_INTEGER)
        return StudentData(self.public, self.answers, self._labels, seed=seed)

    def _network(self, model: object, seed: int) -> Network:
        fresh, data = self.public.kept.read(START_FILE) is None, self.study.data
        images, shape = self.public.images or {}, (len(data.channels), *data.grid)
        seen = frozenset(map(voxel_hash, images.values()))
        return Network(model, self.study.student, seed=seed, fresh=fresh, shape=shape, trained_on=seen)


def ask(
    study: Study,
    codec: Codec,
    *,
    volumes: Sequence[Float[np.ndarray, "c x y z"]] | Float[np.ndarray, "n c x y z"],
    teachers: Sequence[Teacher | Sequence[Teacher]],
    sampler: Sampler = rounded_gaussian,
) -> Asked:
    """Run every query of a study, in memory.

    Args:
        study: The terms. Its protocol (``study.codec``) determines the queries and the decoding of answers.
        codec: The study's codec, fitted by :func:`~common.codecs.codec.fit_codec`.
        volumes: The public volumes as networks see them: on the study's grid and normalised. Each is [c, x, y, z], or
            [x, y, z] if the study has one channel. There must be as many as the study asks about.
        teachers: Callables from a float32 image [c, x, y, z] to probabilities [k, x, y, z] or to a label map of
            integers [x, y, z]. Give one flat list with ``voters_per_site`` teachers of the first site, then as many of
            the second, and so on; or give one list for each site. A site's own list may be shorter; missing teachers
            count as the zero code. A teacher is called once for each volume.
        sampler: Draws the noise; by default from the operating system's secure random generator. Only tests give
            another.

    Returns:
        The noisy answers, from which guarantee, labels, student and controls are computed.

    Raises:
        InvalidInput: For input that does not fit the study: shapes, NaN, unknown labels, a volume given twice, or the
            codec of another study.
        QuorumNotReached: If there are teachers of fewer sites than the study's quorum.

    >>> asked = c.ask(study, c.fit_codec(study, maps, sites=8), volumes=images[:2], teachers=teachers)
    >>> print(asked.guarantee.spent)
    ε = 8 (exact) at δ = 1e-05, unit patient, relation replace-one
    """
    _check_in_memory(study, codec)
    sites, shape = sites_given(teachers, study), (len(study.data.channels), *study.data.grid)
    images = images_given(volumes, shape=shape, what="volume")
    public = _public(study, codec, images)
    protocol = protocol_of(study)
    query_plan = protocol.query_plan(study)
    check_study(study)
    query_plan.check_volumes(len(images))
    if len(asked := query_plan.asked(public.volumes)) != len(images):
        raise InvalidInput("volumes", value=len(images), limit=f"{len(asked)}, the number that the study asks about")
    protocol.prepare(lambda: public, sites=len(sites), on_stage=lambda *_: None)
    spent: list[Mechanism] = []
    known: dict[Hashable, Float[np.ndarray, "l"]] = {}

    def codes(encoder: Encoder, query: QuerySpec) -> list[Int64[np.ndarray, "d"]]:
        return [
            _site_code(encoder, query, public, teachers=site, who=f"site {number}", known=known)
            for number, site in enumerate(sites, start=1)
        ]

    def draw(query: QuerySpec, codes: Sequence[Int64[np.ndarray, "d"]]) -> Int64[np.ndarray, "d"]:
        _check_budget(study, spent, query.mechanism)
        spent.append(query.mechanism)
        return released(codes, query.mechanism, sampler=sampler)

    voters = len(sites) * study.privacy.voters_per_site
    return Asked(public, answers_to(public, codes=codes, draw=draw, voters=voters), len(sites))


def answers_to(
    public: PublicMaterial,
    *,
    codes: Callable[[Encoder, QuerySpec], Sequence[Int64[np.ndarray, "d"]]],
    draw: Callable[[QuerySpec, Sequence[Int64[np.ndarray, "d"]]], Int64[np.ndarray, "d"]],
    voters: int,
) -> tuple[AnswerInMemory, ...]:
    """Ask every query of a study's protocol, in order.

    Args:
        public: Everything about the study that is public.
        codes: Returns the sites' codes of a query, int64 [d] each.
        draw: Returns the noisy sum of a query's codes, int64 [d].
        voters: Number of voters in each sum.

    Returns:
        The answers.
    """
    codec, site = load_codec(public.objects.get(public.codec.sha256)), site_protocol(public.study)
    answers: dict[str, AnswerInMemory] = {}
    for queries in protocol_of(public.study).configure(public, answers.get):
        for query in (each for each in queries if each.id not in answers):
            encoder = site.encoder(query, codec, fetch=public.objects.get)
            answers[query.id] = AnswerInMemory(query, frozen(draw(query, codes(encoder, query)), np.int64), voters)
    return tuple(answers.values())


def _site_code(
    encoder: Encoder,
    query: QuerySpec,
    public: PublicMaterial,
    *,
    teachers: Sequence[Teacher],
    who: str,
    known: dict[Hashable, Float[np.ndarray, "l"]],
) -> Int64[np.ndarray, "d"]:
    """Return one site's integer code for a query, the sum of its teachers' codes. # sensitive until noised

    ``known`` caches the teachers' codes of volumes; missing ones are computed and added.
    """
    total, data = np.zeros(query.mechanism.dimension, dtype=np.int64), public.study.data
    for number, teacher in enumerate(teachers, start=1):
        codes = []
        for place, volume in enumerate(query.volumes, start=1):
            key = (who, number, encoder.volume_key, volume)
            if key not in known:
                image = public.image(volume)
                what = f"answer of teacher {number} of {who} on volume {place} of the query"
                try:
                    given = teacher(image.copy())
                except Exception as error:
                    error.add_note(f"while waiting for the {what}")
                    raise
                found = probabilities_given(given, grid=data.grid, classes=len(data.labels), what=what)
                known[key] = encoder.of_volume(found, partial(np.asarray, image))
            codes.append(known[key])
        total += vote_of(encoder, codes, query.mechanism)
    return total


def released(
    codes: Sequence[Int64[np.ndarray, "d"]], mechanism: Mechanism, *, sampler: Sampler = rounded_gaussian
) -> Int64[np.ndarray, "d"]:
    """Return the noisy sum of the sites' codes.

    In an open study the server adds the noise. In a sealed sum each site adds a share of the noise; the masks are left
    out here, because they cancel.

    Args:
        codes: The sites' codes, int64 [d]. # sensitive
        mechanism: The release's mechanism.
        sampler: The noise sampler.

    Returns:
        int64 array [d].

    Raises:
        InvalidInput: If a code has another shape or a larger norm.
        Refused: If the norm of a sealed sum is larger than honest codes and noise can cause.
    """
    if mechanism.colluders is None:
        return noisy_sum(codes, mechanism, sampler=sampler)
    share = share_std(mechanism, sites=len(codes))
    total = np.zeros(mechanism.dimension, dtype=np.uint64)
    for code in codes:
        total += with_share(code, share, sampler=sampler).view(np.uint64)
    return unmasked(total, mechanism, sites=len(codes))


def _public(study: Study, codec: Codec, images: Sequence[Float[np.ndarray, "c x y z"]]) -> PublicMaterial:
    objects, named = ObjectsInMemory(), dict[str, np.ndarray]()
    for number, image in enumerate(images, start=1):
        name = digest("volume-in-memory", {"shape": list(image.shape), "voxels": sha256_bytes(image.tobytes())})
        if name in named:
            first = list(named).index(name) + 1
            raise InvalidInput(
                "volumes", value=f"volume {number} is the same as volume {first}", limit="different volumes"
            )
        named[name] = image
    record = CodecRecord(objects.put(codec.to_bytes()), codec.dimension)
    return PublicMaterial(study, record, tuple(named), objects, FilesInMemory(), images=named)


def _check_in_memory(study: Study, codec: Codec) -> None:
    """Refuse a study that needs files, and a codec of another study."""
    check_kind("study", study, Study)
    check_kind("codec", codec, Codec)  # type: ignore[type-abstract]
    files = "use `consilium simulate`, which runs a study in a folder"
    if study.codec.paired:
        raise InvalidInput("codec.paired", value=study.codec.paired, limit="0 for a study in memory", remedy=files)
    if study.data.finer > 1:
        raise InvalidInput("data.finer", value=study.data.finer, limit="1 for a study in memory", remedy=files)
    if study.start.weights:
        raise InvalidInput("start.weights", value=study.start.weights, limit="none for a study in memory", remedy=files)
    theirs = (codec.name, codec.radius, codec.labels, tuple(codec.grid))
    ours = (study.codec.name, study.codec.radius, len(study.data.labels), study.data.grid)
    if theirs != ours:
        raise InvalidInput("codec (name, radius, labels, grid)", value=theirs, limit=f"{ours}, as in the study")


def _check_budget(study: Study, before: Sequence[Mechanism], mechanism: Mechanism) -> None:
    """Refuse a release that the study's budget does not cover."""
    privacy = study.privacy
    spent = compose(before, privacy.protection)
    asked, limit = mechanism.mu_squared(privacy.protection), max_mu_squared(privacy.accountant, privacy.budget)
    if not admits(spent, asked, limit):
        raise BudgetExceeded(study.name, requested=float(asked), remaining=float(limit - spent))


def _quietly(_step: int, _loss: float) -> None:
    """Ignore a training's progress."""

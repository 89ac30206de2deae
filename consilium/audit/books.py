"""Recomputes the figures in an audited study's ledgers from their rows and the claimed noise, and compares them.

``consilium.audit.run`` calls it. A *life* is one complete run of the study, from its first query to its end. The field
``measured`` of a finding is the worst value in this run. Sums must agree to a relative error of 1e-9. To test whether a
nearly spent budget is enforced, the audit also asks a cheap query. It costs a hundredth of all planned releases, or as
much as one release if that is less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import floor, isclose

import numpy as np
from jaxtyping import Int64

from common.config import Study
from common.privacy.audit import AuditFinding
from common.privacy.claim import claimed_epsilon
from consilium.audit.sealed import left_of_noise, masked_findings
from consilium.audit.service import AuditedRelease, AuditedRun, Service, frame_of, read_life

_ROUNDING = 1e-9
_SPARE = 1e-6  # share of a release, for the rounding of a budget for a whole number of releases


def life_findings(service: Service, life: AuditedRun, *, ended: str | None) -> list[AuditFinding]:
    """Check the ledgers after a run, before further queries are asked.

    Args:
        service: The study's server and sites.
        life: Contents of their ledgers after one complete run.
        ended: Name of the error that ended the run; empty if none did. None for a run with lost draws, a stopped server
            or silent sites: then the charged draws are counted instead of the releases.

    Returns:
        The findings.
    """
    return [
        _draws(service, life) if ended is None else _end(service, life, ended),
        _statements(service, life),
        _noise_on_record(service, life),
        *_sums(service, life),
        _codes(service, life),
        *_mu(service, life),
        _receipts(service, life),
        *(masked_findings(service, _own(service, life)) if service.study.privacy.sealed else ()),
    ]


def allowed(service: Service) -> dict[str, int]:
    """Return how many releases each site's pool allows: by its budget at the server, its caps, and the study's plan.

    Args:
        service: The study's server and sites.

    Returns:
        Releases by site.
    """
    cost, planned = service.subject.cost, service.subject.queries
    return {site: min(planned, floor(limit / cost + _SPARE)) for site, limit in service.limits().items()}


def noise_of(service: Service, life: AuditedRun, *, turn: int = 0) -> list[Int64[np.ndarray, "l"]]:
    """Return the noise added to the sum of the sites' codes in each release, in order.

    In a sealed sum it is the noise that remains unknown to a party that knows the shares of the assumed colluders.
    The sites that are assumed to collude change with each release and with ``turn``.

    Args:
        service: The study's server and sites.
        life: Contents of their ledgers after one complete run.
        turn: Number that selects the assumed colluders of the first release.

    Returns:
        int64 arrays of shape [l].
    """
    if service.study.privacy.sealed:
        return left_of_noise(service, life, _own(service, life), turn=turn)
    noise = []
    for release in _own(service, life):
        codes = [life.sites[site].codes.get(release.query) for site in release.roster]
        noise.append(release.answer - sum(code for code in codes if code is not None))
    return noise


@dataclass(slots=True)
class _Account:
    """The budget of one pool, and the Σμ² that it has spent in each study as computed by the audit."""

    limit: float
    by_study: dict[str, float]

    @property
    def spent(self) -> float:
        return sum(self.by_study.values())

    def fits(self, cost: float, study: Study, *, within: float) -> bool:
        """Return whether a query of μ² ``cost`` fits the pool's budget and the study's own budget ``within`` (Σμ²)."""
        room = min(self.limit - self.spent, within - self.by_study.get(study.id, 0.0))
        return cost <= room * (1 + _SPARE)

    def charge(self, cost: float, study: Study) -> None:
        self.by_study[study.id] = self.by_study.get(study.id, 0.0) + cost


def further_findings(service: Service) -> list[AuditFinding]:
    """Ask further queries after the study's end, and check that exactly those that fit the budgets are answered.

    The audit asks for the stored answers again, for one query more, for a query that costs a hundredth of all planned
    releases (at most as much as one release), and for queries of another study. Sites must decline a query that is
    cheaper than a planned release, because they consented only to the noise of a planned release.

    Args:
        service: The study's server and sites, after a complete run.

    Returns:
        The findings.
    """
    subject, study = service.subject, service.study
    other = replace(study, name=f"{study.name[:56]}-again")
    changed, life = service.ask_again(), read_life(service)
    server, sites = {}, {}
    for site, server_limit, site_limit in zip(service.sites, service.server_limits, service.site_limits, strict=False):
        server[site.name] = _Account(server_limit.mu_squared, {study.id: spent_by_rows(service, life, site.name)})
        sites[site.name] = _Account(site_limit.mu_squared, {study.id: accepted_by_rows(service, life, site.name)})
    passed: Counter[str] = Counter()
    short = 0
    hundredth = min(1.0, subject.queries / 100)
    for number, (asker, share) in enumerate([(study, 1.0), (study, hundredth), (other, 1.0), (other, 1.0)], start=1):
        query, cost, within = service.further(number, share=share), subject.cost * share, subject.limit.mu_squared
        fits = all(account.fits(cost, asker, within=within) for account in server.values())
        admitted = service.ask_server(query, asker)
        passed["server"] += admitted and not fits
        short += fits and not admitted
        for account in server.values() if admitted else ():
            account.charge(cost, asker)
        for name, word in service.ask_sites(query, asker).items():
            fits = share == 1.0 and sites[name].fits(cost, asker, within=within)  # sites consented to this noise only
            passed["sites"] += word == "accepted" and not fits
            short += fits and word != "accepted"
            if word == "accepted":
                sites[name].charge(cost, asker)
    after = read_life(service)
    told = [(after.spent[name], spent_by_rows(service, after, name)) for name in server]
    told += [(after.sites[name].spent, accepted_by_rows(service, after, name)) for name in sites]
    return [
        AuditFinding.at_most("answers asked for again", changed, 0, "stored answers that changed"),
        *(
            AuditFinding.at_most(f"beyond a budget, {who}", passed[who], 0, "further queries that were answered")
            for who in ("server", "sites")
        ),
        AuditFinding.at_most("within the budgets", short, 0, "further queries that were refused"),
        apart("sums over studies", told),
    ]


def liar_findings(service: Service, life: AuditedRun, *, refused: int, ended: str) -> list[AuditFinding]:
    """Check a run in which the last site sent a code whose norm is above the bound for a site.

    In an open study the code must be refused, and count as zero if the other sites still form a quorum. In a sealed
    study the sum with this code must be refused, which ends the run.

    Args:
        service: The study's server and sites.
        life: Contents of their ledgers after one complete run.
        refused: Number of refused codes; in a sealed study, number of refused sums.
        ended: Name of the error that ended the run; empty if none did.

    Returns:
        The findings.
    """
    sealed = service.study.privacy.sealed
    alone = len(service.sites) - 1 < service.study.privacy.quorum
    fine = (
        (refused, ended) == (1, "Refused")
        if sealed
        else refused == 1 and ended == ("QuorumNotReached" if alone else "")
    )
    distance = 0.0
    for release in _own(service, life):
        expected = _expected(service, release)
        honest = np.sum([expected[site.name] for site in service.sites[:-1]], axis=0)
        distance = max(distance, abs(float((release.answer - honest)[0]) / release.noise_std))
    return [
        AuditFinding(
            "lying site", refused, 1, not fine, f"codes beyond m·R{' in sums' * sealed} refused{_why(ended)}; exactly"
        ),
        AuditFinding.at_most(
            "lying site's share", distance, 9.0, "distance of the answer from the honest sites' sum, in σ"
        ),
    ]


# --- one by one


def _end(service: Service, life: AuditedRun, ended: str) -> AuditFinding:
    """Check that the study ends when its budgets end, and that every site is in all releases that its pool allows."""
    room = allowed(service)
    quorum, planned = service.study.privacy.quorum, service.subject.queries
    expected = max((n for n in range(planned + 1) if sum(r >= n for r in room.values()) >= quorum), default=0)
    own = _own(service, life)
    counts = Counter(site for release in own for site in release.roster)
    beyond = max((counts[site] - min(room[site], expected) for site in room), key=abs, default=0)
    beyond = beyond or len(own) - expected
    fine = ended == "" or (ended == "QuorumNotReached" and expected < planned)
    return AuditFinding(
        "releases of a run",
        beyond,
        0,
        beyond != 0 or not fine,
        f"releases more or fewer than the budgets allow{_why(ended if not fine else '')}; at most",
    )


def _draws(service: Service, life: AuditedRun) -> AuditFinding:
    """Check that no pool is charged for more draws than its budget allows.

    A draw is one attempt at a sealed sum. A draw without an answer costs the same as one with an answer.
    """
    counts = Counter(site for row in life.charged for site in row.roster)
    most, cost = service.subject.limit.mu_squared, service.subject.cost
    room = {site: floor(min(limit, most) / cost + _SPARE) for site, limit in service.limits().items()}
    beyond = max((counts[site] - room[site] for site in room), default=0)
    return AuditFinding.at_most("draws of a run", beyond, 0, "draws charged to a pool beyond its budget")


def _statements(service: Service, life: AuditedRun) -> AuditFinding:
    """Check the facts stated in each release (dimension, radius, voters, study), and that no code is missing."""
    subject, wrong = service.subject, 0
    voters = service.study.privacy.voters_per_site
    for release in _own(service, life):
        frame = frame_of(service, release)
        size = subject.dimension if frame is None else frame.dimension
        stated = (release.dimension, release.radius, release.voters_per_site, release.answer.shape)
        wrong += stated != (size, subject.radius, voters, (size,))
        wrong += any(release.query not in life.sites[site].codes for site in release.roster)
    return AuditFinding.at_most(
        "terms of releases", wrong, 0, "releases with other terms than the study, or without a code"
    )


def _noise_on_record(service: Service, life: AuditedRun) -> AuditFinding:
    stds = [row.noise_std for row in life.charged]
    stds += [std for site in life.sites.values() for std in site.accepted.values()]
    least = min(stds, default=service.subject.claimed_noise_std) / service.subject.claimed_noise_std
    what = "smallest σ in any row, divided by the claimed σ"
    return AuditFinding.at_least("noise in the rows", least, 1.0, what, slack=_ROUNDING)


def _sums(service: Service, life: AuditedRun) -> list[AuditFinding]:
    server = [(life.spent[site.name], spent_by_rows(service, life, site.name)) for site in service.sites]
    sites = [(record.spent, accepted_by_rows(service, life, site)) for site, record in life.sites.items()]
    return [apart("server ledger's sums", server), apart("site ledgers' sums", sites)]


def _codes(service: Service, life: AuditedRun) -> AuditFinding:
    """Check that every stored code is the sum of its voters' clipped codes, as computed here.

    Truncation may change a coordinate by one grid step of 2⁻¹⁶ for each voter.
    """
    worst = 0.0
    for release in _own(service, life):
        for site, expected in _expected(service, release).items():
            if (code := life.sites[site].codes.get(release.query)) is not None:
                off = np.abs(code - expected).max()
                worst = max(worst, float(off) / release.voters_per_site)
    return AuditFinding.at_most(
        "codes", worst, 1.0, "distance of a code from the expected one, in steps of 2^-16 a voter"
    )


def _mu(service: Service, life: AuditedRun) -> list[AuditFinding]:
    subject = service.subject
    study = max((spent_by_rows(service, life, site.name) for site in service.sites), default=0.0)
    pools = max(spent_by_rows(service, life, site) / limit for site, limit in service.limits().items())
    spent = study**0.5
    epsilon = claimed_epsilon(spent, subject.limit.delta, accountant=subject.limit.accountant) if spent else 0.0
    share = life.epsilon.get(service.study.id, 0.0) / epsilon if epsilon else 1.0
    reported = "ε that the server's ledger reports, divided by the ε of that run's releases"
    return [
        AuditFinding(
            "μ of what was released",
            spent,
            subject.claimed_mu,
            spent > subject.claimed_mu * (1 + _ROUNDING),
            "computed from the ledger's rows; claimed",
        ),
        AuditFinding.at_most(
            "share of a pool's budget", pools, 1.0, "largest spent share of a pool's Σμ²", slack=_ROUNDING
        ),
        AuditFinding.at_least("reported ε", share, 1.0, reported, slack=_ROUNDING),
    ]


def _receipts(service: Service, life: AuditedRun) -> AuditFinding:
    """Check that every site has receipts for all its releases, and that the last receipt states their cost."""
    missing = 0
    for site, record in life.sites.items():
        owed = {release.query for release in _own(service, life) if site in release.roster}
        missing += len(owed - record.receipted)
        missing += not isclose(record.receipted_mu_squared, spent_by_rows(service, life, site), rel_tol=_ROUNDING)
    return AuditFinding.at_most("receipts", missing, 0, "missing receipts, and last receipts with a wrong sum")


# --- helpers


def _own(service: Service, life: AuditedRun) -> list[AuditedRelease]:
    return [release for release in life.releases if release.study == service.study.id]


def spent_by_rows(service: Service, life: AuditedRun, site: str) -> float:
    """Return the Σμ² that a site was charged, from the claimed sensitivity and the noise stated in the ledger's rows.

    Attempts at a sealed sum that gave no answer are included.

    Args:
        service: The study's server and sites.
        life: Contents of their ledgers after one complete run.
        site: Name of the site.

    Returns:
        Σμ².
    """
    reach = service.subject.reach
    return float(sum((reach / row.noise_std) ** 2 for row in life.charged if site in row.roster))


def accepted_by_rows(service: Service, life: AuditedRun, site: str) -> float:
    """Return the Σμ² of all queries that a site accepted, from the claimed sensitivity and the noise in its ledger.

    Args:
        service: The study's server and sites.
        life: Contents of their ledgers after one complete run.
        site: Name of the site.

    Returns:
        Σμ².
    """
    return float(sum((service.subject.reach / std) ** 2 for std in life.sites[site].accepted.values()))


def _expected(service: Service, release: AuditedRelease) -> dict[str, Int64[np.ndarray, "l"]]:
    """Return the code that each site of a release must have sent, computed from its voters' predictions."""
    frame, subject, expected = frame_of(service, release), service.subject, {}
    clipped: dict[str, Int64[np.ndarray, "l"]] = {}
    for index, site in enumerate(service.sites):
        if site.name in release.roster:
            words = service.world.sayings(subject, index)
            clipped |= {word: subject.clipped(word, frame) for word in words if word not in clipped}
            expected[site.name] = np.sum([clipped[word] for word in words], axis=0)
    return expected


def apart(name: str, told_and_own: list[tuple[float, float]]) -> AuditFinding:
    """Report the largest relative difference between a ledger's sums and the sums computed here.

    Args:
        name: Name of the finding.
        told_and_own: Pairs of the ledger's sum and the computed one.

    Returns:
        The finding.
    """
    worst = max((abs(told - own) / max(own, 1e-300) if told != own else 0.0) for told, own in told_and_own)
    return AuditFinding.at_most(name, worst, _ROUNDING, "relative difference between the ledger's sum and the audit's")


def _why(ended: str) -> str:
    return f" (it ended with {ended})" if ended else ""

"""Lists mutants of the privacy path: a changed line of production, the test that must fail, and the audited
study.

``tests/test_privacy_mutants.py`` runs a sample of the tests, ``python -m tests.privacy_mutants`` all of them and the
audits, and writes what was seen to ``docs/lab/privacy-mutants.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutation.runner import Mutant


@dataclass(frozen=True, slots=True)
class Row:
    """Holds a mutant with its test, its area, and the ``study-part`` of an audit that should notice it.

    ``audit`` is a parameter of :data:`AUDIT`, and empty if a running study does not execute the changed line.
    """

    area: str
    mutant: Mutant
    audit: str


AUDIT = "tests/consilium/audit/test_mutations.py::test_one_part_of_an_audit_of_production_as_it_is_raises_no_alarm"
"""The test that fails for a mutant if that part of an audit raises an alarm."""


def row(
    area: str,
    name: str,
    file: str,
    before: str,
    after: str,
    test: str,
    audit: str = "",
    *,
    also: tuple[tuple[str, str], ...] = (),
) -> Row:
    return Row(area, Mutant(name, file, before, after, test, also), audit.replace("/", "-"))


QUANTISE, MECHANISM = "common/privacy/quantise.py", "common/privacy/mechanism.py"
GAUSSIAN, RELEASE = "common/privacy/gaussian.py", "common/privacy/release.py"
SHARES, MASKED, MASKING = "common/privacy/shares.py", "client/masked.py", "common/masking.py"
ACCOUNTING, CALIBRATION = "common/privacy/accounting.py", "common/privacy/calibration.py"
SERVER, SITE, DRAWS = "common/ledger/server_state.py", "common/ledger/site_state.py", "server/ledger/server_draws.py"
KEYS, FIGURES = "common/public_keys.py", "common/privacy/figures.py"

GIVEN_BACK = """                for query_id in record.query_ids:
                    self._check_open(query_id, record.draw)
                    gone = self.releases[query_id]
                    for entry in gone.roster:
                        protection = self.studies[gone.study_id].protection
                        cost = charge_of(gone.mechanism, self.pools[entry.pool].protection, protection)
                        spend = self.spent(entry.pool)
                        self._set(self._spent, entry.pool, Spend(spend.mu_squared - cost, 0, spend.coordinates))
                    self.releases.end(query_id, None)"""
ENDED = """                for query_id in record.query_ids:
                    self._check_open(query_id, record.draw)
                    self.releases.end(query_id, None)"""
SEEDED = "np.rint(np.random.default_rng(7).normal(0, float({}), {})).astype(np.int64)"

ROWS = (
    # --- clip and grid
    row(
        "clip",
        "clip one grid step too far",
        QUANTISE,
        "while not within(result, bound_int=radius_int):",
        "while not within(result, bound_int=radius_int + 1):",
        "tests/common/privacy/test_quantise.py::test_no_code_gets_past_the_integer_radius",
        "single/exchange",
        also=(
            (
                "scaled = clip(code, radius=radius_int * 2.0**-GRID_BITS)",
                "scaled = clip(code, radius=(radius_int + 1) * 2.0**-GRID_BITS)",
            ),
        ),
    ),
    row(
        "clip",
        "norm test by the largest coordinate",
        QUANTISE,
        "return int(np.dot(code, code)) <= bound_int * bound_int",
        "return peak <= bound_int",
        "tests/common/privacy/test_quantise.py::test_within_decides_in_exact_integers_for_every_int64",
        "single/books",
    ),
    row(
        "clip",
        "truncation away from zero",
        QUANTISE,
        "    scaled = clip(code, radius=radius_int * 2.0**-GRID_BITS) * 2.0**GRID_BITS\n    result = np.trunc(scaled)",
        "    scaled = clip(code, radius=radius_int * 2.0**-GRID_BITS) * 2.0**GRID_BITS\n"
        "    result = (np.sign(scaled) * np.ceil(np.abs(scaled)))",
        "tests/common/privacy/test_quantise.py::test_inside_the_ball_quantising_is_truncation_towards_zero",
        "single/books",
    ),
    row(
        "grid",
        "radius rounded up to the grid",
        MECHANISM,
        "value: int = floor(Fraction(radius) * 2**GRID_BITS)",
        "value: int = -floor(-Fraction(radius) * 2**GRID_BITS)",
        "tests/common/privacy/test_mechanism.py::test_a_clipping_norm_between_two_grid_steps_is_the_lower_one",
        "uneven/books",
    ),
    # --- Δ
    row(
        "Δ",
        "Δ = R where one patient is replaced",
        MECHANISM,
        "            return 2 * radius_int\n",
        "            return radius_int\n",
        "tests/common/privacy/test_calibration.py::test_sensitivity_enters_by_unit_and_relation",
        "voters/books",
    ),
    row(
        "Δ",
        "Δ of a hospital without its voters",
        MECHANISM,
        "return 2 * voters_per_site * radius_int",
        "return 2 * radius_int",
        "tests/common/privacy/test_calibration.py::test_sensitivity_enters_by_unit_and_relation",
        "hospital_voters/books",
    ),
    row(
        "Δ",
        "a patients' pool charged for one voter in a hospitals' study",
        "common/ledger/charges.py",
        "protection = Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE)",
        "pass",
        "tests/common/ledger/test_ledger_store.py::test_a_pool_per_patient_pays_for_all_voters_of_a_study_per_hospital",
    ),
    # --- noise
    row(
        "noise",
        "half the noise in the sum",
        RELEASE,
        "return self._total + noise\n",
        "return self._total + noise // 2\n",
        "tests/common/privacy/test_release.py::test_the_noise_is_added_once_to_the_sum_with_the_mechanisms_own_sigma",
        "alone/noise",
    ),
    row(
        "noise",
        "noise of a fixed seed at the server",
        RELEASE,
        "noise = sampler(self.mechanism.dimension, self.mechanism.noise_std)",
        "noise = " + SEEDED.format("self.mechanism.noise_std", "self.mechanism.dimension"),
        "tests/common/privacy/test_release.py::test_sums_are_exact",
        "alone/noise",
    ),
    row(
        "noise",
        "noise without a sign",
        GAUSSIAN,
        "    magnitude[negative] *= -1\n",
        "",
        "tests/common/privacy/test_gaussian.py::test_small_sigmas_have_exactly_the_rounded_gaussian_probabilities",
        "alone/noise",
    ),
    row(
        "noise",
        "noise rounded down, not to the nearest",
        GAUSSIAN,
        "nearest = np.floor(x + 0.5)",
        "nearest = np.floor(x)",
        "tests/common/privacy/test_gaussian.py::test_small_sigmas_have_exactly_the_rounded_gaussian_probabilities",
        "alone/noise",
        also=(("unsure = (0.5 - np.abs(x - nearest) <= guard) | (n < _DEEP_TAIL)", "unsure = n < _DEEP_TAIL"),),
    ),
    row(
        "noise",
        "32 bits of entropy a draw",
        GAUSSIAN,
        'words = np.frombuffer(entropy(8 * (stop - start)), dtype="<u8")',
        'words = np.frombuffer(entropy(4 * (stop - start)), dtype="<u4").astype(np.uint64) << np.uint64(32)',
        "tests/common/privacy/test_gaussian.py::test_small_sigmas_have_exactly_the_rounded_gaussian_probabilities",
        "alone/exchange",
    ),
    # --- shares
    row(
        "shares",
        "the last site draws no noise",
        MASKED,
        "    noisy = with_share(code, share, sampler=sampler).view(np.uint64)\n",
        "    silent = me == max(roster.sites)\n"
        "    noisy = (code if silent else with_share(code, share, sampler=sampler)).view(np.uint64)\n",
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_the_answer_is_the_sum_of_the_codes_and_of_the_noise_that_each_site_drew",
        "sealed/noise",
    ),
    row(
        "shares",
        "shares of K sites and not of K − t",
        SHARES,
        "least=mechanism.colluders + HONEST_SITES) - mechanism.colluders\n",
        "least=mechanism.colluders + HONEST_SITES)\n",
        "tests/common/privacy/test_shares.py::test_the_shares_of_the_honest_carry_the_whole_noise",
        "sealed/noise",
    ),
    row(
        "shares",
        "a site's noise of a fixed seed",
        MASKED,
        "    noise = sampler(dimension, share)\n",
        "    noise = " + SEEDED.format("share", "dimension") + "\n",
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_the_answer_is_the_sum_of_the_codes_and_of_the_noise_that_each_site_drew",
        "sealed/noise",
    ),
    row(
        "shares",
        "half of every share",
        MASKED,
        "= code + noise\n",
        "= code + noise // 2\n",
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_the_answer_is_the_sum_of_the_codes_and_of_the_noise_that_each_site_drew",
        "sealed/noise",
    ),
    # --- masks
    row(
        "masks",
        "masks used again across the queries of a batch",
        MASKING,
        '"query": query, "roster": roster.id}',
        '"roster": roster.id}',
        "tests/common/test_masking.py::test_a_site_s_masks_are_those_of_the_definition_to_the_last_bit",
        "sealed_batch/books",
    ),
    row(
        "masks",
        "mask keys without their nonce",
        MASKING,
        '"nonce": nonce, ',
        '"nonce": "", ',
        "tests/common/test_masking.py::test_a_site_s_masks_are_those_of_the_definition_to_the_last_bit",
        "sealed/life",
    ),
    row(
        "masks",
        "roster id not in the masks",
        MASKING,
        '"query": query, "roster": roster.id}',
        '"query": query}',
        "tests/common/test_masking.py::test_a_site_s_masks_are_those_of_the_definition_to_the_last_bit",
        "sealed/life",
    ),
    row(
        "masks",
        "mask key not bound to its draw",
        MASKING,
        'fields = {"batch": draw.batch, "draw": draw.number, "key": key}',
        'fields = {"batch": draw.batch, "key": key}',
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_a_roster_of_other_keys_than_people_confirmed_for_this_draw_is_refused",
        "sealed_spare/life",
    ),
    row(
        "masks",
        "a restored site masks old draws again",
        SITE,
        "return reservation.draw == draw and self.sealed.draws[reservation.query_id, draw]",
        "return reservation.draw == draw",
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_a_copy_that_forgot_what_was_sent_never_sends_a_second_message_under_the_same_masks",
        "sealed/life",
        also=(("        self.sealed.enter_restore()\n", ""),),
    ),
    row(
        "masks",
        "peers that nobody confirmed",
        MASKED,
        "if unknown := unconfirmed(roster, me=me, peers=confirmed):",
        "if (unknown := unconfirmed(roster, me=me, peers=confirmed)) and False:",
        "tests/server/aggregation/test_sealed_sums.py::test_an_exchanged_mask_key_is_refused",
        "sealed/life",
    ),
    row(
        "masks",
        "a small roster accepted at the site",
        MASKED,
        "if me not in roster.sites or len(roster.members) < least:",
        "if me not in roster.sites:",
        "tests/server/aggregation/test_sealed_sums.py::test_a_roster_below_the_quorum_is_refused",
        "sealed/life",
    ),
    # --- calibration and accounting
    row(
        "calibration",
        "noise for the answers, not for the draws to spare",
        "common/study_mechanism.py",
        "queries=privacy.charges,",
        "queries=privacy.planned_queries,",
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_a_site_that_dies_in_the_middle_costs_one_draw_and_the_rest_go_on_without_it",
        "sealed_spare/books",
    ),
    row(
        "calibration",
        "σ for half the queries",
        CALIBRATION,
        "sqrt_up(Fraction(delta) ** 2 * count / limit)",
        "sqrt_up(Fraction(delta) ** 2 * max(1, count // 2) / limit)",
        "tests/common/privacy/test_calibration.py::test_the_papers_headline_needs_the_published_noise",
        "single/books",
    ),
    row(
        "accounting",
        "the filter asks what was spent, not what would be",
        ACCOUNTING,
        "return spent + request <= limit",
        "return spent <= limit",
        "tests/common/privacy/test_accounting.py::test_the_filter_admits_up_to_the_limit_and_not_a_hair_beyond",
        "single/books",
    ),
    row(
        "accounting",
        "ε not rounded up to the next float",
        ACCOUNTING,
        "        answer = nextafter(answer, inf)\n    return answer\n\n\n@lru_cache(maxsize=4096)\ndef _epsilon_paper",
        "        break\n    return answer * (1 - 1e-6)\n\n\n@lru_cache(maxsize=4096)\ndef _epsilon_paper",
        "tests/common/privacy/test_accounting.py::test_the_published_calibration_factors_are_reproduced_to_six_digits",
        "single/books",
    ),
    row(
        "accounting",
        "nothing set aside of δ for the sampler",
        MECHANISM,
        "return float(Fraction(delta) - SAMPLER_DELTA)",
        "return float(delta)",
        "tests/common/privacy/test_accounting.py::test_the_limit_is_kept_within_the_budget_by_an_independent_integral",
        "single/books",
    ),
    row(
        "accounting",
        "passes of a training rounded down",
        "common/privacy/training.py",
        "return ceil(self.steps * self.rate)",
        "return max(1, int(self.steps * self.rate))",
        "tests/common/privacy/test_training.py::"
        "test_a_fixed_partition_costs_what_the_patient_who_was_drawn_most_often_lost",
    ),
    # --- charges, reuse, receipts, ledgers
    row(
        "charges",
        "further draws free",
        SERVER,
        "        self._apply(charge)\n        if roster != self._roster:",
        "        self._apply(charge if record.draw in (None, 1) else ChargedTotals({}, {}))\n"
        "        if roster != self._roster:",
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_a_site_that_dies_in_the_middle_costs_one_draw_and_the_rest_go_on_without_it",
        "sealed_spare/life",
    ),
    row(
        "charges",
        "lost draws given back",
        SERVER,
        ENDED,
        GIVEN_BACK,
        "tests/server/aggregation/test_sealed_sums.py::"
        "test_a_site_that_dies_in_the_middle_costs_one_draw_and_the_rest_go_on_without_it",
        "sealed/life",
    ),
    row(
        "charges",
        "a pool charged once a roster",
        SERVER,
        "            pools[entry.pool], studies[study_id, entry.pool] = after, after_inside\n",
        "            pools[entry.pool], studies[study_id, entry.pool] = "
        "(after if entry == roster[0] else spend), after_inside\n",
        "tests/common/ledger/test_ledger_store.py::test_every_pool_of_the_roster_must_have_room",
        "single/books",
    ),
    row(
        "charges",
        "a site charges nothing for what it accepts",
        SITE,
        "        self._charge(record.query_id, mechanism, study)\n        self.per_day",
        "        self.per_day",
        "tests/common/ledger/test_ledger_site.py::test_acceptance_is_charged_at_once_and_stays_charged",
        "single/books",
    ),
    row(
        "charges",
        "a site's cap not kept",
        SITE,
        "            if not admits(spent, cost, self.limit):\n",
        "            if False:\n",
        "tests/common/ledger/test_ledger_site.py::test_the_cap_holds_over_studies_and_restarts",
        "single/books",
    ),
    row(
        "reuse",
        "reused answers not in the second study's sum",
        SERVER,
        "studies[study_id, entry.pool] = inside.plus(cost, release.mechanism.dimension)",
        "studies[study_id, entry.pool] = inside",
        "tests/common/ledger/test_ledger_store.py::"
        "test_another_study_may_use_a_stored_answer_and_its_own_sum_counts_it",
        "single/books",
    ),
    row(
        "receipts",
        "receipts of any key",
        "client/ledger/site_receipts.py",
        "if not receipt.is_genuine(public_key):",
        "if False:",
        "tests/common/ledger/test_ledger_site.py::test_a_receipt_signed_by_someone_else_is_refused_without_an_alarm",
    ),
    row(
        "receipts",
        "nobody is owed a receipt",
        "server/aggregation/receipts.py",
        "return [self._message(receipts)] if receipts else []",
        "return []",
        "tests/server/aggregation/test_aggregator.py::test_the_receipts_of_a_batch_travel_with_the_next_one",
        "single/books",
    ),
    # --- quorum, policy, voters
    row(
        "quorum",
        "quorum not tested by the server's ledger",
        DRAWS,
        "            if len(ordered) < study.least_roster:\n",
        "            if False:\n",
        "tests/common/ledger/test_ledger_store.py::test_a_release_below_quorum_leaves_no_row",
        "single/books",
    ),
    row(
        "t",
        "two honest sites beside the colluders not asked for",
        "common/ledger/charges.py",
        "return max(self.quorum, 0 if self.colluders is None else self.colluders + HONEST_SITES)",
        "return self.quorum",
        "tests/common/ledger/test_ledger_store.py::"
        "test_a_sealed_study_needs_two_sites_beside_its_colluders_whatever_quorum_its_text_states",
    ),
    row(
        "policy",
        "a site accepts any noise",
        "client/policy.py",
        "        and mechanism.noise_std == consent.noise_std  #",
        "        #",
        "tests/client/test_policy.py::test_anything_but_the_consented_study_is_declined_with_an_allowed_word",
        "single/books",
    ),
    row(
        "policy",
        "a site accepts any number of colluders",
        "client/policy.py",
        "        and mechanism.colluders == consent.colluders\n",
        "",
        "tests/client/test_policy.py::test_a_sealed_sum_for_another_number_of_colluders_than_was_consented_is_declined",
    ),
    row(
        "voters",
        "a withdrawn patient's voter votes",
        "client/worker.py",
        "if slot in silent or not all(",
        "if not all(",
        "tests/client/test_withdrawn_codes.py::test_a_withdrawn_patients_stored_code_never_leaves",
    ),
    # --- keys and figures
    row(
        "keys",
        "X25519 keys in any spelling",
        KEYS,
        "    if number >= _P:\n",
        "    if False:\n",
        "tests/common/test_public_keys.py::test_an_x25519_key_has_one_spelling_wherever_it_enters",
    ),
    row(
        "keys",
        "twins pass as other keys",
        KEYS,
        "    return _of_agreement(_hex(agreement_key))",
        "    return _hex(agreement_key).encode()",
        "tests/common/test_public_keys.py::test_an_x25519_key_has_one_spelling_wherever_it_enters",
    ),
    row(
        "figures",
        "noise written to the nearest digit",
        FIGURES,
        "down = Fraction(noise), Context(prec=digits, rounding=ROUND_FLOOR)",
        'down = Fraction(noise), Context(prec=digits, rounding="ROUND_HALF_EVEN")',
        "tests/common/privacy/test_figures.py::"
        "test_written_noise_is_never_above_what_is_drawn_and_no_further_below_than_its_last_digit",
    ),
)

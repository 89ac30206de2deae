"""Lists mutants of code that keeps ledgers true: restores, recovery, reuse, trainings, sealed sums, texts, witnesses.

Rows are as in :mod:`tests.mutation.privacy`. No audit runs these lines, because a study under audit restores nothing.
"""

from __future__ import annotations

from tests.mutation.privacy import SERVER, SITE, row

SITE_FILE, SERVER_FILE = "client/ledger/site_file.py", "server/ledger/server_file.py"
SEALED, SPENDING = "common/ledger/site_sealed.py", "common/ledger/spending.py"
FIGURES, WITNESSING = "common/privacy/figures.py", "client/witnessing.py"

OF_SITE = "tests/common/ledger/test_ledger_site.py::"
OF_STANDING = "tests/common/ledger/test_server_standing.py::"
OF_STORE = "tests/common/ledger/test_ledger_store.py::"
OF_SEALED = "tests/common/ledger/test_site_sealed.py::"
OF_SUMS = "tests/server/aggregation/test_sealed_sums.py::"
OF_SEALED_ATTACK = "tests/attacks/test_sealed_sum.py::"
OF_DISPUTE = "tests/attacks/test_dispute.py::"
OF_WITNESSES = "tests/server/aggregation/test_witnesses.py::"
OF_FIGURES = "tests/common/privacy/test_figures.py::"
RESTORES = "tests/restores/test_server.py::test_some_restores_make_no_draw_free"

ROWS = (
    # --- restores
    row(
        "restores",
        "a second release that a receipt shows is free at the site",
        SITE,
        "        if self.reservations.released(query_id) > self.reservations.paid(query_id):\n",
        "        if False:\n",
        OF_SITE + "test_a_site_pays_for_each_release_that_receipts_show_though_it_accepted_the_query_once",
    ),
    row(
        "restores",
        "a release that only a contradicting receipt shows is free at the site",
        SITE,
        "        self._release_aside(self._contradicting.pop(record.ledger_id, ()))\n",
        "",
        OF_SITE + "test_a_query_that_only_contradicting_receipts_show_is_charged_again_when_it_is_asked_again",
    ),
    row(
        "restores",
        "a release that a receipt tells of late is free at the site",
        SITE,
        "                self._charge_unpaid(query_id)\n",
        "                pass\n",
        OF_SITE + "test_a_release_is_charged_though_its_receipt_comes_after_that_of_a_second_release_of_the_query",
    ),
    row(
        "restores",
        "a late receipt is free once the server names its release as recovered",
        "common/ledger/known_ledgers.py",
        "return charged_by if charges.beyond(unshown) == NOTHING else None",
        "return charged_by or None",
        OF_STANDING + "test_a_row_that_names_a_lost_release_without_charging_it_makes_no_late_receipt_free",
    ),
    row(
        "restores",
        "a release that the server lost again hides one that it charged as lost",
        "common/ledger/known_ledgers.py",
        "if place not in history and _is_charged_by(losses, one.receipt, rosters, left):",
        "if place not in history:",
        OF_SITE
        + "test_a_lost_release_is_charged_though_the_server_has_lost_one_more_that_a_contradicting_receipt_shows",
    ),
    row(
        "restores",
        "an accepted receipt's total counts as contained though the restored server lost it again",
        "common/ledger/known_ledgers.py",
        "return replace(known, spend=contained, owed=NOTHING)",
        "return replace(known, owed=(contained + known.owed).beyond(known.spend))",
        OF_SITE
        + "test_a_lost_release_is_charged_though_the_server_has_lost_another_one_that_the_site_had_a_receipt_of",
    ),
    row(
        "restores",
        "a charge that may be one of the lost ones is demanded again for ever",
        "common/ledger/receipts.py",
        "known.owed.beyond(known.unshown)",
        "known.owed",
        OF_STANDING + "test_a_receipt_that_comes_after_its_release_was_charged_as_lost_stops_nobody_for_good",
    ),
    row(
        "restores",
        "a lost release counts only in studies that wait for a receipt",
        SITE,
        'for one in self.reservations.values() if one.ledger in ("", receipt.ledger_id)}',
        'for one in self.reservations.without_receipt() if one.ledger in ("", receipt.ledger_id)}',
        OF_SITE + "test_a_lost_release_counts_in_its_study_though_a_receipt_shows_a_later_one_of_the_same_query",
    ),
    row(
        "restores",
        "a receipt that the restored copy had entered already is deducted again",
        SERVER_FILE,
        "row <= after or ",
        "",
        OF_STANDING
        + "test_a_copy_that_is_put_back_again_and_recovered_with_the_same_receipts_charges_a_draw_once[True]",
    ),
    row(
        "restores",
        "a receipt opens a draw again that a lost row accepted",
        SITE,
        "return reservation.draw == draw and self.sealed.draws[reservation.query_id, draw]",
        "return reservation.draw == draw and reservation.seq > max(self.restored_at, default=0)",
        OF_SEALED_ATTACK + "test_a_receipt_opens_no_draw_that_a_restored_site_may_have_answered",
    ),
    row(
        "restores",
        "withdrawals from studies not kept in the standing",
        SITE_FILE,
        'tuple(sorted(study for study, decision in books.paused.items() if decision == "withdraw"))',
        "()",
        OF_SITE + "test_a_veto_may_be_among_what_was_lost_so_every_study_waits",
    ),
    row(
        "restores",
        "withdrawals of patients not kept in the standing",
        SITE_FILE,
        "tuple(record for _, record in books.teachers.patients.values())",
        "()",
        OF_SITE + "test_a_copy_that_lost_what_charges_nothing_is_refused_all_the_same",
    ),
    row(
        "restores",
        "studies go on after a site's ledger was restored",
        SITE,
        '            self.paused.setdefault(study_id, "pause")\n',
        "            pass\n",
        OF_SITE + "test_without_a_standing_every_study_waits_for_a_person",
    ),
    row(
        "restores",
        "peers stay confirmed in a restored ledger",
        SEALED,
        "        self.peers.clear()\n",
        "",
        "tests/common/ledger/test_site_peers.py::test_a_restored_copy_asks_for_every_peer_again",
    ),
    row(
        "restores",
        "what a standing charges is missing from its study's sum",
        SERVER,
        "self.spent_in(study, pool) + spend)",
        "self.spent_in(study, pool))",
        RESTORES,
    ),
    # --- recovery
    row(
        "recovery",
        "a recovered charge is missing from its study's sum",
        SERVER,
        "inside.plus(own, mechanism.dimension))",
        "inside)",
        RESTORES,
    ),
    row(
        "recovery",
        "a recovered charge is missing from its pool's sum",
        SERVER,
        "self._set(self._spent, entry.pool, self.spent(entry.pool).plus(cost, mechanism.dimension))",
        "self._set(self._spent, entry.pool, self.spent(entry.pool))",
        RESTORES,
    ),
    row(
        "recovery",
        "--charge-all leaves studies what they had left",
        SERVER_FILE,
        "Spend(max(books.study_limit(study) - books.spent_in(study, pool).mu_squared, Fraction(0)))",
        "Spend()",
        RESTORES,
    ),
    row(
        "recovery",
        "of two lost lines only one is charged",
        SERVER_FILE,
        "for one in sorted(lost, key=lambda one: one.head.seq, reverse=True):",
        "for one in sorted(lost, key=lambda one: one.head.seq, reverse=True)[:1]:",
        "tests/common/ledger/test_server_standing.py::"
        "test_the_standing_beside_a_copy_and_one_of_another_line_are_both_charged",
    ),
    row(
        "recovery",
        "receipts that contradicted are not handed over",
        "client/ledger/site_receipts.py",
        'kinds = ("receipt", "alarm", "superseded") if evidence else ("receipt",)',
        'kinds = ("receipt",)',
        OF_SITE + "test_receipts_that_contradicted_are_handed_over_for_a_recovery",
    ),
    row(
        "recovery",
        "a recovered ledger owes nothing of what contradicted",
        "common/ledger/known_ledgers.py",
        "owed=known.owed + charges",
        "owed=known.owed",
        OF_SITE + "test_what_was_released_between_a_rollback_and_its_discovery_stays_owed",
    ),
    # --- reuse
    row(
        "reuse",
        "an answer of fewer sites than the quorum is reused",
        SERVER,
        "if len(self.releases[query_id].roster) < self.studies[record.study_id].quorum:",
        "if False:",
        OF_STORE + "test_an_answer_of_fewer_sites_than_a_studys_quorum_is_not_reused_by_it",
    ),
    row(
        "reuse",
        "an answer is reused past the study's budget",
        SERVER,
        "            if not admits(inside.mu_squared, cost, allowed):\n",
        "            if False:\n",
        OF_STORE + "test_a_stricter_study_cannot_reuse_what_its_own_budget_does_not_cover",
    ),
    # --- trainings
    row(
        "trainings",
        "a finished private training goes on drawing steps for the same charge",
        "client/ledger/site_teachers.py",
        "(self.lost_rows_since(training_id) or books.made(training_id))",
        "self.lost_rows_since(training_id)",
        OF_SITE + "test_a_finished_training_has_drawn_all_its_steps_whatever_its_rows_count",
    ),
    row(
        "trainings",
        "a journal spends steps beyond its plan",
        "client/records/journal.py",
        "        if self.left <= 0:\n",
        "        if False:\n",
        "tests/client/training/private/test_engine.py::"
        "test_a_step_that_died_is_spent_and_the_run_never_takes_more_than_planned",
    ),
    # --- sealed sums
    row(
        "sealed sums",
        "two messages under one draw are both accepted",
        SEALED,
        '        refuse_second(draw, self.masked, "masked code of draw")\n',
        "",
        OF_SEALED + "test_a_draw_of_a_query_has_one_message_under_its_masks",
    ),
    row(
        "sealed sums",
        "a disclosed key masks on",
        SEALED,
        "return any((one.batch_id, one.draw) == (batch, draw) for one in self.disclosed)",
        "return False",
        OF_DISPUTE + "test_nothing_is_masked_any_more_with_a_key_that_was_disclosed",
    ),
    row(
        "sealed sums",
        "a code goes under another roster than the receipt's",
        SEALED,
        "if self._receipted_under.get(draw, record.masks) != record.masks:",
        "if False:",
        OF_SEALED + "test_no_code_goes_under_another_roster_than_the_receipt_charges_its_draw_to",
    ),
    row(
        "sealed sums",
        "a receipt under another roster is no alarm",
        SEALED,
        "if self.masked_under(record.query_id, record.draw) not in (None, record.masks):",
        "if False:",
        OF_SUMS + "test_a_receipt_for_another_roster_than_the_site_was_asked_under_is_an_alarm",
    ),
    row(
        "sealed sums",
        "a disclosure counts the whole noise, not the site's share",
        "client/ledger/site_sealed.py",
        "noise_std=record.share_std, colluders=None",
        "colluders=None",
        OF_DISPUTE + "test_a_disclosure_is_on_record_with_its_auditor_its_draw_and_what_it_would_cost",
    ),
    row(
        "sealed sums",
        "sums are held against honest noise one by one only",
        "server/aggregation/sealed_sums.py",
        "        if not together.is_honest:\n            sums.clear()\n",
        "",
        "tests/server/aggregation/test_spoiled.py::"
        "test_a_push_that_every_sum_hides_alone_is_found_in_the_sums_together",
    ),
    # --- texts
    row(
        "texts",
        "the budget is guaranteed whatever was spent",
        SPENDING,
        "return max(promised, self.spent, key=lambda one: one.epsilon)",
        "return promised",
        "tests/common/ledger/test_spending.py::test_where_recovered_charges_pass_a_budget_what_was_spent_is_guaranteed",
    ),
    row(
        "texts",
        "what was planned is left, whatever the budgets admit",
        "common/study_facts.py",
        "self.unanswered if self.quorum_room is None else min(self.unanswered, self.quorum_room)",
        "self.unanswered",
        "tests/common/ledger/test_spending.py::test_what_is_left_is_planned_and_fits_the_budgets_of_a_quorum",
    ),
    # --- rounding
    row(
        "rounding",
        "odds to the nearest float and without the sampler's share",
        "common/privacy/consent.py",
        "min(1.0, nextafter((1 + distance) / 2, inf) + float(SAMPLER_DELTA) / 2)",
        "min(1.0, (1 + distance) / 2)",
        "tests/common/privacy/test_consent.py::"
        "test_the_odds_are_never_below_those_of_the_exact_formula_with_the_samplers_share",
    ),
    row(
        "rounding",
        "a chance written to the nearest digit",
        FIGURES,
        "rounded = value.quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING)",
        "rounded = value.quantize(Decimal(1).scaleb(-places))",
        OF_FIGURES + "test_a_chance_is_never_written_below_what_it_is",
    ),
    row(
        "rounding",
        "a share of a budget written to the nearest digit",
        FIGURES,
        "(100 * Decimal(share)).quantize(Decimal('0.01'), rounding=ROUND_CEILING)",
        "(100 * Decimal(share)).quantize(Decimal('0.01'))",
        OF_FIGURES + "test_a_written_share_of_a_budget_is_never_below_the_true_one_also_past_the_budget",
    ),
    row(
        "rounding",
        "the noise multiplier to the nearest float",
        "common/privacy/calibration.py",
        "return nearest if Fraction(nearest) <= exact else nextafter(nearest, 0.0)",
        "return nearest",
        OF_FIGURES + "test_a_studys_noise_multiplier_is_never_more_than_its_sigma_over_delta",
    ),
    # --- witnesses
    row(
        "witnesses",
        "a head is countersigned without a proof that it grew",
        "common/witness/memory.py",
        "if grew(proof, old=known.size, old_root=root, new=note.size, new_root=note.root):",
        "if True:",
        OF_WITNESSES + "test_a_server_that_shows_two_sites_two_ledgers_gets_neither_the_other_s_signature",
    ),
    row(
        "witnesses",
        "a second ledger under one key is a new one",
        WITNESSING,
        "other = self.memory.other_ledger(alone, key, name=name)",
        "other = False",
        OF_WITNESSES + "test_a_site_that_shows_another_ledger_every_time_is_told_of_and_leaves_no_file_a_time",
    ),
    row(
        "witnesses",
        "a head without the row of a site's receipt is countersigned",
        WITNESSING,
        "if held.seq and not has_leaf(request.held, leaf=leaf, index=held.seq - 1, size=note.size, of=note.root):",
        "if False:",
        OF_WITNESSES + "test_the_first_head_a_site_is_shown_must_have_the_row_of_its_receipt",
    ),
)

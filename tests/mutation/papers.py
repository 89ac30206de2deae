"""Lists a wrong line for every row of docs/lab/papers.md, and one more for every other constant of the papers.

A row names a file and the test that checks it. :data:`ROWS` changes a line of that file so that the item no longer
agrees with the paper (or its correction). :data:`CONSTANTS` changes numbers and operations that no test had noticed in
a review. ``tests/test_papers_table.py`` runs each test against each change.
"""

from __future__ import annotations

from tests.mutation.runner import Mutant

_CODEC = "tests/common/codecs/test_paper.py::"
_AUTOENCODER = "tests/common/codecs/test_ball_autoencoder.py::"
_PATE = "tests/oracles/test_pate_paper.py::"
_BENCH_PATE = "research/tests/test_pate.py::"
_TRAINING = "tests/oracles/test_private_training.py::"
_MAC = "tests/oracles/test_mac.py::"
_PAPERS = "research/tests/test_papers.py::"
_METRICS = "tests/common/test_metrics.py::"

ROWS = (
    Mutant(
        "Algorithm 1 forgets the public mean",
        "common/codecs/paper.py",
        "(values - self.mean).ravel()",
        "values.ravel()",
        f"{_CODEC}test_codes_are_projections_and_decoding_adds_them_to_the_mean",
    ),
    Mutant(
        "eq (7) compares variances with a deviation",
        "common/codecs/paper.py",
        "variances > provenance.noise_std**2",
        "variances > provenance.noise_std",
        f"{_CODEC}test_eq_7_keeps_the_variances_above_the_noise_and_never_none",
    ),
    Mutant(
        "Algorithm 2 pools by the mean",
        "common/codecs/ball_autoencoder.py",
        "F.max_pool3d(F.relu(features), stride)",
        "F.avg_pool3d(F.relu(features), stride)",
        f"{_AUTOENCODER}test_the_encoder_is_convolutions_relu_max_pooling_and_a_dense_layer_beside_the_linear_one",
    ),
    Mutant(
        "φ is a power of l instead of 1/l",
        "common/codecs/ball.py",
        "np.exp(log_sigmoid / length)",
        "np.exp(log_sigmoid)",
        f"{_PATE}test_figure_2_phi_fills_the_ball_nearly_uniformly_for_normal_inputs",
    ),
    Mutant(
        "eq (14) forgets its factor of 2",
        "common/privacy/accounting.py",
        "mp.sqrt(2 * mu2 * mp.log(1 / mp.mpf(delta)))",
        "mp.sqrt(mu2 * mp.log(1 / mp.mpf(delta)))",
        f"{_PATE}test_eqs_11_to_14_agree_with_numerical_minimisation_over_the_order",
    ),
    Mutant(
        "noise is planned for one query",
        "common/study_mechanism.py",
        "queries=privacy.charges,",
        "queries=1,",
        f"{_BENCH_PATE}test_the_papers_noise_is_the_papers_and_the_exact_accountant_says_less",
    ),
    Mutant(
        "σ² = 6 of the whole vector instead of every layer",
        "research/pate.py",
        "(PRINTED_VARIANCE / layers) ** 0.5",
        "PRINTED_VARIANCE**0.5",
        f"{_BENCH_PATE}test_the_printed_variance_is_charged_and_not_believed",
    ),
    Mutant(
        "a shuffled code stays with its volume",
        "server/protocols/controls.py",
        "draws.integers(last))",
        "draws.integers(last + 1))",
        "tests/server/postprocess/test_controls.py::test_a_derangement_moves_everything_and_loses_nothing",
    ),
    Mutant(
        "the paper's network is the default one",
        "common/models/unet.py",
        'if network == "paper-unet":',
        'if network == "no-unet":',
        "tests/common/models/test_unet.py::test_the_papers_network_has_four_poolings_and_todays_has_none",
    ),
    Mutant(
        "the curvature of a residual is forgotten",
        "research/mlp.py",
        "2 * ((f - z_out) * bend(u, activation) + first.square())",
        "2 * first.square()",
        f"{_TRAINING}test_taylor_gradient_hessian_and_constant_equal_autograd",
    ),
    Mutant(
        "a coordinate never hears from the next layer",
        "research/mlp_strategies.py",
        "back = [(rest * slope(u, shape.activation), -2)",
        "back = [(rest * slope(u, shape.activation), 0)",
        f"{_TRAINING}test_the_oracle_holds",
    ),
    Mutant(
        "the second order's step keeps the first gradient",
        "research/mlp_strategies.py",
        "gradient = gradient + 2 * torch.einsum(",
        "gradient = gradient + 0 * torch.einsum(",
        f"{_TRAINING}test_steps_of_second_order_follow_the_quadratic_of_a_linear_layer_exactly",
    ),
    Mutant(
        "a sensitivity as printed",
        "research/sensitivity.py",
        "a1=float((t + norm(alpha)) ** 2)",
        "a1=float(t**2 + 2 * t * norm(alpha) + norm(beta) ** 2)",
        f"{_TRAINING}test_the_oracle_holds",
    ),
    Mutant(
        "a partition without its √(MK)",
        "research/mlp_strategies.py",
        "return ClippingPlan(tuple(names), tuple(clips))",
        "return ClippingPlan(tuple(names), tuple(clips), tuple(2 * len(names) ** 0.5 for _ in names))",
        f"{_TRAINING}test_the_noise_of_a_partition_is_its_bound_times_root_mk",
    ),
    Mutant(
        "noise on one triangle of the second moment",
        "research/private_pca.py",
        "result + np.triu(result, 1).T",
        "result + np.triu(units.T @ units, 1).T",
        f"{_TRAINING}test_private_pca_noise_is_symmetric_of_the_stated_size_and_a_zero_row_is_safe",
    ),
    Mutant(
        "Table 2's σ at ε 2",
        "research/recipes.py",
        '2.0: "14/5"',
        '2.0: "5/2"',
        f"{_PAPERS}test_the_printed_noise_costs_what_the_accountant_says",
    ),
    Mutant(
        "a table's deviation divides by n",
        "research/papers.py",
        "statistics.stdev(scores)",
        "statistics.pstdev(scores)",
        f"{_PAPERS}test_the_table_has_mean_deviation_seeds_the_papers_number_and_a_true_epsilon_where_noise_was_halved",
    ),
    Mutant(
        "DP-MAC's Z-step is dropped",
        "client/training/private/mac.py",
        "for _ in range(how.steps):",
        "for _ in range(0):",
        f"{_MAC}test_the_oracle_of_mac_holds",
    ),
    Mutant(
        "DP-MAC's blocks read their parents' outputs, not their coordinates",
        "client/training/private/mac.py",
        "        return z[name]\n\n    loss =",
        "        return output\n\n    loss =",
        f"{_MAC}test_the_oracle_of_mac_holds",
    ),
    Mutant(
        "∇ log q is missing",
        "client/training/private/bbb.py",
        "(s / prior.std**2 - 1 / s)",
        "(s / prior.std**2)",
        f"{_TRAINING}test_the_oracle_holds",
    ),
    Mutant(
        "the KL is counted once a batch",
        "client/training/private/bbb.py",
        "weight = prior.temperature / prior.patients",
        "weight = prior.temperature",
        f"{_TRAINING}test_the_kl_weights_of_an_epoch_sum_to_the_temperature",
    ),
    Mutant(
        "errors of calibration cancel between bins",
        "common/calibration.py",
        "gaps = (abs(right - sure)",
        "gaps = ((right - sure)",
        "tests/common/test_calibration.py::test_the_error_of_two_cases_together_is_that_of_their_voxels_together",
    ),
    Mutant(
        "samples that disagree are not drawn to the mean label",
        "client/teachers/teacher.py",
        "(1 - unsure) * mean + unsure * flat",
        "mean + 0 * flat",
        "tests/client/training/private/test_private_site.py::"
        "test_where_the_samples_disagree_the_prediction_moves_to_the_images_own_mean",
    ),
    Mutant(
        "a norm a little above the clip is left",
        "client/training/private/clipped_sums.py",
        "factor = torch.clamp(parts.clips[index] / norm, max=1.0) * (RADIUS_INT * _SHRINK",
        "factor = torch.clamp(1.01 * parts.clips[index] / norm, max=1.0) * (RADIUS_INT",
        "tests/client/training/private/test_clipped_sums.py::"
        "test_small_gradients_are_kept_and_large_ones_are_scaled_to_the_clip",
    ),
    Mutant(
        "a patient joins half as often as is charged",
        "client/training/private/sampling.py",
        "(self.rate.numerator << 64)",
        "(self.rate.numerator << 63)",
        "tests/client/training/private/test_sampling.py::"
        "test_every_patient_joins_with_probability_q_and_sizes_are_binomial",
    ),
    Mutant(
        "replace-one is charged as add-remove",
        "common/privacy/training.py",
        "Neighbours.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,",
        "Neighbours.REPLACE_ONE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,",
        "tests/common/privacy/test_training.py::"
        "test_one_poisson_step_agrees_with_the_integral_of_its_two_densities_in_both_relations",
    ),
    Mutant(
        "a region is its first label alone",
        "common/metrics.py",
        "np.isin(labels, values)",
        "np.isin(labels, values[:1])",
        f"{_METRICS}test_overlapping_regions_are_scored_as_the_unions_they_are",
    ),
    Mutant(
        "a made-up lesion costs nothing",
        "common/metrics.py",
        "scores += [(0.0, LESION_MISSED_MM)] * len(made_up)",
        "scores += []",
        f"{_METRICS}test_lesion_by_lesion_a_missed_and_a_made_up_one_count_and_an_absent_structure_is_right",
    ),
)
"""One mutant for every row that names a test, with the same file and test."""

_RECIPES = f"{_PAPERS}test_the_recipes_are_those_of_table_2_and_of_the_documented_tables"

CONSTANTS = (
    Mutant(
        "a layer's part holds the next layer's parameters",
        "client/training/private/strategies_3d.py",
        "layers[-1] += own",
        "layers[0] += own",
        "tests/client/training/private/test_strategies_3d.py::"
        "test_every_network_parts_into_its_convolutions_and_every_parameter_has_one_place",
    ),
    Mutant(
        "the parts of a contribution forget √(MK)",
        "client/training/private/clipped_sums.py",
        "return self.clips[part] * self.shares[part]",
        "return self.clips[part]",
        f"{_MAC}test_the_oracle_of_mac_holds",
    ),
    Mutant(
        "a step on coordinates goes up the objective",
        "client/training/private/mac.py",
        "r - how.rate * voxels / mu * slopes[name]",
        "r + how.rate * voxels / mu * slopes[name]",
        f"{_MAC}test_the_oracle_of_mac_holds",
    ),
    Mutant(
        "no ReLU in the encoder",
        "common/codecs/ball_autoencoder.py",
        "F.max_pool3d(F.relu(features), stride)",
        "F.max_pool3d(features, stride)",
        f"{_AUTOENCODER}test_the_encoder_is_convolutions_relu_max_pooling_and_a_dense_layer_beside_the_linear_one",
    ),
    Mutant(
        "no ReLU after the decoder's dense layer",
        "common/codecs/ball_autoencoder.py",
        "features = F.relu(features.reshape(len(codes), WIDE, *smallest))",
        "features = features.reshape(len(codes), WIDE, *smallest)",
        f"{_AUTOENCODER}test_the_decoder_is_a_dense_layer_convolutions_relu_and_transposed_convolutions",
    ),
    Mutant(
        "no ReLU after a transposed convolution",
        "common/codecs/ball_autoencoder.py",
        'features = F.relu(F.conv_transpose3d(features, weights[f"decoder_up{layer}"], stride=stride))',
        'features = F.conv_transpose3d(features, weights[f"decoder_up{layer}"], stride=stride)',
        f"{_AUTOENCODER}test_the_decoder_is_a_dense_layer_convolutions_relu_and_transposed_convolutions",
    ),
    Mutant(
        "bottleneck noise up to five times the planned one",
        "common/codecs/ball_autoencoder.py",
        "NOISE_RANGE = (math.log(0.2), math.log(1.5))",
        "NOISE_RANGE = (math.log(0.2), math.log(5.0))",
        f"{_AUTOENCODER}test_the_noise_while_fitting_is_a_fifth_to_one_and_a_half_of_the_planned_one",
    ),
    Mutant(
        "the rate does not decay",
        "research/recipes.py",
        "start * factor ** int(step * passes / steps)",
        "start",
        "research/tests/test_papers.py::test_exponential_decay_multiplies_the_rate_once_an_epoch",
    ),
    Mutant(
        "DP-BBB's prior lies around 0 after a public start",
        "client/training/private/teachers.py",
        "plain_weights(setup.model) if setup.begun else None",
        "None",
        "tests/contracts/test_strategies.py::test_a_posterior_from_a_public_start_is_held_to_that_start",
    ),
    Mutant(
        "the ceiling divides by 7",
        "research/pate.py",
        "float(mu) * voters**2 / 8 / np.log(2)",
        "float(mu) * voters**2 / 7 / np.log(2)",
        f"{_BENCH_PATE}test_the_papers_noise_is_the_papers_and_the_exact_accountant_says_less",
    ),
    Mutant(
        "rotations of a hundredth of a radian",
        "common/models/augmentation.py",
        "range_x=0.25, range_y=0.25, range_z=0.25",
        "range_x=0.01, range_y=0.01, range_z=0.01",
        "tests/common/models/test_augmentation.py::test_rotate_mirror_turns_by_up_to_a_quarter_radian_about_every_axis",
    ),
    Mutant(
        "a fixed partition is charged for whole passes only",
        "common/privacy/training.py",
        "return ceil(self.steps * self.rate)",
        "return int(self.steps * self.rate)",
        "tests/common/privacy/test_training.py::"
        "test_a_fixed_partition_costs_what_the_patient_who_was_drawn_most_often_lost",
    ),
    Mutant(
        "DP-BBB's deviations move by another draw than the weights had",
        "client/training/private/bbb.py",
        "posterior_gradients(self.posterior, likelihood, self._draw, self.prior)",
        "posterior_gradients(self.posterior, likelihood, self.posterior.draw(self.generator), self.prior)",
        f"{_TRAINING}test_a_posteriors_deviations_move_by_the_draw_at_which_the_patients_were_asked",
    ),
    Mutant(
        "DP-BBB's prior is as wide as ever, whatever is asked for",
        "client/training/private/teachers.py",
        "Prior(s.temperature, s.prior_std,",
        "Prior(s.temperature, 0.2,",
        "tests/contracts/test_strategies.py::test_what_is_asked_for_is_what_a_strategy_trains_with",
    ),
    Mutant(
        "DP-MAC's clip is DP-SGD's",
        "client/training/private/settings.py",
        "MAC_ONLY, clip=0.02)",
        "MAC_ONLY, clip=0.1)",
        "research/tests/test_private_volumes.py::test_recorded_cells_were_trained_by_todays_recipes",
    ),
    Mutant(
        "the autoencoder's noisy codes are not shrunk",
        "common/codecs/ball_autoencoder.py",
        "code * self.powers / (self.powers + noise**2)",
        "code",
        f"{_AUTOENCODER}test_a_noisy_code_is_shrunk_by_wieners_weight_before_it_is_decoded",
    ),
    Mutant(
        "the autoencoder plans its noise without the radius",
        "common/codecs/ball_autoencoder.py",
        "noise = provenance.noise_std / config.radius",
        "noise = provenance.noise_std",
        f"{_AUTOENCODER}test_a_codec_of_another_radius_is_the_same_one_scaled",
    ),
    Mutant(
        "voxels in doubt count by their likeliest label",
        "common/codecs/pca.py",
        "(shapes.pool(mean_shape, factor=factor) ** 2).sum(axis=0)",
        "shapes.pool(mean_shape, factor=factor).max(axis=0)",
        "tests/common/codecs/test_pca.py::test_the_centre_and_the_metric_are_of_the_mean_of_the_public_maps_as_they_are",
    ),
    *(
        Mutant(f"recipe: {before.strip()} → {after.strip()}", "research/recipes.py", before, after, _RECIPES)
        for before, after in (
            ("batch=1000,\n            epochs=10 if late else 30", "batch=900,\n            epochs=10 if late else 30"),
            ("epochs=10 if late else 30", "epochs=11 if late else 31"),
            ("rate=0.03 if late else 0.01", "rate=0.02 if late else 0.02"),
            ("decay=0.7 if late else 0.95", "decay=0.8 if late else 0.96"),
            ("MNIST_PCA = {0.5: 16, 2.0: 8, 8.0: 4}", "MNIST_PCA = {0.5: 16, 2.0: 9, 8.0: 4}"),
            ("z_rate=0.001", "z_rate=0.002"),
            ("decay=0.97", "decay=0.98"),
            ("clip=0.001", "clip=0.002"),
            ("decay=0.99", "decay=0.999"),
            ("rate=50.0 if small else 100.0", "rate=100.0"),
            ("batch=2000,\n            epochs=30", "batch=2000,\n            epochs=29"),
            ("rate=0.03,\n            decay=0.92", "rate=0.02,\n            decay=0.92"),
            ('Recipe("dp-sgd", batch=2000', 'Recipe("dp-sgd", batch=1900'),
            ('Recipe("dp-bbb", batch=1000', 'Recipe("dp-bbb", batch=1100'),
            ("temperature: float = 0.03", "temperature: float = 0.04"),
            ("prior_std: float = 0.2", "prior_std: float = 0.3"),
            ("hidden: int = 300", "hidden: int = 301"),
            ("z_steps: int = 30", "z_steps: int = 29"),
            ("USPS_GREY = 0.25", "USPS_GREY = 0.2"),
        )
    ),
)
"""Numbers and operations that no test noticed when an external review changed them."""

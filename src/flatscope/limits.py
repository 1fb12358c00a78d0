"""Limits: every number that decides between two ways to a value, or ends a loop of draws, products or columns."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class MemoryShare:
    """Share of the memory that one kind of pass may take.

    Attributes:
        asked: part of the memory that the caller allows, where it does.
        free: part of what is free on a GPU, where it does not.
        least: bytes on a CPU; on a GPU no less than that, while it is no more than half of what is free.
    """

    asked: float
    free: float
    least: int


@dataclass(frozen=True)
class Limits:
    """Numbers that decide how curvature is computed and when estimates stop.

    None of them changes what a value means; they trade time against memory and error. Numbers of one algorithm alone
    (steps of a difference, tolerances of a check) stand with it.

    Example:
        >>> import torch, flatscope as fs
        >>> from flatscope.context import Effort
        >>> from flatscope.limits import Limits
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> context = fs.Context(problem, effort=Effort(limits=Limits(most_draws=1024)))
    """

    # --- When the draws of an estimate end (`flatscope.sampling`)
    # Degrees of freedom below which no standard error is relied on. From 15 on, intervals of estimates that stopped by
    # their own error still cover the truth in more than 91 % of runs; with 4 they did not (tests of errors).
    least_freedom: int = 15
    # Random columns of the first pass: the fewest that have a spread.
    first_columns: int = 2
    # Draws of columns before their errors decide on another way, or end draws of whole tensors: of fewer these are
    # uncertain by a half.
    settled_draws: int = 6
    # The next look comes after 1.2 times the draws that seem to be needed, but after at least 1.5 and at most 3 times
    # those there are: looks close together stop by luck, and few draws tell little of how many are needed.
    look_margin: float = 1.2
    least_growth: float = 1.5
    most_growth: float = 3.0
    # The most draws of columns where no exact way is at hand: four times the precision of `surrender_draws` would take
    # sixteen times as many, which nobody waits for.
    most_draws: int = 256
    # From here on draws end where even `most_draws` would leave most of the imprecise values imprecise. They then have
    # at most twice the error that all draws would leave.
    surrender_draws: int = 64
    # Hessian products of one estimate where the caller does not say.
    most_products: int = 1024
    # Products at a time where there is a deadline: the time is looked at between them.
    hurried_products: int = 2
    # Products of a batch by single calls, the last of which is timed, before the next ones are replayed as a CUDA graph
    # where launches take most of the time: a capture costs as much as three of them, a replay spares a third of one.
    captured_after: int = 8
    # Coarse searches and draws: two draws in full say how far coarse ones are off. Of a search whose residual in full
    # is above this share of the largest eigenvalue the outermost may be others; in so many rounds, each of which takes
    # nine tenths or more off the residuals, products in full make its eigenpairs exact, or it was in vain.
    # Eigenvectors of coarse products have residuals of a few ten-thousandths: no finer tolerance is searched with them.
    coarse_search: float = 1e-3
    compared_draws: int = 2
    near_share: float = 0.01
    exact_rounds: int = 4
    # Products of a linear system without a smaller residual after which nothing more can be solved.
    stalled_products: int = 50
    # Deflation (Hutch++) pays where so many times the products that it takes seem to be needed.
    deflation_gain: float = 4.0
    # Groups of samples with random vectors of their own: at most so many. More groups tell more in one pass; smaller
    # ones make batches that cost a call each for little work. So many samples are enough, as are fewer with so many
    # multiplications on a CPU and on a GPU: a transformer of 237,000 parameters and 64 sequences of 64 tokens took 8
    # products to 2 % with one group, 2 with 8 groups, and 15 % more time a product.
    most_groups: int = 32
    least_group: int = 32
    group_work: float = 1e8
    gpu_group_work: float = 1e11

    # --- Which way a parameter's curvature is found (`flatscope.curvature.route`)
    # Up to so many columns of the output Hessian's root all are taken: no noise, at the price of a few draws.
    few_columns: int = 16
    # Directions that are multiplied out one by one before anything is drawn.
    few_directions: int = 512
    # As many at most where exact values are asked for; each is a pass over the data.
    most_directions: int = 16_384
    # Entries of a diagonal that are multiplied out: eight times the most draws, which rarely tell a single entry.
    few_entries: int = 2048
    # Draws that an estimate usually takes where it is not exact; 8 to 128 were seen.
    usual_draws: int = 64
    # What passes cost, in forward passes: one column of the sweep with what is read from it, and one Hessian product.
    column_passes: float = 2.2
    product_passes: float = 4.0
    # What a draw of columns at curved operations costs for every activation, in multiplications of a layer. From
    # transformers of 1,267 and 4,579 parameters on one core: 64 draws took as long as some 2,000 and 3,600 products.
    activation_cost: float = 700.0
    # Parameters that columns at the outputs do not reach: up to so many go by products without asking what is cheaper.
    few_unreached: int = 1024
    # Samples times parameters up to which hundreds of products take about a second on one core.
    cheap_products: int = 2_000_000
    # A layer that is precise after so many draws of curved columns stays with them.
    soon_draws: int = 16
    # What a draw of curved columns costs in Hessian products: about two, but it serves several quantities at once.
    draw_cost: float = 1.0

    # --- Eigenvalues of layers (`flatscope.curvature.layer_products`)
    # Blocks of so many weights are written out: 200 MB in float64.
    dense_weights: int = 5_000
    # With more columns, or more of them for each layer, products of the layers one by one are cheaper than a sweep.
    most_block_columns: int = 256
    columns_per_layer: int = 3

    # --- Searches for eigenvalues and norms (`flatscope.curvature.spectrum`, `flatscope.network.singular_values`)
    # Matrices of so many rows are written out, as are those with so many rows for each eigenvalue that is wanted: all
    # their eigenvalues cost less than a search.
    dense_matrix: int = 256
    rows_an_eigenvalue: int = 3
    # The most vectors that a Krylov space holds before it is restarted, and the length from which on they are held in
    # float32 where digits of that are enough: they then take more time and memory than their last digits are worth.
    krylov_vectors: int = 128
    # It holds two for each eigenvalue that is wanted, and so many more, whatever memory there is. It is looked at so
    # often while it grows to what it is: where many steps are needed, a few more are cheaper than a look after each.
    spare_vectors: int = 16
    looks_a_doubling: int = 8
    long_vector: int = 2**20
    coarse_tolerance: float = 1e-4
    # A GPU multiplies coarsely where no more than this precision is asked for: such products have 2 to 3 digits.
    coarse_precision: float = 0.01
    # No search for eigenvalues behind the outermost ends before so many products: of these a small residual tells of
    # some eigenvalue near, not of which. One below this share of the largest lies where a random vector mostly lies:
    # it is found after so many products, when it has not moved over the last ones: so many, or that share of all.
    least_steps: int = 8
    hidden_share: float = 0.1
    hidden_steps: int = 20
    settled_steps: int = 5
    settled_share: float = 0.2
    # Matrices with so many rows or columns are decomposed for their norm, as are larger ones after a restart of the
    # search for each so many rows, and some more: that takes the time of about a third as many products as there are
    # rows.
    decomposed_matrix: int = 512
    rows_a_restart: int = 60
    least_restarts: int = 10
    # As many rows at most where an inverse is wanted, which draws tell with far more noise than one eigenvalue.
    inverted_matrix: int = 1024
    # Units of a network with branches, each of whose rescalings takes a product of its own (`psi_trace`).
    few_units: int = 64
    # Gradients of so many outputs by the input are taken one by one; of more so many random mixtures for each sample.
    few_outputs: int = 128
    output_draws: int = 64
    # So many of them are tried one by one where the nearest is looked for (`local_linear_margin`).
    nearest_classes: int = 32
    # A loss of one's own with more outputs is not written out: its Hessian takes outputs² numbers for each sample.
    dense_outputs: int = 64

    # --- Decisions (`flatscope.decisions`)
    # Changes of the weights that one sweep predicts, and those that are measured between two looks at the clock.
    predicted_together: int = 1024
    measured_together: int = 32
    # Random columns of the first pass that predicts rises: every sample has its own, so that few tell their error. They
    # end where their error is at most this share of the one over samples: they then add 3 % to it.
    predicting_draws: int = 4
    noise_share: float = 0.25
    # Products for the traces of layers that columns do not give: these only rank the layers.
    ranking_products: int = 256
    # Relative error of the diagonal by which pruning ranks weights: their values span many orders of magnitude.
    ranking_precision: float = 0.1
    # Groups of samples, from whose spread errors come where values of single samples are not known.
    error_groups: int = 16

    # --- Memory (`flatscope.curvature.memory`): one budget, of which every kind of pass has its share
    # One batch of a sweep. On a CPU what fits the caches: more is slower there.
    sweep_memory: MemoryShare = MemoryShare(asked=1.0, free=0.5, least=48 * MIB)
    # But calls for hardly any samples are slower still: so many samples with so many columns go together up to here.
    small_sweep: int = 256 * MIB
    few_samples: int = 8
    few_columns_together: int = 4
    most_columns_together: int = 32
    # Autograd keeps at most so many times what known operations compute: places of maxima are whole numbers of twice
    # the size, some results are copied. Where all samples fit even then, nothing is measured.
    kept_of_computed: float = 4.0
    # One batch of products; on a CPU up to the second number where weights are many, as they are read once a batch.
    batch_memory: MemoryShare = MemoryShare(asked=0.5, free=0.125, least=96 * MIB)
    large_batch: int = GIB
    # And no fewer samples, whose calls would cost the time, or more, which would save none.
    least_batch: int = 32
    most_batch: int = 4096
    # What stays between passes: graphs of batches, pieces of layers' blocks, a basis that deflates.
    kept_memory: MemoryShare = MemoryShare(asked=0.25, free=0.125, least=GIB)
    # Gradients of single samples that are formed together: what the caches of a CPU hold.
    gradient_bytes: int = 16 * MIB
    # Those that torch.func forms, whose calls cost more; where that is fewer samples, a call costs more than its
    # arithmetic, and what passes the layers is read instead.
    transformed_bytes: int = 128 * MIB
    transformed_samples: int = 16
    # Patches, columns and gradients of a layer that are read together on a CPU: LeNet-5 took 8 % longer with 16 MiB,
    # and with 2.
    reading_bytes: int = 8 * MIB
    # Vectors that are multiplied together.
    block_memory: MemoryShare = MemoryShare(asked=0.25, free=0.125, least=256 * MIB)
    # What is known of lines through weight space; activations need as much again.
    lines_memory: MemoryShare = MemoryShare(asked=0.25, free=1 / 6, least=256 * MIB)
    # Samples, and what layers answer on them, that stay on the device from pass to pass.
    kept_data: int = GIB
    # A table whose network is not looked at yet holds it, where its weights take up to so many bytes.
    waiting_network: int = 64 * MIB
    # A Krylov space.
    krylov_memory: MemoryShare = MemoryShare(asked=0.25, free=1 / 16, least=GIB)

    # --- Networks that run together (`flatscope.perturbation`, `flatscope.landscapes`)
    # Those with other weights, at most so many with so many bytes of weights, go together where a call costs more than
    # its arithmetic: on a CPU up to so many samples; on a GPU up to so many samples times networks in one call, of a
    # landscape more, as nothing is differentiated.
    stacked_networks: int = 16
    stacked_bytes: int = 256 * MIB
    stacked_samples: int = 64
    stacked_rows: int = 4096
    landscape_rows: int = 2**14
    # Samples of a batch up to which several chains run as one on a CPU too.
    chain_samples: int = 512
    # Points of a line that a landscape keeps together.
    line_points: int = 8
    # A batch of a landscape on a GPU where nobody asked for another.
    landscape_batch: int = 2048
    # Pairs of networks, directions and numbers that are drawn together: results must not hang on the memory there is.
    drawn_pairs: int = 32
    drawn_directions: int = 1024
    drawn_numbers: int = 2**26
    # Noise of inputs that is held at once, in numbers.
    noise_numbers: int = 2**24
    # Mini-batches whose samples one pass over the data collects.
    collected_batches: int = 32
    # Products with path values at a time, each of which has a tensor of all weights; those with a network's weights on
    # a GPU.
    path_products: int = 8
    gpu_products: int = 4

    @property
    def first_look(self) -> int:
        """Draws of single numbers before their error is looked at."""
        return self.least_freedom + 1


STANDARD = Limits()
